"""Turn what the user calls a model into a path.

In: a path, ``hf:owner/repo[:file-glob]`` or ``bundled``. Out: the path of a GGUF file (the first shard of a split one), downloaded if need
be.
"""

from __future__ import annotations

from pathlib import Path

#: The small trained model that comes with the package.
BUNDLED = "bundled"


def model_path(model: str) -> Path:
    """Return the model's file. Raises UsageError for a repository that cannot be had; a local path is checked by whoever reads it."""
    if model == BUNDLED and not Path(model).exists():
        from moetriage.demo.text import bundled_model

        return bundled_model()
    if not model.startswith("hf:"):
        return Path(model)
    from moetriage.gguf.hub import fetch

    return fetch(model)
