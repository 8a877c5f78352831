"""The vectorised order check against one that reads a trace cell by cell, on traces with cells removed, repeated, swapped or changed."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import polars as pl
from hypothesis import given, settings
from hypothesis import strategies as st

from moetriage.trace.check import WholeSteps
from moetriage.trace.schema import SCHEMA, TraceMeta

TOP_K = 2


@dataclass(frozen=True)
class Cell:
    turn: int
    phase: int
    step: int
    layer: int


class Refused(Exception):  # noqa: N818 (an answer, not an error)
    """The reference does not accept the trace."""


def accepts(cells: list[Cell], n_layers: int) -> bool:
    """Tell, cell by cell, whether these are whole batches one after the other."""
    turn, last_step, at = -1, -1, 0
    try:
        while at < len(cells):
            first = cells[at]
            if first.layer != 0 or not (first.turn > turn or (first.turn == turn and first.step == last_step + 1)):
                return False
            at, last_step = (prefill if first.phase == 0 else decode)(cells, at, n_layers)
            turn = first.turn
    except Refused:
        return False
    return True


def expect(cells: list[Cell], at: int, cell: Cell) -> int:
    if at >= len(cells) or cells[at] != cell:
        raise Refused
    return at + 1


def decode(cells: list[Cell], at: int, n_layers: int) -> tuple[int, int]:
    first = cells[at]
    for layer in range(n_layers):
        at = expect(cells, at, dataclasses.replace(first, layer=layer))
    return at, first.step


def prefill(cells: list[Cell], at: int, n_layers: int) -> tuple[int, int]:
    first, n_steps = cells[at], 0
    while at + n_steps < len(cells) and cells[at + n_steps] == dataclasses.replace(first, step=first.step + n_steps):
        n_steps += 1
    for layer in range(n_layers - 1):
        for step in range(first.step, first.step + n_steps):
            at = expect(cells, at, dataclasses.replace(first, layer=layer, step=step))
    for step in range(first.step, first.step + n_steps):
        if at < len(cells) and cells[at] == dataclasses.replace(first, layer=n_layers - 1, step=step):
            at += 1
    return at, first.step + n_steps - 1


@st.composite
def valid_cells(draw: st.DrawFn, n_layers: int) -> list[Cell]:
    cells: list[Cell] = []
    step = 0
    for turn in range(draw(st.integers(1, 2))):
        step = draw(st.sampled_from([0, step]))
        for phase in draw(st.lists(st.integers(0, 1), min_size=1, max_size=4)):
            n_tokens = 1 if phase else draw(st.integers(1, 3))
            steps = range(step, step + n_tokens)
            cells += (Cell(turn, phase, s, layer) for layer in range(n_layers - 1) for s in steps)
            with_output = steps if phase else sorted(draw(st.sets(st.sampled_from(list(steps)))))
            cells += (Cell(turn, phase, s, n_layers - 1) for s in with_output)
            step += n_tokens
    return cells


@st.composite
def spoiled_cells(draw: st.DrawFn, n_layers: int) -> list[Cell]:
    cells = draw(valid_cells(n_layers))
    for _ in range(draw(st.integers(0, 2))):
        if not cells:
            break
        at = draw(st.integers(0, len(cells) - 1))
        match draw(st.sampled_from(["remove", "repeat", "swap", "change", "cut"])):
            case "remove":
                cells = cells[:at] + cells[at + draw(st.integers(1, 3)) :]
            case "repeat":
                cells = cells[: at + 1] + cells[at:]
            case "swap" if at:
                cells = [*cells[: at - 1], cells[at], cells[at - 1], *cells[at + 1 :]]
            case "change":
                name = draw(st.sampled_from(["turn", "phase", "step", "layer"]))
                limit = {"phase": 1, "layer": n_layers - 1}.get(name, 50)
                value = min(max(getattr(cells[at], name) + draw(st.sampled_from([-1, 1])), 0), limit)
                cells[at] = dataclasses.replace(cells[at], **{name: value})
            case "cut":
                cells = cells[:at]
    return cells


def frame_of(cells: list[Cell]) -> pl.DataFrame:
    columns = {field.name: [getattr(cell, field.name) for cell in cells for _ in range(TOP_K)] for field in dataclasses.fields(Cell)}
    slots = list(range(TOP_K)) * len(cells)
    zeros = [0] * len(slots)
    columns |= {"slot": slots, "expert": slots, "weight": zeros, "residency": zeros, "expert_bytes": zeros, "dropped": zeros}
    return pl.DataFrame({name: columns[name] for name in SCHEMA}, schema=SCHEMA)


@settings(max_examples=400)
@given(n_layers=st.sampled_from([3, 4]), data=st.data())
def test_exactly_the_traces_that_are_in_order_are_accepted(n_layers: int, data: st.DataObject) -> None:
    cells = data.draw(spoiled_cells(n_layers))
    meta = TraceMeta(
        model="m", arch="a", n_layer=n_layers, n_expert=4, n_expert_used=TOP_K, layer_expert_bytes=dict.fromkeys(range(n_layers), 1)
    )
    frame = frame_of(cells)
    steps = WholeSteps(meta)
    handed_on = []
    at = 0
    while at < len(frame):
        size = data.draw(st.integers(1, len(frame)), label="piece")
        handed_on.append(steps.push(frame[at : at + size]))
        at += size
    handed_on.append(steps.finish())
    rows = pl.concat(handed_on)
    assert (steps.fault is None) == accepts(cells, n_layers), steps.fault
    assert rows.equals(frame.head(len(rows)))
    assert accepts(cells[: len(rows) // TOP_K], n_layers)
    if steps.fault is None:
        assert len(rows) == len(frame)
    else:
        assert len(rows) <= steps.fault.index < len(frame)
