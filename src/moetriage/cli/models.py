"""Turn what the user calls a model into a path.

In: a path or ``hf:owner/repo[:file-glob]``. Out: the path of a GGUF file (the first shard of a split one), downloaded if need be.
"""

from __future__ import annotations

from pathlib import Path


def model_path(model: str) -> Path:
    """Return the model's file. Raises UsageError for a repository that cannot be had; a local path is checked by whoever reads it."""
    if not model.startswith("hf:"):
        return Path(model)
    from moetriage.gguf.hub import fetch

    return fetch(model)
