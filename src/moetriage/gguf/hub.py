"""Get a model from the Hugging Face hub: ``hf:owner/repo[:file-glob]`` in, the path of a GGUF file out.

All shards of a split model are fetched into one folder, the hub client's own cache, where they are found again without a network. The
client is an optional extra and is imported only here; it reads HF_ENDPOINT, HF_HOME and HF_TOKEN itself.
"""

from __future__ import annotations

import fnmatch
import importlib
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from moetriage.errors import UsageError

_SPEC = re.compile(r"hf:(?P<repo>[\w.-]+/[\w.-]+)(?::(?P<glob>.+))?")
_SHARD = re.compile(r"(?P<prefix>.+)-\d{5}-of-(?P<count>\d{5})\.gguf")
#: Models of a repository that an error lists.
_SHOWN = 6


def fetch(spec: str) -> Path:
    """Return the path of the model that ``spec`` names, downloaded if it is not in the client's cache.

    Raises UsageError if the spec is malformed, the client is not installed, the repository cannot be had, or not exactly one model matches.
    """
    match = _SPEC.fullmatch(spec)
    if match is None:
        raise UsageError(f"{spec}: must be hf:owner/repo or hf:owner/repo:file-glob")
    client, repo = _client(spec), match["repo"]
    names = choose(spec, _names(client, spec, repo), match["glob"])
    try:
        paths = [Path(client.hf_hub_download(repo, name)) for name in names]
    except Exception as error:  # the client passes on what its HTTP libraries raise, and those share no base class
        raise UsageError(f"{spec}: cannot be downloaded: {_reason(error)}") from error
    return paths[0]


def choose(spec: str, names: Sequence[str], glob: str | None) -> list[str]:
    """Return the files of the one model among ``names`` that matches ``glob``, shards in order.

    glob: matched against the path in the repository and against the file's name alone; None takes every GGUF file.
    Raises UsageError if no model matches, or several, or one without all of its shards.
    """
    models: dict[str, list[str]] = {}
    for name in sorted(names):
        if name.endswith(".gguf") and (glob is None or any(fnmatch.fnmatchcase(n, glob) for n in (name, name.rpartition("/")[2]))):
            shard = _SHARD.fullmatch(name)
            models.setdefault(shard["prefix"] if shard else name, []).append(name)
    if not models:
        raise UsageError(f"{spec}: no GGUF file there matches; it has {_listed(sorted(n for n in names if n.endswith('.gguf')))}")
    if len(models) > 1:
        raise UsageError(f"{spec}: {len(models)} models match, name one of them after a colon: {_listed(sorted(models))}")
    (files,) = models.values()
    shard = _SHARD.fullmatch(files[0])
    if shard is not None and len(files) != int(shard["count"]):
        raise UsageError(f"{spec}: matches {len(files)} of the {int(shard['count'])} shards of {shard['prefix']}; a glob must match all")
    return files


def _client(spec: str) -> Any:
    try:
        client, utils = (importlib.import_module(f"huggingface_hub{part}") for part in ("", ".utils"))
    except ImportError as error:
        raise UsageError(f"{spec}: needs the hub's client: pip install 'moetriage[hub]', or give a local file") from error
    utils.logging.set_verbosity_error()
    if not sys.stderr.isatty():
        utils.disable_progress_bars()
    return client


def _names(client: Any, spec: str, repo: str) -> list[str]:
    """Return the files of a repository, or those that are in the cache where it cannot be asked."""
    try:
        return list(client.list_repo_files(repo))
    except Exception as error:  # as above
        names = _cached_names(client, repo)
        if not names:
            raise UsageError(f"{spec}: cannot be downloaded: {_reason(error)}") from error
        return names


def _cached_names(client: Any, repo: str) -> list[str]:
    try:
        cached = [found for found in client.scan_cache_dir().repos if found.repo_id == repo and found.repo_type == "model"]
    except Exception:  # there is none, or not one that can be read: that nothing could be downloaded is the news
        return []
    revisions = [revision for found in cached for revision in found.revisions]
    newest = max(revisions, key=lambda revision: revision.last_modified, default=None)
    return [] if newest is None else [str(file.file_path.relative_to(newest.snapshot_path)) for file in newest.files]


def _reason(error: Exception) -> str:
    """Return one line; the client's own messages go on about request ids and documentation."""
    response = getattr(error, "response", None)
    if response is not None and response.status_code in (401, 403, 404):
        return f"there is no such repository or file, or it needs a login (HTTP {response.status_code})"
    return str(error).strip().split("\n", 1)[0] or type(error).__name__


def _listed(names: Sequence[str]) -> str:
    if not names:
        return "none at all"
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
