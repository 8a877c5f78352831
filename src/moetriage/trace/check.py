"""The gate through which every row of a trace goes, read or written: values in range, rows in order, cut at whole batches.

In: frames of raw rows (``sources``, or the engine's own), in pieces of any size. Out: frames in the schema's dtypes that end where a
batch ends. It knows no file and raises nothing: ``fault`` says which row is wrong and why; the caller refuses it or stops there.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from moetriage.trace.order import Bools, Cells, Fault, batch_fault, cell_fault
from moetriage.trace.schema import SCHEMA, TraceMeta

_MAX_STEP = 2**31 - 1
_MAX_TURN = 2**20  # far above any session, and low enough that the turns of a folder of files can be numbered on in int32


class WholeSteps:
    """Check rows as they come and hand on those of finished batches.

    ``push`` holds back the batch that is still growing, so memory is bounded by one batch; ``finish`` hands it on if it is whole.
    After a fault everything that follows is ignored; what was handed on stays valid. A prefill batch shows that it is whole only by
    what comes after it, so one that a fault follows is not handed on.

    Attributes: ``fault`` (its index counts from 0 over all rows ever pushed), ``rows_out`` handed on so far, ``last_step`` of those.
    """

    def __init__(self, meta: TraceMeta) -> None:
        self.fault: Fault | None = None
        self.rows_out = 0
        self.last_step: int | None = None
        self._last_turn = -1
        self._meta = meta
        layers = np.array(meta.moe_layers, np.int64)
        self._rank_of_layer = np.full(meta.n_layer, -1, np.int64)
        self._rank_of_layer[layers] = np.arange(len(layers))
        self._bytes_of_layer = np.zeros(meta.n_layer, np.int64)
        self._bytes_of_layer[layers] = list(meta.layer_expert_bytes.values())
        self._pending = pl.DataFrame(schema=SCHEMA)

    def push(self, frame: pl.DataFrame) -> pl.DataFrame:
        """Take rows (all columns of the schema, integers of any width); return the rows of the batches that they finish."""
        if self.fault is not None:
            return self._pending.clear()
        n_before = self.rows_out + len(self._pending)
        fault = self._value_fault(frame)
        if fault is not None:
            frame, fault = frame.head(fault.index), Fault(n_before + fault.index, fault.reason)
        # Column by column, here and in _cells: a lazy query costs half a millisecond, and the writer comes here once a token.
        typed = pl.DataFrame([frame[name].cast(dtype) for name, dtype in SCHEMA.items()])
        rows = pl.concat([self._pending, typed], rechunk=True)
        order_fault = self._order_fault(rows)
        if order_fault is not None:
            rows, fault = rows.head(order_fault.index), Fault(self.rows_out + order_fault.index, order_fault.reason)
        self._pending, self.fault = rows, fault
        return self._take(at_end=False)

    def finish(self, *, cut: bool = False) -> pl.DataFrame:
        """Return the rows of the last batch if it is whole; if not, return none and set ``fault``.

        cut: more rows came than were pushed, but could not be read.
        """
        rows = self._take(at_end=not cut and self.fault is None)
        if len(self._pending) and self.fault is None:
            self.fault = Fault(self.rows_out + len(self._pending) - 1, self._cut_reason())
        return rows

    def _value_fault(self, frame: pl.DataFrame) -> Fault | None:
        """Return the first row with a value that no trace of this model can hold."""
        meta = self._meta
        col = {name: frame[name].to_numpy() for name in SCHEMA}
        in_model = ~_outside(col["layer"], meta.n_layer - 1)
        layer = np.where(in_model, col["layer"], 0)
        is_moe = in_model & (self._rank_of_layer[layer] >= 0)
        is_read = col["expert_bytes"] != 0
        is_free = (col["residency"] == 1) | (col["dropped"] == 1)
        checks: list[tuple[str, Bools, str]] = [
            ("turn", _outside(col["turn"], _MAX_TURN), f"is not between 0 and {_MAX_TURN}"),
            ("phase", _outside(col["phase"], 1), "is neither 0 (prefill) nor 1 (decode)"),
            ("step", _outside(col["step"], _MAX_STEP), f"is not between 0 and {_MAX_STEP}"),
            ("layer", ~is_moe, f"is not one of the {len(meta.moe_layers)} layers with experts that the header lists"),
            ("slot", _outside(col["slot"], meta.n_expert_used - 1), f"is not between 0 and {meta.n_expert_used - 1} (n_expert_used)"),
            ("expert", _outside(col["expert"], meta.n_expert - 1), f"is not between 0 and {meta.n_expert - 1} (n_expert)"),
            ("weight", ~np.isfinite(col["weight"]) | (col["weight"] < 0), "is not a finite number of at least 0"),
            ("residency", _outside(col["residency"], 1), "is neither 0 (miss) nor 1 (hit)"),
            ("dropped", _outside(col["dropped"], 1), "is neither 0 nor 1"),
            ("expert_bytes", is_read & (col["expert_bytes"] != self._bytes_of_layer[layer]), "is neither 0 nor what the header says"),
            ("expert_bytes", is_read & is_free, "is not 0, but the expert was a hit or was dropped and so not read"),
        ]
        found = [(int(bad.argmax()), name, why) for name, bad, why in checks if bad.any()]
        if not found:
            return None
        index, name, why = min(found, key=lambda item: item[0])
        return Fault(index, f"{name} {col[name][index]} {why}")

    def _order_fault(self, rows: pl.DataFrame) -> Fault | None:
        top_k = self._meta.n_expert_used
        in_cell = cell_fault(rows, top_k)
        good = rows if in_cell is None else rows.head(in_cell.index)
        step_before = -1 if self.last_step is None else self.last_step
        in_batch = batch_fault(self._cells(good), turn_before=self._last_turn, step_before=step_before)
        return in_cell if in_batch is None else Fault(in_batch.index * top_k, in_batch.reason)

    def _cells(self, rows: pl.DataFrame) -> Cells:
        """Return the cells that begin in these rows, a torn one at the end included."""
        top_k = self._meta.n_expert_used
        turn, phase, step, layer = (rows[name].to_numpy()[::top_k].astype(np.int64) for name in ("turn", "phase", "step", "layer"))
        return Cells(turn, phase, step, layer, self._rank_of_layer[layer], len(self._meta.moe_layers))

    def _take(self, *, at_end: bool) -> pl.DataFrame:
        """Hand on the finished batches of what is pending. The last is finished if nothing can follow it in the same batch."""
        cells = self._cells(self._pending)
        starts = cells.batch_starts()
        if len(starts) == 0:
            return self._pending.clear()
        n_cells, last_steps = len(cells.step), cells.last_steps(starts)
        is_torn = len(self._pending) % self._meta.n_expert_used != 0
        may_end = not is_torn and (at_end or cells.phase[-1] == 1)  # a decode batch is one step: its last layer ends it
        if not (may_end and cells.is_whole(np.array([n_cells - 1]), last_steps[-1:])[0]):
            n_cells, last_steps = int(starts[-1]), last_steps[:-1]
        if n_cells:
            self._last_turn, self.last_step = int(cells.turn[n_cells - 1]), int(last_steps[-1])
        n_rows = n_cells * self._meta.n_expert_used
        rows, self._pending = self._pending.head(n_rows), self._pending.slice(n_rows)
        self.rows_out += n_rows
        return rows

    def _cut_reason(self) -> str:
        last = self._pending.row(-1, named=True)
        whole = "no step before it is whole" if self.last_step is None else f"the steps up to {self.last_step} are whole"
        where = f"layer {last['layer']} of {self._meta.moe_layers[-1]}, slot {last['slot']} of {self._meta.n_expert_used - 1}"
        return f"the trace ends inside step {last['step']} (at {where}); {whole}"


def _outside(values: npt.NDArray[np.integer[Any]], limit: int) -> Bools:
    outside: Bools = (values < 0) | (values > limit)
    return outside
