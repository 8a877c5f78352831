"""Batches of token ids: a folder that ``moetriage data build`` wrote in, arrays out, each determined by seed and step alone.

Every epoch cuts the training ids into sequences at another offset and shuffles them, so that each is seen once an epoch; any step's batch
can be had without those before it, which is what resuming needs. Needs no torch.

Legend: B sequences, S positions.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moetriage.errors import UsageError
from moetriage.train.data_folder import MANIFEST, read_manifest
from moetriage.train.files import damaged
from moetriage.train.shards import TokenStream, verify
from moetriage.train.tokenizer import load_tokenizer

_AGAIN = "build the data again"
#: Ids that are looked at as one.
_PIECE = 1 << 20
Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Data:
    """Training and held-out ids with the manifest that says where they come from."""

    folder: Path
    manifest: dict[str, Any]

    @cached_property
    def train(self) -> TokenStream:
        return TokenStream(self.folder, self.manifest["train"]["shards"])

    @cached_property
    def heldout(self) -> TokenStream:
        return TokenStream(self.folder, self.manifest["heldout"]["shards"])

    @property
    def vocab_size(self) -> int:
        return int(self.manifest["vocab_size"])

    @property
    def tokenizer_path(self) -> Path:
        return self.folder / str(self.manifest["tokenizer"]["file"])

    @property
    def heldout_text(self) -> bytes:
        """The held-out files themselves, one behind the other."""
        return (self.folder / str(self.manifest["heldout"]["text"]["file"])).read_bytes()

    @property
    def digest(self) -> str:
        """sha256 of the training ids and the tokenizer, shortened: what a run was trained on."""
        return self._digest("train")

    @property
    def digest_with_heldout(self) -> str:
        """The same of the held-out ids, too: what a study was run on."""
        return self._digest("train", "heldout")

    def _digest(self, *names: str) -> str:
        shards = (shard["sha256"] for name in names for shard in self.manifest[name]["shards"])
        return hashlib.sha256("".join((self.manifest["tokenizer"]["sha256"], *shards)).encode()).hexdigest()[:16]

    def verify(self) -> None:
        """Compare all files with the manifest and with each other; raises UsageError for one that was changed or does not belong there."""
        parts = [self.manifest[name]["shards"] for name in ("train", "heldout")]
        own = [self.manifest["tokenizer"], self.manifest["heldout"]["text"]]
        verify(self.folder, [*parts[0], *parts[1], *own])
        largest = max(int(piece.max(initial=0)) for stream in (self.train, self.heldout) for piece in stream.pieces(_PIECE))
        if largest >= self.vocab_size:
            raise UsageError(f"{self.folder}: holds token {largest}, and its vocabulary ends at {self.vocab_size - 1}; {_AGAIN}")
        self._verify_heldout()

    def _verify_heldout(self) -> None:
        """Raise UsageError unless the tokenizer is the vocabulary's and turns the held-out ids into the held-out text."""
        tokenizer, text = load_tokenizer(self.tokenizer_path), self.heldout_text
        if tokenizer.vocab_size != self.vocab_size:
            raise UsageError(
                f"{self.tokenizer_path}: holds {tokenizer.vocab_size} tokens, and vocab_size is {self.vocab_size} in {MANIFEST}; {_AGAIN}"
            )
        if len(text) != self.manifest["heldout"]["bytes"]:
            raise UsageError(f"{self.folder}: the held-out text's {len(text)} bytes are not the heldout.bytes of {MANIFEST}; {_AGAIN}")
        if b"".join(tokenizer.bytes_of(piece.tolist()) for piece in self.heldout.pieces(_PIECE)) != text:
            raise UsageError(f"{self.folder}: the held-out ids are not those of the held-out text; {_AGAIN}")


def open_data(folder: Path) -> Data:
    """Open what ``moetriage data build`` wrote. Raises UsageError, with the path, if it is missing, damaged or of another version."""
    path = folder / MANIFEST
    if not path.exists():
        raise UsageError(f"{folder}: no data there ({MANIFEST} is missing); moetriage data build {folder} makes some")
    manifest = read_manifest(folder, hint=_AGAIN)
    with damaged(path, hint=_AGAIN):
        data = Data(folder, manifest)
        for part, stream in (("train", data.train), ("heldout", data.heldout)):
            if len(stream) == 0:
                raise ValueError(f"{part} holds no tokens")
    return data


@dataclass(frozen=True, kw_only=True)
class Batches:
    """Batches of a stream. ``batch`` and ``context`` are B and S; ``seed`` determines order and offsets."""

    stream: TokenStream
    batch: int
    context: int
    seed: int

    def validate(self) -> None:
        """Raise UsageError if the stream is too short for a single batch."""
        if self.batch < 1 or self.context < 1:
            raise UsageError(f"--batch {self.batch}, --context {self.context}: must be at least 1")
        if self.per_epoch < self.batch:
            raise UsageError(
                f"corpus too small: {len(self.stream)} training tokens do not make a batch of {self.batch} sequences of {self.context}; "
                "build data from more text, or give a smaller --batch or --context"
            )

    @property
    def per_epoch(self) -> int:
        """Sequences of an epoch: the same number whatever the offset."""
        return max(0, len(self.stream) - self.context) // self.context

    def at(self, step: int) -> tuple[Ids, Ids]:
        """Return (tokens_BS, targets_BS) of a step, int64; the targets are the tokens that follow."""
        rows = [self._sequence(step * self.batch + row) for row in range(self.batch)]
        both = np.stack(rows)
        return both[:, :-1], both[:, 1:]

    def _sequence(self, index: int) -> Ids:
        epoch, position = divmod(index, self.per_epoch)
        offset, order = _order(self.seed, epoch, self.context, self.per_epoch)
        return self.stream.read(offset + int(order[position]) * self.context, self.context + 1)


@lru_cache(maxsize=4)
def _order(seed: int, epoch: int, context: int, count: int) -> tuple[int, NDArray[np.int64]]:
    """Return an epoch's offset, 0 up to context - 1, and the order of its sequences."""
    generator = np.random.Generator(np.random.Philox(np.random.SeedSequence((seed, epoch))))
    return int(generator.integers(context)), generator.permutation(count)
