"""Random weights at disk speed: quantised once, written over and over without repeating an expert.

In: the plan of a model's tensors. Out: for each tensor a stream of byte chunks. Quantising 30 billion random numbers would take an hour
and random bytes would make infinite scales, so a few million are quantised into a ring per kind of tensor, and tensors are cut from
it one after the other. A ring that wraps has a prime number of blocks, more than it gives chunks, and gives chunks of one size only:
so no two chunks (experts, or whole tensors) start at the same block, and no two experts have the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from moetriage.gguf.architectures import TensorPlan
from moetriage.gguf.ggml_api import block_bytes, block_elements, quantize, tensor_bytes

#: Elements that a ring holds at most, unless it must give more chunks than it has blocks: 4.5 MB of Q4_0, quantised in 0.2 s.
RING_ELEMENTS = 8 * 1024 * 1024
_QUANTIZE_ROWS = 4096


@dataclass(frozen=True)
class TypedPlan:
    """A planned tensor with the type it is written in."""

    plan: TensorPlan
    ggml_type: int

    @property
    def nbytes(self) -> int:
        return tensor_bytes(self.ggml_type, self.plan.ne)

    @property
    def silent_bytes(self) -> int:
        return self.nbytes // self.plan.ne[1] * self.plan.silent_rows if self.plan.silent_rows else 0

    @property
    def n_chunks(self) -> int:
        return self.plan.n_expert

    @property
    def chunk_blocks(self) -> int:
        return (self.nbytes - self.silent_bytes) // block_bytes(self.ggml_type) // self.n_chunks

    @property
    def ring_key(self) -> tuple[int, float, int]:
        return (self.ggml_type, self.plan.std, self.chunk_blocks)


class _Ring:
    """Quantised random blocks, read round and round."""

    def __init__(self, rng: np.random.Generator, ggml_type: int, std: float, n_blocks: int) -> None:
        elements = block_elements(ggml_type)
        pieces = []
        for start in range(0, n_blocks, _QUANTIZE_ROWS):
            rows = min(_QUANTIZE_ROWS, n_blocks - start)
            pieces.append(quantize(rng.standard_normal((rows, elements), dtype=np.float32) * np.float32(std), ggml_type))
        self._bytes = np.concatenate(pieces).data
        self._at = 0

    def take(self, nbytes: int) -> Iterator[memoryview]:
        while nbytes:
            piece = self._bytes[self._at : self._at + nbytes]
            self._at = (self._at + len(piece)) % len(self._bytes)
            nbytes -= len(piece)
            yield piece


class BlockSource:
    """Gives the bytes of the planned tensors, which must be asked for in the order of the plan; the seed decides them all."""

    def __init__(self, plans: list[TypedPlan], seed: int) -> None:
        self._seed = seed
        self._rings: dict[tuple[int, float, int], _Ring] = {}
        self._ring_blocks: dict[tuple[int, float, int], int] = {}
        for key, chunks in _chunks_by_ring(plans).items():
            self._ring_blocks[key] = _ring_size(key[0], chunks, key[2])
        self._number = 0

    def chunks(self, tensor: TypedPlan) -> Iterator[memoryview | bytes]:
        """Yield the data of one tensor in pieces of at most a few MB."""
        self._number += 1
        plan = tensor.plan
        if plan.exact:
            yield self._exact(plan).tobytes()
            return
        yield from self._ring(tensor.ring_key).take(tensor.nbytes - tensor.silent_bytes)
        # In every tensor type a block of zero bytes is a block of zeros.
        yield bytes(tensor.silent_bytes)

    def _exact(self, plan: TensorPlan) -> npt.NDArray[np.float32]:
        rng = np.random.default_rng([self._seed, 0, self._number])
        normal = rng.standard_normal((plan.ne[-1], int(np.prod(plan.ne[:-1]))), dtype=np.float32)
        if plan.row_spread:
            lengths = np.exp(plan.row_spread * rng.standard_normal((plan.ne[-1], 1), dtype=np.float32))
            normal *= lengths / np.sqrt(np.mean(lengths**2))
        return (np.float32(plan.mean) + np.float32(plan.std) * normal).astype("<f4")

    def _ring(self, key: tuple[int, float, int]) -> _Ring:
        if key not in self._rings:
            rng = np.random.default_rng([self._seed, 1, list(self._ring_blocks).index(key)])
            self._rings[key] = _Ring(rng, key[0], key[1], self._ring_blocks[key])
        return self._rings[key]


def _chunks_by_ring(plans: list[TypedPlan]) -> dict[tuple[int, float, int], int]:
    counts: dict[tuple[int, float, int], int] = {}
    for tensor in plans:
        if not tensor.plan.exact:
            counts[tensor.ring_key] = counts.get(tensor.ring_key, 0) + tensor.n_chunks
    return counts


def _ring_size(ggml_type: int, n_chunks: int, chunk_blocks: int) -> int:
    """Return the blocks of a ring: all that is asked of it, if that is not too much, or else a prime above the number of chunks."""
    limit = max(RING_ELEMENTS // block_elements(ggml_type), n_chunks + 1)
    if n_chunks * chunk_blocks <= limit:
        return n_chunks * chunk_blocks
    while any(limit % d == 0 for d in range(2, int(limit**0.5) + 1)) or chunk_blocks % limit == 0:
        limit += 1
    return limit
