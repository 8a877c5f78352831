"""What a data folder holds: a folder in; its manifest, or whether something in it is not ours, out.

The builder asks before it replaces a folder, the reader of texts before it descends into one, ``data`` when it opens one. Deliberately
unknown here: what is in the files.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from moetriage.errors import UsageError
from moetriage.train.files import damaged, read_object
from moetriage.train.model_config import MAX_VOCAB

MANIFEST = "manifest.json"
HELDOUT_TEXT = "heldout.txt"
FORMAT = 1
#: What lies beside the held-out text, in a folder that was not finished or has lost a part, too.
_BESIDE_HELDOUT = re.compile(r"manifest\.json|tokenizer\.json|(train|heldout)-\d{5}\.bin")


def holds_data(names: Collection[str]) -> bool:
    """Say whether files of these names make a data folder, a damaged one included: its held-out text must never be trained on."""
    return HELDOUT_TEXT in names and any(_BESIDE_HELDOUT.fullmatch(name) for name in names)


def read_manifest(folder: Path, *, hint: str) -> dict[str, Any]:
    """Return a data folder's manifest. hint: the next step, for one that is damaged.

    Raises UsageError, with the path, if it cannot be read, is of another format, or lacks what is read later.
    """
    path = folder / MANIFEST
    if path.exists() and not path.is_file():  # a pipe would be waited for without end
        raise UsageError(f"{path}: is no regular file; {hint}")
    manifest = read_object(path, hint=hint)
    if manifest.get("format") != FORMAT:
        raise UsageError(f"{path}: is not in format {FORMAT}, the one this version reads; {hint}")
    with damaged(path, hint=hint):
        _check(manifest)
    return manifest


def not_ours(folder: Path) -> Path | None:
    """Return something in a folder that ``moetriage data build`` did not write, the folder where that is all there is; None if all is ours.

    Without a whole manifest of our format nothing is ours, and with one what it names. Raises OSError for a folder that cannot be listed.
    """
    if not folder.is_dir():
        return folder
    found = sorted(folder.iterdir(), key=lambda path: (path.name != MANIFEST, path.name))
    try:
        own = {MANIFEST, *(file["file"] for file in _files(read_manifest(folder, hint="")))}
    except UsageError:
        return found[0] if found else folder
    return next((path for path in found if path.name not in own or path.is_symlink() or not path.is_file()), None)


def _files(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    return [manifest["tokenizer"], manifest["heldout"]["text"], *manifest["train"]["shards"], *manifest["heldout"]["shards"]]


def _check(manifest: dict[str, Any]) -> None:
    """Raise UsageError, or what ``damaged`` takes for one, if the manifest lacks what is read later."""
    vocab_size = manifest["vocab_size"]
    if type(vocab_size) is not int or not 1 <= vocab_size <= MAX_VOCAB:
        raise ValueError(f"vocab_size {vocab_size!r} is no number from 1 to {MAX_VOCAB}")
    for file in _files(manifest):
        name, _ = file["file"], bytes.fromhex(file["sha256"])
        if Path(name).name != name or not name.isprintable():
            raise ValueError(f"{name!r} is no name of a file in the folder")
    for part in ("train", "heldout"):
        for shard in manifest[part]["shards"]:
            if type(shard["tokens"]) is not int or shard["tokens"] < 0:
                raise ValueError(f"{shard['file']} has {shard['tokens']!r} tokens")
    if type(manifest["heldout"]["bytes"]) is not int or manifest["heldout"]["bytes"] <= 0:
        raise ValueError("heldout.bytes is no number of bytes")
