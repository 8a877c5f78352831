"""The order that the rows of a trace must have: slots within a cell, cells within a batch, batches one after the other.

In: rows that are each valid alone (``check`` sees to it). Out: the first row out of order, with the reason, and where batches begin.
Pure functions over arrays, vectorised, so that 50 million rows take seconds; they know no file and hold no state.
``schema`` says what a cell, a step and a batch are.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl

Int64s = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Fault:
    """A row that breaks the format: its index, counted from 0, and why."""

    index: int
    reason: str


@dataclass(frozen=True)
class Cells:
    """The leading row of each cell, as int64 arrays of shape [N]; ``rank`` is the layer's place among the ``n_ranks`` MoE layers."""

    turn: Int64s
    phase: Int64s
    step: Int64s
    layer: Int64s
    rank: Int64s
    n_ranks: int

    def batch_starts(self) -> Int64s:
        """Return the indices of the cells that begin a batch.

        In decode each step is one. In prefill a batch ends where the layer goes back. (Two prefill batches of a model with fewer than
        three MoE layers cannot be told apart if the first asked for no output, since its last layer is then empty: they read as one.)
        """
        if len(self.step) == 0:
            return np.empty(0, np.int64)
        is_start = np.ones(len(self.step), np.bool_)
        new_part = (np.diff(self.turn) != 0) | (np.diff(self.phase) != 0)
        is_start[1:] = new_part | np.where(self.phase[1:] == 1, np.diff(self.step) != 0, np.diff(self.layer) < 0)
        return np.flatnonzero(is_start).astype(np.int64)

    def last_steps(self, starts: Int64s) -> Int64s:
        """Return the last step of each batch, read off its first layer, which has all of the batch's steps."""
        ends = np.append(starts[1:], len(self.step))
        if self.n_ranks == 1:  # the first layer is also the last, which may leave steps out
            final: Int64s = self.step[ends - 1]
            return final
        n_steps = np.add.reduceat(self.rank == 0, starts, dtype=np.int64)
        n_steps[self.phase[starts] == 1] = 1
        return self.step[starts] + np.maximum(n_steps, 1) - 1

    def is_whole(self, ends: Int64s, last_steps: Int64s) -> Bools:
        """Tell of each batch, given its final cell and last step, whether it has reached its last layer.

        A prefill batch that asked for no output has nothing to compute in the last layer, and may end before it.
        """
        no_output = (self.phase[ends] == 0) & (self.rank[ends] == self.n_ranks - 2) & (self.step[ends] == last_steps)
        whole: Bools = (self.rank[ends] == self.n_ranks - 1) | no_output
        return whole


