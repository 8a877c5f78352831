"""``moetriage data build``: a corpus in; a folder with tokenizer, token shards, the held-out text and a manifest out.

Everything is written beside the target and renamed at the end, so that a folder that exists is whole. The same corpus gives the same bytes.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from moetriage.errors import UsageError
from moetriage.train.corpus import Corpus, Document
from moetriage.train.data_folder import FORMAT, HELDOUT_TEXT, MANIFEST, not_ours
from moetriage.train.files import beside, remove_leftovers, replace_folder
from moetriage.train.heldout import Split, split
from moetriage.train.model_config import DEFAULT_VOCAB
from moetriage.train.shards import write_file, write_shards
from moetriage.train.tokenizer import FILE_NAME, MAX_WORD, Tokenizer, has_endless_word, train_tokenizer

#: Below this nothing can be learned that deserves the name, and a held-out part would be a handful of lines.
MIN_TRAIN_BYTES = 100_000


def build(
    corpus: Corpus,
    out: Path,
    *,
    vocab_size: int = DEFAULT_VOCAB,
    force: bool = False,
    progress: Callable[[str], None] = lambda _what: None,
) -> dict[str, Any]:
    """Write the data and return the manifest.

    out: a folder that does not exist; ``force`` replaces one that holds what ``build`` wrote and nothing else. progress: told what is being
    done.
    Raises UsageError for a corpus that is too small, a vocabulary it cannot fill, and a folder that cannot be written; nothing is left
    behind then.
    """
    _check_target(out, force=force)
    progress("splitting")
    parts = split(corpus.documents)
    _refuse_too_little(parts)
    progress("learning the vocabulary")
    _refuse_endless_words(parts.train)
    tokenizer = train_tokenizer((document.text for document in parts.train), vocab_size)
    remove_leftovers(out)
    partial = beside(out)
    try:
        partial.mkdir(parents=True)
        manifest: dict[str, Any] = {
            "format": FORMAT,
            "vocab_size": tokenizer.vocab_size,
            "tokenizer": {"file": FILE_NAME, "sha256": write_file(partial / FILE_NAME, tokenizer.as_json().encode())},
            "corpus": corpus.facts | _split_facts(parts),
        }
        for name, documents in (("train", parts.train), ("heldout", parts.heldout)):
            progress(f"tokenizing the {name} files")
            manifest[name] = _write_part(partial, name, documents, tokenizer)
        manifest["heldout"]["text"] = _write_text(partial, parts.heldout)
        write_file(partial / MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode())
        _check_target(out, force=force)  # another process may have been faster
        replace_folder(partial, out)
    except OSError as error:
        raise UsageError(f"{out}: cannot be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return manifest


def _refuse_too_little(parts: Split) -> None:
    n_bytes = sum(document.n_bytes for document in parts.train)
    if n_bytes >= MIN_TRAIN_BYTES:
        return
    heldout = sorted(parts.heldout, key=lambda document: -document.n_bytes)
    names = ", ".join(f"{document.name} with {document.n_bytes}" for document in heldout[:3]) + (", ..." if len(heldout) > 3 else "")
    raise UsageError(
        f"corpus too small: {n_bytes} bytes to train on, at least {MIN_TRAIN_BYTES} are needed (held out: {names}); "
        "give more text with --text"
    )


def _split_facts(parts: Split) -> dict[str, object]:
    facts: dict[str, object] = {"moved_to_training": list(parts.moved)}
    return facts | {"heldout_near_copies": list(parts.copies)} if parts.copies else facts


def _refuse_endless_words(documents: Sequence[Document]) -> None:
    for document in documents:
        if has_endless_word(document.text):
            raise UsageError(
                f"{document.name}: holds a word of more than {MAX_WORD} characters, of which no vocabulary can be learned in reasonable "
                "time; break it up, or leave the file out"
            )


def _check_target(out: Path, *, force: bool) -> None:
    """Raise UsageError unless ``out`` is free, or, with ``force``, holds nothing but what ``build`` wrote."""
    try:
        if out.is_symlink():
            raise UsageError(f"{out}: is a link; name the folder it leads to, {out.readlink()}, or another")
        if not out.exists():
            return
        if not force:
            raise UsageError(f"{out}: exists already; name another folder, or replace it with --force")
        other = not_ours(out)
    except OSError as error:
        raise UsageError(f"{out}: cannot be read: {error.strerror or error}") from error
    if other is not None:
        raise UsageError(
            f"{other}: is nothing that moetriage data build wrote, so --force does not replace {out}; move it away, or name another folder"
        )


def _write_part(folder: Path, name: str, documents: Sequence[Document], tokenizer: Tokenizer) -> dict[str, Any]:
    ids = tokenizer.encode_files([document.text for document in documents])
    files = [{"name": document.name, "bytes": document.n_bytes, "sha256": document.sha256} for document in documents]
    n_bytes = sum(document.n_bytes for document in documents)
    return {"bytes": n_bytes, "tokens": len(ids), "shards": write_shards(folder, name, ids), "files": files}


def _write_text(folder: Path, documents: Sequence[Document]) -> dict[str, Any]:
    """Keep the held-out files one behind the other: bits per byte, and what gzip makes of them, are about the text itself."""
    content = "".join(document.text for document in documents).encode()
    return {"file": HELDOUT_TEXT, "bytes": len(content), "sha256": write_file(folder / HELDOUT_TEXT, content)}
