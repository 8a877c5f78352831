"""Texts to train on: a source named by the user in, documents without duplicates out, with counts of what was left out.

The default source is always there: the standard library of the interpreter that runs this, its sources, its tests where the distribution
ships them, and pydoc's topics. Deliberately unknown here: which files are held out (``heldout``), tokens and shards.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from moetriage.errors import UsageError
from moetriage.train.data_folder import holds_data

#: What of the standard library is text to learn from, and what of anybody's folder.
LIBRARY_SUFFIXES = (".py", ".rst", ".txt")
SUFFIXES = (*LIBRARY_SUFFIXES, ".md")
#: Not part of the library, or written by the build of this one interpreter, with its folders in it.
SKIPPED_FOLDERS = frozenset({"__pycache__", "dist-packages", "lib-dynload", "site-packages"})
SKIPPED_PREFIXES = ("_sysconfigdata", "config-")
TEST_FOLDERS = frozenset({"idle_test", "test", "tests"})
#: pydoc's topics are one file of escaped strings; they are taken as the texts that they are.
TOPICS_FILE = "pydoc_data/topics.py"
#: More text than this is held in memory by nobody who trains a model of this size.
MAX_FILE_BYTES = 1 << 30
#: Why files are left out that are not even opened.
IN_DATA, LINKED, SKIPPED = "in data folders", "linked folder", "of installed packages or Python's build"


@dataclass(frozen=True)
class Document:
    """One file: ``name`` is its path within the source, with forward slashes."""

    name: str
    text: str

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.text.encode()).hexdigest()

    @property
    def n_bytes(self) -> int:
        return len(self.text.encode())


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Documents of one source in a fixed order. ``facts`` goes into the manifest: what the source is, its licence, what was left out."""

    documents: Sequence[Document]
    facts: dict[str, object] = field(default_factory=dict)


class NotTextError(UsageError):
    """Report a file that is no text; ``reason`` says why in a word or two, to count by."""

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


def stdlib_corpus(root: Path | None = None) -> Corpus:
    """Return the standard library's texts, sorted by path.

    root: the library's folder; None is the running interpreter's. A missing tests folder (some distributions package it apart) is no error:
    the facts say how much was found with it and without.
    """
    folder = Path(sysconfig.get_path("stdlib")) if root is None else root
    left_out: Counter[str] = Counter()
    found = [
        Document(name, text) for name, text in _texts_below(folder, left_out, LIBRARY_SUFFIXES) if name != TOPICS_FILE
    ] + _pydoc_topics(folder)
    del left_out[SKIPPED]  # no part of the library
    documents, duplicates = without_duplicates(sorted(found, key=lambda document: document.name))
    in_tests = sum(document.n_bytes for document in documents if TEST_FOLDERS & set(document.name.split("/")[:-1]))
    facts: dict[str, object] = {
        "source": "standard library of the running Python interpreter: sources, tests where installed, pydoc topics",
        "python": sysconfig.get_python_version(),
        "licence": "Python Software Foundation License Version 2 (the file LICENSE.txt of the Python distribution)",
        "bytes_in_tests": in_tests,
        "duplicates_left_out": duplicates,
    }
    return Corpus(documents=documents, facts=facts | _left_out_fact(left_out))


def files_corpus(paths: Sequence[Path]) -> Corpus:
    """Return the texts of files, and of all text files below folders, in the order given.

    What of the right kind below a folder is no UTF-8 text is left out and counted. Raises UsageError for a file named itself that is none,
    and for a folder without any text.
    """
    found: list[Document] = []
    left_out: Counter[str] = Counter()
    for path in paths:
        if path.is_dir():
            found += _documents_below(path, left_out)
        else:
            found.append(Document(path.name, _text_of(path)))
    documents, duplicates = without_duplicates(found)
    facts: dict[str, object] = {"source": "files named with --text", "duplicates_left_out": duplicates}
    return Corpus(documents=documents, facts=facts | _left_out_fact(left_out))


def _documents_below(folder: Path, left_out: Counter[str]) -> list[Document]:
    here: Counter[str] = Counter()
    found = [Document(f"{folder.name}/{name}", text) for name, text in _texts_below(folder, here)]
    if not found:
        why = f" ({left_out_line(+here)})" if +here else ""
        raise UsageError(f"--text {folder}: no file in it is text of the kinds {', '.join(SUFFIXES)}{why}; name files of other kinds")
    left_out.update(here)
    return found


