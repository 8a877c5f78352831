"""How few bits a text takes without a model of ours: gzip, and byte trigrams counted on the training text. Bytes in, bits per byte out.

The trigram model interpolates with bigrams, single bytes and the uniform distribution by Witten and Bell's rule (1991, method C): a context
trusts its own counts the more, the fewer different bytes it has been followed by. It has no setting to tune.
"""

from __future__ import annotations

import gzip
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

_BYTES = 256
#: Bytes counted at a time; numpy's counting takes eight bytes for each.
_CHUNK = 4_000_000
#: What the first two bytes of a text are taken to follow.
_BEFORE = b"\n\n"


def gzip_bits_per_byte(text: bytes) -> float:
    """Return the size of the whole text packed by gzip at level 9, in bits per byte."""
    return 8 * len(gzip.compress(text, 9, mtime=0)) / len(text)


def trigram_bits_per_byte(train: Iterable[bytes], heldout: bytes) -> float:
    """Return the loss of the trigram model of ``train`` (pieces of any length) on ``heldout``, in bits per byte."""
    counts = _counts(train)
    first, second, third = _triples(np.frombuffer(_BEFORE + heldout, dtype=np.uint8))
    probs = np.full(len(third), 1 / _BYTES)
    for context, table in (
        (np.zeros_like(first), counts.sum(axis=(0, 1))[np.newaxis]),
        (second, counts.sum(axis=0)),
        (first * _BYTES + second, counts.reshape(-1, _BYTES)),
    ):
        probs = _interpolated(table, context, third, probs)
    return float(-np.log2(probs).mean())


def _counts(train: Iterable[bytes]) -> NDArray[np.int64]:
    """Return how often each byte followed each two, (256, 256, 256)."""
    counts = np.zeros(_BYTES**3, dtype=np.int64)
    tail = _BEFORE
    for piece in train:
        for start in range(0, len(piece), _CHUNK):
            data = tail + piece[start : start + _CHUNK]
            first, second, third = _triples(np.frombuffer(data, dtype=np.uint8))
            counts += np.bincount((first * _BYTES + second) * _BYTES + third, minlength=_BYTES**3)
            tail = data[-2:]
    return counts.reshape(_BYTES, _BYTES, _BYTES)


def _triples(data: NDArray[np.uint8]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    wide = data.astype(np.int64)
    return wide[:-2], wide[1:-1], wide[2:]


def _interpolated(
    counts: NDArray[np.int64], context: NDArray[np.int64], byte: NDArray[np.int64], lower: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Return (n(context, byte) + kinds * lower) / (n(context) + kinds), where kinds is the number of different bytes seen there."""
    total, kinds = counts.sum(axis=1)[context], (counts > 0).sum(axis=1)[context]
    found: NDArray[np.float64] = np.where(total > 0, (counts[context, byte] + kinds * lower) / np.maximum(total + kinds, 1), lower)
    return found
