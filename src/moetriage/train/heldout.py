"""Which files are held out: documents in, the two sides out. Chosen by a hash of the name, and clean: no near copy is trained on.

Deliberately unknown here: where the documents come from (``corpus``) and how they are written (``data_build``).
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from moetriage.errors import UsageError
from moetriage.train.corpus import Document

#: Files of which this share of the hash space holds out.
HELDOUT_FRACTION = 0.02
#: Where the chosen files have less than this part of the bytes that the fraction stands for, the next ones are tried.
LEAST_PART = 0.25
#: Of a corpus of one file, this share at its end.
END_FRACTION = 0.05
#: Files that would make more than this share of all bytes held out are trained on instead.
MAX_HELDOUT_BYTES = 0.5
#: A held-out file of which more than this share of the lines is in the training texts would measure memory: it is trained on instead.
MAX_SHARED_LINES = 0.5
#: Shorter lines ("else:", "return None") are everywhere and say nothing about where a file comes from.
MIN_LINE = 20


@dataclass(frozen=True, kw_only=True)
class Split:
    """A corpus divided by file.

    ``moved``: names that their hash would hold out but whose lines are mostly in other files. ``copies``: names held out all the same, as
    no file of the corpus is anything but a near copy of others.
    """

    train: Sequence[Document]
    heldout: Sequence[Document]
    moved: Sequence[str]
    copies: Sequence[str]


def split(documents: Sequence[Document], fraction: float = HELDOUT_FRACTION) -> Split:
    """Hold out about ``fraction`` of the files, chosen by a hash of the name: the choice stays when other files come or go.

    A chosen file that shares more than half of its longer lines with training files goes to these. Where too little is left, the next files
    by hash are taken. Never more than half of the bytes are held out, and at least one file is. Of a single file the end is held out.
    Raises UsageError if there is nothing to divide.
    """
    if len(documents) < 2:
        return _divided(documents)
    n_bytes = sum(document.n_bytes for document in documents)
    order = sorted(documents, key=lambda document: _hash_fraction(document.name))
    choice = _Choice(documents, room=int(n_bytes * MAX_HELDOUT_BYTES))
    for document in order:
        if _hash_fraction(document.name) < fraction:
            choice.hold_out(document)
    choice.move_copies()
    for document in order:
        if choice.n_bytes >= fraction * LEAST_PART * n_bytes and choice.held:
            break
        choice.hold_out(document)
        choice.move_copies()
    copies = [] if choice.held else [next(document.name for document in order if document.n_bytes <= choice.room)]
    heldout = {*choice.held, *copies}
    return Split(
        train=[document for document in documents if document.name not in heldout],
        heldout=[document for document in documents if document.name in heldout],
        moved=sorted(choice.moved - heldout),
        copies=copies,
    )


class _Choice:
    """The files held out so far, with how many of the others hold each line. ``room``: the most bytes that may be held out."""

    def __init__(self, documents: Sequence[Document], room: int) -> None:
        self.room = room
        self.held: dict[str, Document] = {}
        self.moved: set[str] = set()
        self.n_bytes = 0
        self._trained = Counter(line for document in documents for line in set(_long_lines(document.text)))

    def hold_out(self, document: Document) -> None:
        """Hold a file out, unless it is, was moved, or takes more than the room."""
        if document.name in self.held or document.name in self.moved or self.n_bytes + document.n_bytes > self.room:
            return
        self.held[document.name] = document
        self.n_bytes += document.n_bytes
        self._trained.subtract(set(_long_lines(document.text)))

    def move_copies(self) -> None:
        """Move the near copies of training files to these, until there is none: one that moves may have copies itself."""
        while copies := [document for document in self.held.values() if self._shared(document) > MAX_SHARED_LINES]:
            for document in copies:
                del self.held[document.name]
                self.moved.add(document.name)
                self.n_bytes -= document.n_bytes
                self._trained.update(set(_long_lines(document.text)))

    def _shared(self, document: Document) -> float:
        own = _long_lines(document.text)
        return sum(self._trained[line] > 0 for line in own) / len(own) if own else 0.0


def _divided(documents: Sequence[Document]) -> Split:
    """Hold out the end of the only file, from a line's beginning where it has lines; the parts are named as slices of its characters."""
    text = documents[0].text if documents else ""
    wanted = int(len(text) * (1 - END_FRACTION))
    cut = text.rfind("\n", 0, wanted) + 1 or wanted
    if not 0 < cut < len(text):
        raise UsageError(f"a corpus of {len(text)} characters: too small to train on a part and hold out another; give more text")
    name = documents[0].name
    train, heldout = Document(f"{name}[:{cut}]", text[:cut]), Document(f"{name}[{cut}:]", text[cut:])
    known, own = set(_long_lines(train.text)), _long_lines(heldout.text)
    shared = sum(line in known for line in own) > MAX_SHARED_LINES * len(own)
    return Split(train=[train], heldout=[heldout], moved=[], copies=[heldout.name] if shared else [])


def _hash_fraction(name: str) -> float:
    # A file's name may hold bytes that are no UTF-8; Python spells them as lone surrogates.
    return int.from_bytes(hashlib.sha256(name.encode(errors="surrogateescape")).digest()[:8]) / 2**64


def _long_lines(text: str) -> list[str]:
    return [stripped for line in text.splitlines() if len(stripped := line.strip()) >= MIN_LINE]