def cell_fault(rows: pl.DataFrame, top_k: int) -> Fault | None:
    """Check that rows come in cells: ``top_k`` rows alike in turn, phase, step and layer, slots in order, no expert twice."""
    slot = rows["slot"].to_numpy()
    place = np.arange(len(rows)) % top_k
    changed = np.zeros(len(rows), np.bool_)
    for name in ("turn", "phase", "step", "layer"):
        values = rows[name].to_numpy()
        changed[1:] |= values[1:] != values[:-1]
    bad = (slot != place) | (changed & (place != 0))
    n_good = int(bad.argmax()) if bad.any() else len(rows)
    by_cell = np.sort(rows["expert"].to_numpy()[: n_good // top_k * top_k].reshape(-1, top_k), axis=1)
    twice = (by_cell[:, 1:] == by_cell[:, :-1]).any(axis=1)
    if twice.any():
        return Fault(int(twice.argmax()) * top_k, "an expert is named in two slots of this routing")
    if n_good < len(rows):
        return Fault(n_good, _slot_reason(rows, n_good, top_k, changed=bool(changed[n_good])))
    return None


def _slot_reason(rows: pl.DataFrame, index: int, top_k: int, *, changed: bool) -> str:
    slot, place = int(rows["slot"][index]), index % top_k
    if changed and place:
        step, layer = rows["step"][index - 1], rows["layer"][index - 1]
        return f"step {step}, layer {layer} has only {place} of {top_k} slots before another cell begins"
    if slot < place or (place == 0 and index and not changed):
        return f"slot {slot} is there twice or out of order"
    return f"slot {place} is missing before slot {slot}"


def batch_fault(cells: Cells, *, turn_before: int, step_before: int) -> Fault | None:
    """Return the first cell that breaks the order of batches, or of cells within one; -1 as ``turn_before`` is before any turn.

    Every batch but the last must be whole: visit every MoE layer in order with all of its steps. The index is that of a cell.
    """
    starts = cells.batch_starts()
    if len(starts) == 0:
        return None
    last_steps = cells.last_steps(starts)
    turns_before = np.append(turn_before, cells.turn[starts[:-1]])
    steps_before = np.append(step_before, last_steps[:-1])
    checks = (
        (starts[1:], ~cells.is_whole(starts[1:] - 1, last_steps[:-1]), _incomplete_reason),
        (starts, ~_follows(cells, starts, turns_before, steps_before), _start_reason),
        (np.arange(len(cells.step)), ~_continues(cells, starts, last_steps), _next_reason),
    )
    found = [(int(index[bad.argmax()]), reason) for index, bad, reason in checks if bad.any()]
    if not found:
        return None
    index, reason = min(found, key=lambda item: item[0])  # of faults in one cell, the first check explains best
    batch = int(np.searchsorted(starts, index, side="right")) - 1
    return Fault(index, reason(cells, index, int(turns_before[batch]), int(steps_before[batch])))


def _follows(cells: Cells, starts: Int64s, turns_before: Int64s, steps_before: Int64s) -> Bools:
    """Tell of each batch whether it begins at the first layer, one step after the batch before it or in a later turn."""
    turn, step = cells.turn[starts], cells.step[starts]
    continues = step == steps_before + 1
    if cells.n_ranks == 1:  # steps without output have no row at all
        continues |= (cells.phase[starts] == 0) & (step > steps_before)
    follows: Bools = ((turn > turns_before) | ((turn == turns_before) & continues)) & (cells.rank[starts] == 0)
    return follows


def _continues(cells: Cells, starts: Int64s, last_steps: Int64s) -> Bools:
    """Tell of each cell whether it may follow the cell before it in the same batch (true where a batch starts).

    It is the next step of the same layer, or the first step of the next layer once all steps of this one were there. In the last
    layer of a prefill batch steps may be left out.
    """
    n_cells = len(cells.step)
    batch = np.searchsorted(starts, np.arange(n_cells), side="right") - 1
    first_step, last_step = cells.step[starts][batch][1:], last_steps[batch][1:]
    step, step_before = cells.step[1:], cells.step[:-1]
    loose = (cells.phase[1:] == 0) & (cells.rank[1:] == cells.n_ranks - 1)
    to_rank = np.diff(cells.rank)
    stays = (to_rank == 0) & np.where(loose, step > step_before, step == step_before + 1)
    moves = (to_rank == 1) & (step_before == last_step) & np.where(loose, step >= first_step, step == first_step)
    good = np.ones(n_cells, np.bool_)
    good[1:] = (stays | moves) & (step <= last_step)
    good[starts] = True
    return good


def _incomplete_reason(cells: Cells, index: int, _turn_before: int, _step_before: int) -> str:
    return f"step {cells.step[index - 1]} stops at layer {cells.layer[index - 1]}: the layers after it are missing"


def _start_reason(cells: Cells, index: int, turn_before: int, step_before: int) -> str:
    if cells.rank[index] != 0:
        return f"step {cells.step[index]} begins at layer {cells.layer[index]}: the layers before it are missing"
    if cells.turn[index] < turn_before:
        return f"turn {cells.turn[index]} comes after turn {turn_before}"
    return f"step {cells.step[index]} comes after step {step_before}: the steps of a turn count up without a gap"


def _next_reason(cells: Cells, index: int, _turn_before: int, _step_before: int) -> str:
    here, before = (f"step {cells.step[i]}, layer {cells.layer[i]}" for i in (index, index - 1))
    return f"{here} comes after {before}: a batch holds all of its steps in one MoE layer, then in the next"
