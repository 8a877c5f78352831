"""Traces as the arrays that the native replay takes: layer batches of routings.

In: a trace's path, or its frames. Out: ``RouteTable`` (all of it, 9 bytes a routing) or a stream of them in bounded memory. Knows no cache
and no policy. polars and the reader are imported where a file is read: a sweep's workers get arrays and start without them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import polars as pl

    from moetriage.trace.schema import TraceMeta


@dataclass(frozen=True, kw_only=True)
class RouteShape:
    """What a replay needs to know of the model.

    layers: numbers of the MoE layers in the model; expert_bytes: of one expert of each. dense_bytes: of all weights that are no experts,
    as far as the trace lists them.
    """

    n_expert: int
    top_k: int
    layers: tuple[int, ...]
    expert_bytes: tuple[int, ...]
    dense_bytes: int = 0

    @classmethod
    def of(cls, meta: TraceMeta) -> RouteShape:
        return cls(
            n_expert=meta.n_expert,
            top_k=meta.n_expert_used,
            layers=meta.moe_layers,
            expert_bytes=tuple(meta.layer_expert_bytes.values()),
            dense_bytes=sum(meta.layer_dense_bytes.values()),
        )

    @property
    def working_set_bytes(self) -> int:
        """T: the expert bytes one token routes to."""
        return self.top_k * sum(self.expert_bytes)

    @property
    def total_bytes(self) -> int:
        """Bytes of all experts: a cache of this size never evicts."""
        return self.n_expert * sum(self.expert_bytes)

    @property
    def cliff_bytes(self) -> int:
        """The smallest cache with which LRU can hit from one token to the next: T without what a layer's batch keeps to itself.

        A batch is looked up before anything goes to make room for it, so of a layer's last batch one expert may still be there. With one
        layer it is always there: nothing comes in between.
        """
        if len(self.layers) == 1:
            return 1
        return self.working_set_bytes - (self.top_k - 1) * max(self.expert_bytes)

    @property
    def has_one_size(self) -> bool:
        return len(set(self.expert_bytes)) == 1


@dataclass(frozen=True, kw_only=True)
class RouteTable:
    """Whole layer batches of a trace.

    layer: int32 [B], index of the MoE layer. phase: uint8 [B]. first_cell: int64 [B + 1]; a cell is the ``top_k`` routings of a token.
    expert: int32, weight: float32, resident: uint8, each [cells * top_k] in the order of the trace.
    """

    shape: RouteShape
    layer: npt.NDArray[np.int32]
    phase: npt.NDArray[np.uint8]
    first_cell: npt.NDArray[np.int64]
    expert: npt.NDArray[np.int32]
    weight: npt.NDArray[np.float32]
    resident: npt.NDArray[np.uint8]

    ARRAYS = ("layer", "phase", "first_cell", "expert", "weight", "resident")

    def tables(self) -> Iterator[RouteTable]:
        """Yield itself: a whole trace is a stream of one piece."""
        yield self

    def load(self) -> RouteTable:
        return self

    @property
    def batch_of_routing(self) -> npt.NDArray[np.int64]:
        """The layer batch of each routing, int64 [cells * top_k]."""
        return np.repeat(np.arange(len(self.layer)), np.diff(self.first_cell) * self.shape.top_k)


class Routes(Protocol):
    """A trace that can be gone through as often as needed."""

    @property
    def shape(self) -> RouteShape: ...

    def tables(self) -> Iterator[RouteTable]:
        """Yield the trace in pieces that end where a batch ends."""
        ...

    def load(self) -> RouteTable:
        """Return all of it."""
        ...


class RouteFile:
    """A trace on disk, read again by each pass in bounded memory.

    Attributes: ``shape``, ``path``, ``extra`` (what the recording says of itself), ``has_dropped``, and after a pass ``truncated_reason``
    (None if nothing was left out) and ``rows``.

    Raises TraceError for a wrong header, and while reading for what ``TraceReader`` refuses.
    """

    def __init__(self, path: Path | str, *, allow_truncated: bool = False) -> None:
        from moetriage.trace.reader import TraceReader

        reader = TraceReader(path, allow_truncated=allow_truncated)
        self.path = str(path)
        self.shape = RouteShape.of(reader.meta)
        self.model = reader.meta.model
        self.extra = dict(reader.meta.extra)
        self.has_dropped = reader.has_dropped
        self.truncated_reason: str | None = None
        self.rows = 0
        self._allow_truncated = allow_truncated

    def tables(self) -> Iterator[RouteTable]:
        from moetriage.trace.reader import TraceReader

        reader = TraceReader(self.path, allow_truncated=self._allow_truncated)
        for frame in reader.batches():
            yield table_of(frame, self.shape)
        self.truncated_reason = reader.truncated_reason
        self.rows = reader.rows

    def load(self) -> RouteTable:
        return joined(list(self.tables()))


def table_of(frame: pl.DataFrame, shape: RouteShape) -> RouteTable:
    """Return the rows of a frame of whole batches in the trace's schema."""
    top_k = shape.top_k
    turn, phase, step, layer = (frame[name].to_numpy()[::top_k] for name in ("turn", "phase", "step", "layer"))
    is_first = np.ones(len(layer), np.bool_)
    # A batch ends where the phase, the turn or the layer changes, and in decode with every token (trace.schema says why).
    for values in (turn, phase, layer):
        is_first[1:] &= values[1:] == values[:-1]
    is_first[1:] = ~is_first[1:] | ((phase[1:] == 1) & (step[1:] != step[:-1]))
    first = np.flatnonzero(is_first)
    index_of_layer = np.full(max(shape.layers) + 1, -1, np.int32)
    index_of_layer[list(shape.layers)] = np.arange(len(shape.layers), dtype=np.int32)
    return RouteTable(
        shape=shape,
        layer=index_of_layer[layer[first]],
        phase=phase[first].astype(np.uint8),
        first_cell=np.append(first, len(layer)).astype(np.int64),
        expert=np.ascontiguousarray(frame["expert"].to_numpy(), np.int32),
        weight=np.ascontiguousarray(frame["weight"].to_numpy(), np.float32),
        resident=frame["residency"].to_numpy().astype(np.uint8),
    )


def joined(tables: list[RouteTable]) -> RouteTable:
    """Return consecutive pieces of one trace as one table."""
    if len(tables) == 1:
        return tables[0]
    offsets = np.cumsum([0, *(table.first_cell[-1] for table in tables)])
    arrays = {name: np.concatenate([getattr(table, name) for table in tables]) for name in RouteTable.ARRAYS if name != "first_cell"}
    starts = [table.first_cell[:-1] + offset for table, offset in zip(tables, offsets[:-1], strict=True)]
    return RouteTable(shape=tables[0].shape, first_cell=np.append(np.concatenate(starts), offsets[-1]), **arrays)
