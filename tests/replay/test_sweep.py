"""A sweep finds what single cells find, on several processes, and goes on where it was interrupted."""

from __future__ import annotations

import json

import polars as pl
import pytest

from moetriage.errors import UsageError
from moetriage.replay import sweep as sweep_module
from moetriage.replay.cells import Lossy
from moetriage.replay.engine import run_cells
from moetriage.replay.rows import rows_of
from moetriage.replay.sweep import Grid, default_budgets, sweep
from moetriage.types import MIB

GRID = Grid(
    budgets_bytes=(900 * MIB, 2000 * MIB, int(2000.5 * MIB)),
    evictions=("lru", "random", "belady"),
    lossy=(Lossy(threshold=0.75), Lossy(n_expert_used=4)),
    prefetch=1,
    seed=3,
)
N_CELLS = 27


@pytest.fixture
def expected(short_qwen):
    return [row for group in GRID.groups() for row in rows_of("trace", run_cells(short_qwen, group))]


def test_processes_find_what_one_finds(short_qwen, tmp_path, expected):
    seen = []
    out = tmp_path / "out.parquet"
    rows = sweep(short_qwen, GRID, out, trace="trace", jobs=2, progress=lambda done, total: seen.append((done, total)))
    assert [{**row, "trace_digest": rows[0]["trace_digest"]} for row in expected] == rows
    assert seen[0] == (0, N_CELLS)
    assert seen[-1] == (N_CELLS, N_CELLS)
    frame = pl.read_parquet(out)
    assert len(frame) == len(rows) == 3 * N_CELLS
    assert list(tmp_path.iterdir()) == [out]


def test_an_interrupted_sweep_goes_on(short_qwen, tmp_path, expected, monkeypatch):
    out = tmp_path / "out.parquet"
    seen = []

    def stop(done, total):
        seen.append(done)
        if done == 12:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sweep(short_qwen, GRID, out, trace="trace", jobs=1, progress=stop)
    assert not out.exists()
    journal = tmp_path / "out.parquet.partial"
    journal.write_text(journal.read_text() + '[{"trace": "cut sho')
    calls = []
    monkeypatch.setattr(sweep_module, "run_cells", lambda table, cells: calls.append(cells) or run_cells(table, cells))
    rows = sweep(short_qwen, GRID, out, trace="trace", jobs=1)
    assert len(calls) == (N_CELLS - 12) / 3
    assert [row["read_bytes"] for row in rows] == [row["read_bytes"] for row in expected]
    assert not journal.exists()


def test_a_finished_sweep_computes_only_what_is_new(short_qwen, tmp_path, monkeypatch):
    out = tmp_path / "out.parquet"
    first = sweep(short_qwen, GRID, out, trace="trace", jobs=1)
    monkeypatch.setattr(sweep_module, "run_cells", None)
    again = sweep(short_qwen, GRID, out, trace="trace", jobs=1)
    assert again == first
    monkeypatch.undo()
    more = Grid(budgets_bytes=(900 * MIB,), evictions=("lru", "lfu"))
    rows = sweep(short_qwen, more, out, trace="trace", jobs=1)
    assert [row["evict"] for row in rows if row["phase"] == "decode"] == ["lru", "lfu"]
    assert len(pl.read_parquet(out)) == 3 * (N_CELLS + 2)  # lru without reading ahead is another cell


def test_results_of_another_trace_are_refused(short_qwen, qwen, tmp_path):
    out = tmp_path / "out.parquet"
    small = Grid(budgets_bytes=(900 * MIB,), evictions=("lru",))
    sweep(short_qwen, small, out, trace="trace", jobs=1)
    before = out.read_bytes()
    with pytest.raises(UsageError, match="holds results of another trace"):
        sweep(qwen, small, out, trace="trace", jobs=1)
    assert out.read_bytes() == before


@pytest.mark.parametrize(("name", "content"), [("notes.parquet", b"not Parquet"), ("out.txt", None)])
def test_a_file_that_is_no_sweep_is_left_alone(short_qwen, tmp_path, name, content):
    out = tmp_path / name
    if content is not None:
        out.write_bytes(content)
    with pytest.raises(UsageError, match=r"--out .*(is no Parquet file|must end in \.parquet)"):
        sweep(short_qwen, GRID, out, trace="trace", jobs=1)
    assert content is None or out.read_bytes() == content


def test_a_table_of_something_else_is_left_alone(short_qwen, tmp_path):
    out = tmp_path / "out.parquet"
    pl.DataFrame({"a": [1]}).write_parquet(out)
    with pytest.raises(UsageError, match="holds no results of a sweep"):
        sweep(short_qwen, GRID, out, trace="trace", jobs=1)


def test_a_place_that_cannot_be_written_is_one_line(short_qwen, tmp_path):
    with pytest.raises(UsageError, match="cannot be written: No such file or directory"):
        sweep(short_qwen, GRID, tmp_path / "no" / "out.parquet", trace="trace", jobs=1)


def test_a_journal_holds_one_line_for_each_cache(short_qwen, tmp_path):
    def stop(done, _):
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sweep(short_qwen, GRID, tmp_path / "out.parquet", trace="trace", jobs=1, progress=stop)
    (line,) = (tmp_path / "out.parquet.partial").read_text().splitlines()
    assert {row["mode"] for row in json.loads(line)} == {"simulate", "closed-loop"}


def test_default_budgets_stand_on_both_sides_of_the_cliff(qwen):
    budgets = default_budgets(qwen.shape)
    assert all(budget % MIB == 0 for budget in budgets)
    assert budgets[0] < qwen.shape.cliff_bytes < qwen.shape.working_set_bytes < budgets[-1]
    assert max(b for b in budgets if b < qwen.shape.cliff_bytes) == (qwen.shape.cliff_bytes - 1) // MIB * MIB
    assert budgets[-1] >= qwen.shape.total_bytes