def _left_out_fact(left_out: Counter[str]) -> dict[str, object]:
    return {"left_out": dict(sorted((+left_out).items()))} if +left_out else {}


def without_duplicates(documents: Iterable[Document]) -> tuple[list[Document], int]:
    """Return the first of each text, and how many others there were. Names that occur again get a number, so that each is one file."""
    texts: set[str] = set()
    names: dict[str, int] = {}
    kept, dropped = [], 0
    for document in documents:
        if document.sha256 in texts:
            dropped += 1
            continue
        texts.add(document.sha256)
        again = names[document.name] = names.get(document.name, 0) + 1
        kept.append(document if again == 1 else Document(f"{document.name}#{again}", document.text))
    return kept, dropped


def left_out_line(counts: Mapping[str, int]) -> str:
    """Return how many files were left out and why: "23 files left out: 21 not UTF-8, 1 empty, 1 no regular file"."""
    total = sum(counts.values())
    reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])))
    return f"{total} file{'s' if total > 1 else ''} left out: {reasons}"


def _texts_below(folder: Path, left_out: Counter[str], suffixes: tuple[str, ...] = SUFFIXES) -> Iterator[tuple[str, str]]:
    """Yield (path within the folder, text), sorted; what of the right kind cannot be read as text is counted in ``left_out``."""
    for path in _paths_below(folder, left_out, suffixes):
        try:
            yield path.relative_to(folder).as_posix(), _text_of(path)
        except NotTextError as error:
            left_out[error.reason] += 1


def _paths_below(folder: Path, left_out: Counter[str], suffixes: tuple[str, ...]) -> Iterator[Path]:
    """Yield the files of the right kind, sorted; those in data folders and of Python's build are counted in ``left_out``, as links are."""
    for parent, folders, files in os.walk(folder, onerror=lambda _error: left_out.update(["unreadable"])):
        if holds_data(files):  # what is held out there must not be trained on here
            left_out[IN_DATA] += _n_files_below(Path(parent), suffixes)
            folders.clear()
            continue
        linked = {name for name in folders if Path(parent, name).is_symlink()}
        skipped = {name for name in folders if _is_skipped(name)} - linked
        left_out[LINKED] += len(linked)
        left_out[SKIPPED] += sum(_n_files_below(Path(parent, name), suffixes) for name in skipped)
        folders[:] = sorted(set(folders) - linked - skipped)
        for name in sorted(name for name in files if name.endswith(suffixes)):
            if _is_skipped(name):
                left_out[SKIPPED] += 1
            else:
                yield Path(parent, name)


def _is_skipped(name: str) -> bool:
    return name in SKIPPED_FOLDERS or name.startswith(SKIPPED_PREFIXES)


def _n_files_below(folder: Path, suffixes: tuple[str, ...]) -> int:
    return sum(name.endswith(suffixes) for _parent, _folders, files in os.walk(folder) for name in files)


def _text_of(path: Path) -> str:
    """Return the text of a file. Raises NotTextError for what is none: a pipe or device, too much, other encodings, NUL, nothing."""
    try:
        size = path.stat().st_size
        if not path.is_file():  # a pipe or a device may have no end
            raise NotTextError(f"--text {path}: is no regular file; write its text to one first", reason="no regular file")
        if size > MAX_FILE_BYTES:
            message = f"--text {path}: has {size} bytes, {MAX_FILE_BYTES} at most are read; take a part of it"
            raise NotTextError(message, reason="too large")
        text = path.read_bytes().decode()
    except OSError as error:
        raise NotTextError(f"--text {path}: cannot be read: {error.strerror or error}", reason="unreadable") from error
    except UnicodeDecodeError as error:
        message = f"--text {path}: is no UTF-8 text (byte {error.start}); convert it, or leave it out"
        raise NotTextError(message, reason="not UTF-8") from error
    if "\0" in text:
        raise NotTextError(f"--text {path}: is no text, character {text.index(chr(0))} is NUL; leave it out", reason="with NUL")
    if not text:
        raise NotTextError(f"--text {path}: is empty; leave it out", reason="empty")
    return text


def _pydoc_topics(folder: Path) -> list[Document]:
    """Return what ``help("topics")`` shows, one document a topic; the file is parsed, not run."""
    import ast

    try:
        source = _text_of(folder / TOPICS_FILE)
    except NotTextError:
        return []
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            topics = ast.literal_eval(node.value)
            return [Document(f"pydoc_data/topics/{name}.txt", text) for name, text in sorted(topics.items())]
    return []
