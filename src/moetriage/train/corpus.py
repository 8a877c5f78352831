"""Texts to train on: a source named by the user in, documents without duplicates and their held-out split out.

The default source is always there: the standard library of the interpreter that runs this, its sources, its tests where the distribution
ships them, and pydoc's topics. Deliberately unknown here: tokens and files of our own (``tokenizer``, ``shards``).
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from moetriage.errors import UsageError

#: What of the standard library is text to learn from.
SUFFIXES = (".py", ".rst", ".txt")
#: Not part of the library, or written by the build of this one interpreter, with its folders in it.
SKIPPED_FOLDERS = frozenset({"__pycache__", "dist-packages", "lib-dynload", "site-packages"})
SKIPPED_PREFIXES = ("_sysconfigdata", "config-")
TEST_FOLDERS = frozenset({"idle_test", "test", "tests"})
#: pydoc's topics are one file of escaped strings; they are taken as the texts that they are.
TOPICS_FILE = "pydoc_data/topics.py"
#: Files of which this share of the hash space holds out.
HELDOUT_FRACTION = 0.02
#: A held-out file of which this share of the lines is in the training texts would measure memory: it is trained on instead.
MAX_SHARED_LINES = 0.5
#: More text than this is held in memory by nobody who trains a model of this size.
MAX_FILE_BYTES = 1 << 30
#: Shorter lines ("else:", "return None") are everywhere and say nothing about where a file comes from.
MIN_LINE = 20


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


@dataclass(frozen=True, kw_only=True)
class Split:
    """A corpus divided by file. ``moved``: names that the hash held out but whose lines are mostly in other files."""

    train: Sequence[Document]
    heldout: Sequence[Document]
    moved: Sequence[str]


def stdlib_corpus(root: Path | None = None) -> Corpus:
    """Return the standard library's texts, sorted by path.

    root: the library's folder; None is the running interpreter's. A missing tests folder (some distributions package it apart) is no error:
    the facts say how much was found with it and without.
    """
    folder = Path(sysconfig.get_path("stdlib")) if root is None else root
    found = [Document(name, text) for name, text in _texts_below(folder) if name != TOPICS_FILE] + _pydoc_topics(folder)
    documents, duplicates = without_duplicates(sorted(found, key=lambda document: document.name))
    in_tests = sum(document.n_bytes for document in documents if TEST_FOLDERS & set(document.name.split("/")[:-1]))
    facts: dict[str, object] = {
        "source": "standard library of the running Python interpreter: sources, tests where installed, pydoc topics",
        "python": sysconfig.get_python_version(),
        "licence": "Python Software Foundation License Version 2 (the file LICENSE.txt of the Python distribution)",
        "bytes_in_tests": in_tests,
        "duplicates_left_out": duplicates,
    }
    return Corpus(documents=documents, facts=facts)


def files_corpus(paths: Sequence[Path]) -> Corpus:
    """Return the texts of files, and of all text files below folders, in the order given.

    Raises UsageError for a file that is no UTF-8 text or empty, and for a folder without any text.
    """
    found: list[Document] = []
    for path in paths:
        if path.is_dir():
            below = [Document(f"{path.name}/{name}", text) for name, text in _texts_below(path)]
            if not below:
                raise UsageError(f"--text {path}: no file in it is text of the kinds {', '.join(SUFFIXES)}; name files of other kinds")
            found += below
        else:
            found.append(Document(path.name, _text_of(path)))
    documents, duplicates = without_duplicates(found)
    return Corpus(documents=documents, facts={"source": "files named with --text", "duplicates_left_out": duplicates})


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


def split(documents: Sequence[Document], fraction: float = HELDOUT_FRACTION) -> Split:
    """Hold out about ``fraction`` of the files, chosen by a hash of the name: the choice stays when other files come or go.

    A held-out file that shares more than half of its longer lines with training files goes to these. At least one file is held out.
    Raises UsageError if there are fewer than two.
    """
    if len(documents) < 2:
        raise UsageError(f"a corpus of {len(documents)} text files: at least 2 are needed, to train on one and hold out another")
    chosen = {document.name for document in documents if _hash_fraction(document.name) < fraction}
    if not chosen or len(chosen) == len(documents):
        chosen = {min(documents, key=lambda document: _hash_fraction(document.name)).name}
    train_lines = {line for document in documents if document.name not in chosen for line in _long_lines(document.text)}
    shared = {document.name for document in documents if document.name in chosen and _shared(document.text, train_lines) > MAX_SHARED_LINES}
    heldout = chosen - shared or chosen  # of a corpus of copies something is held out all the same
    return Split(
        train=[document for document in documents if document.name not in heldout],
        heldout=[document for document in documents if document.name in heldout],
        moved=sorted(chosen - heldout),
    )


def _hash_fraction(name: str) -> float:
    # A file's name may hold bytes that are no UTF-8; Python spells them as lone surrogates.
    return int.from_bytes(hashlib.sha256(name.encode(errors="surrogateescape")).digest()[:8]) / 2**64


def _long_lines(text: str) -> Iterator[str]:
    return (stripped for line in text.splitlines() if len(stripped := line.strip()) >= MIN_LINE)


def _shared(text: str, lines: set[str]) -> float:
    own = list(_long_lines(text))
    return sum(line in lines for line in own) / len(own) if own else 0.0


def _texts_below(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield (path within the folder, text), sorted; what cannot be read as text is no text."""
    for parent, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in SKIPPED_FOLDERS and not name.startswith(SKIPPED_PREFIXES))
        for name in sorted(files):
            path = Path(parent, name)
            if name.endswith(SUFFIXES) and not name.startswith(SKIPPED_PREFIXES) and path.is_file():
                text = _decoded(path)
                if text:
                    yield path.relative_to(folder).as_posix(), text


def _decoded(path: Path) -> str | None:
    """Return the text of a file, None if it is none: the library's tests hold files in every encoding and with broken ones."""
    try:
        text = _text_of(path)
    except UsageError:
        return None
    return text


def _text_of(path: Path) -> str:
    """Return the text of a file. Raises UsageError for what is none: a pipe or device, too much, other encodings, NUL, nothing."""
    try:
        size = path.stat().st_size
        if not path.is_file():  # a pipe or a device may have no end
            raise UsageError(f"--text {path}: is no regular file; write its text to one first")
        if size > MAX_FILE_BYTES:
            raise UsageError(f"--text {path}: has {size} bytes, {MAX_FILE_BYTES} at most are read; take a part of it")
        text = path.read_bytes().decode()
    except OSError as error:
        raise UsageError(f"--text {path}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"--text {path}: is no UTF-8 text (byte {error.start}); convert it, or leave it out") from error
    if "\0" in text:
        raise UsageError(f"--text {path}: is no text, character {text.index(chr(0))} is NUL; leave it out")
    if not text:
        raise UsageError(f"--text {path}: is empty; leave it out")
    return text


def _pydoc_topics(folder: Path) -> list[Document]:
    """Return what ``help("topics")`` shows, one document a topic; the file is parsed, not run."""
    import ast

    source = _decoded(folder / TOPICS_FILE)
    if source is None:
        return []
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            topics = ast.literal_eval(node.value)
            return [Document(f"pydoc_data/topics/{name}.txt", text) for name, text in sorted(topics.items())]
    return []
