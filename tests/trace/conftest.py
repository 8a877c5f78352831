"""Small traces made by rule, so that a test can spoil one thing at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import polars as pl
import pytest

from moetriage.trace.io import RouteWriter
from moetriage.trace.schema import SCHEMA, TraceMeta

Columns = dict[str, npt.NDArray[np.generic]]
#: (turn, phase, first step, tokens, tokens that the last layer holds)
Batch = tuple[int, int, int, int, int]

EXPERT_BYTES = {1: 1000, 2: 1000, 3: 800}
#: A prompt of four tokens of which the last had an output, then three decoded ones, then a second turn.
BATCHES: tuple[Batch, ...] = ((0, 0, 0, 4, 1), (0, 1, 4, 1, 1), (0, 1, 5, 1, 1), (0, 1, 6, 1, 1), (1, 0, 7, 2, 1), (1, 1, 9, 1, 1))


@pytest.fixture(scope="session")
def meta() -> TraceMeta:
    """Layer 0 is dense, layers 1 to 3 have 8 experts each, 2 of them used."""
    return TraceMeta(
        model="/models/tiny model.gguf",
        arch="qwen3moe",
        n_layer=4,
        n_expert=8,
        n_expert_used=2,
        layer_expert_bytes=EXPERT_BYTES,
        layer_dense_bytes={0: 50, 1: 60, 2: 60, 3: 60},
        extra={"cache": "12 MiB"},
    )


def columns_of(meta: TraceMeta, batches: Sequence[Batch], seed: int = 0) -> Columns:
    """Return consistent rows: random experts, a miss where an expert has not been seen before, bytes where it is read."""
    rng = np.random.default_rng(seed)
    rows: list[tuple[object, ...]] = []
    seen: set[tuple[int, int]] = set()
    for turn, phase, first, n_tokens, n_last in batches:
        for layer, expert_bytes in meta.layer_expert_bytes.items():
            resident = {expert for in_layer, expert in seen if in_layer == layer}
            n_left_out = n_tokens - n_last if layer == meta.moe_layers[-1] else 0
            for step in range(first + n_left_out, first + n_tokens):
                for slot, expert in enumerate(rng.permutation(meta.n_expert)[: meta.n_expert_used]):
                    is_read = (layer, expert) not in seen
                    seen.add((layer, expert))
                    weight = np.float32(rng.random())
                    rows.append((turn, phase, step, layer, slot, expert, weight, expert in resident, expert_bytes * is_read, 0))
    values = zip(*rows, strict=True)
    return {
        name: np.array(column, pl.Series(dtype=dtype).to_numpy().dtype)
        for (name, dtype), column in zip(SCHEMA.items(), values, strict=True)
    }


@pytest.fixture
def columns(meta: TraceMeta) -> Columns:
    return columns_of(meta, BATCHES)


@pytest.fixture
def write(tmp_path: Path, meta: TraceMeta, columns: Columns) -> Callable[[str], Path]:
    """Write the standard trace under a name and return its path."""

    def write_as(name: str) -> Path:
        path = tmp_path / name
        with RouteWriter(path, meta) as writer:
            writer.append(columns)
        return path

    return write_as


@pytest.fixture(scope="session")
def make_columns(meta: TraceMeta) -> Callable[..., Columns]:
    """Return rows for other batches than the standard ones."""

    def make(batches: Sequence[Batch], seed: int = 0) -> Columns:
        return columns_of(meta, batches, seed)

    return make
