"""The demo's table is right: hits, drops and reads are those of the trace, both lossless cells say the same, and nothing is left behind."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from demo.lru import simulate
from demo.support import N_LAYER, TOKENS, TOP_K, tiny_settings, write_trace

from moetriage.demo import run as demo_run
from moetriage.demo.plan import PLAIN, STREAMED, plan_cells
from moetriage.demo.report import as_dict, rows, sentences
from moetriage.demo.run import WRITING, DemoResult, run_demo
from moetriage.errors import MoetriageError, UsageError
from moetriage.trace.io import read_trace
from moetriage.types import MIB

CELLS = [PLAIN, STREAMED, "streamed, F=0.75", "streamed, F=1"]


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_trace(tmp_path_factory.mktemp("trace") / "made-up.parquet")


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """On a disk: the demo refuses memory, and /tmp may be in memory."""
    import tempfile

    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        yield Path(name)


@pytest.fixture(scope="module")
def progress() -> list[tuple[str, int, int]]:
    return []


@pytest.fixture(scope="module")
def result(folder: Path, trace: Path, progress: list[tuple[str, int, int]]) -> DemoResult:
    """One whole demo, without a cgroup (a file as small as this one gets none)."""
    return run_demo(tiny_settings(folder, trace), lambda *what: progress.append(what))


def test_the_four_cells_run_in_order_with_the_same_prompt_and_tokens(result: DemoResult) -> None:
    assert [cell.name for cell, _ in result.cells] == CELLS
    assert {(outcome.spec.prompt_tokens, outcome.spec.tokens) for _, outcome in result.cells} == {(10, TOKENS)}
    assert [row.tokens for row in rows(result)] == [TOKENS] * 4
    assert not any(row.cut_short for row in rows(result))


@pytest.mark.parametrize(("cell", "threshold"), [(STREAMED, None), (CELLS[2], 0.75), (CELLS[3], 1.0)])
def test_hits_and_drops_are_those_of_an_lru_simulation_of_the_trace(
    result: DemoResult, trace: Path, cell: str, threshold: float | None
) -> None:
    capacity = result.sizes.cache_mb * MIB // result.layout.expert_bytes(0)
    prefill, decode = simulate(read_trace(trace), N_LAYER, capacity, threshold)
    outcome = next(outcome for found, outcome in result.cells if found.name == cell)
    assert outcome.result is not None
    report = outcome.result.report
    assert {name: report["prefill"][name] for name in ("hits", "misses", "dropped")} == vars(prefill)
    assert {name: report["decode"][name] for name in ("hits", "misses", "dropped")} == vars(decode)
    # The simulation says something only if all of it happened.
    assert decode.hits
    assert decode.misses
    assert report["cache"]["evictions"]
    assert bool(decode.dropped) == (threshold is not None)


def test_the_rows_are_ratios_of_what_was_counted(result: DemoResult) -> None:
    for row, (cell, outcome) in zip(rows(result), result.cells, strict=True):
        assert outcome.result is not None
        decode = outcome.result.report["decode"]
        assert row.peak_memory_bytes is not None
        assert row.peak_memory_bytes > 20 * MIB
        if cell.name == PLAIN:
            assert (row.hit_fraction, row.dropped_fraction, row.weight_dropped_fraction) == (None, None, None)
            continue
        routed = TOKENS * N_LAYER * TOP_K
        assert row.hit_fraction == decode["hits"] / routed
        assert row.dropped_fraction == decode["dropped"] / routed
        assert row.read_bytes_per_token == decode["misses"] * result.layout.expert_bytes(0) / TOKENS
        # The engine's count is what the kernel counted too, but for whole blocks and shared borders.
        if outcome.result.decode_disk_bytes is not None:
            assert decode["read_bytes"] <= outcome.result.decode_disk_bytes < 2 * decode["read_bytes"] + MIB


def test_a_higher_threshold_reads_less(result: DemoResult) -> None:
    reads = [row.read_bytes_per_token or 0.0 for row in rows(result)[1:]]
    assert reads[0] > reads[1] > reads[2] > 0


def test_streaming_said_what_plain_mmap_said(result: DemoResult) -> None:
    ids = [outcome.result.report["token_ids"] for _, outcome in result.cells if outcome.result is not None]
    assert ids[0] == ids[1]
    assert len(ids[0]) == TOKENS + 1
    assert ids[3] != ids[0]  # dropping changes what is said, so equality above is no accident
    assert as_dict(result)["same_tokens"] is True


def test_a_lossless_cell_that_says_something_else_is_an_error(result: DemoResult) -> None:
    streamed = result.cells[1][1]
    assert streamed.result is not None
    said = streamed.result.report["token_ids"]
    streamed.result.report["token_ids"] = [*said[:3], said[3] + 1, *said[4:]]
    try:
        with pytest.raises(MoetriageError, match="token 4 differs"):
            demo_run._check_same_tokens(result.cells)
    finally:
        streamed.result.report["token_ids"] = said


def test_progress_goes_through_every_stage_to_its_end(result: DemoResult, progress: list[tuple[str, int, int]]) -> None:
    assert list(dict.fromkeys(what for what, _, _ in progress)) == [WRITING, *CELLS]
    for stage in [WRITING, *CELLS]:
        counts = [(done, total) for what, done, total in progress if what == stage]
        assert counts == sorted(counts)
        assert counts[-1][0] == counts[-1][1] > 0
    assert len(progress) > 4 * TOKENS


def test_the_sentences_name_the_missing_limit_and_the_random_weights(result: DemoResult) -> None:
    text = " ".join(sentences(result))
    assert result.unlimited_because is not None
    assert "flatters plain mmap" in text
    assert "no text to show" in text
    assert "said the same tokens" in text
    assert "In the same memory" not in text


def test_the_json_object_has_every_number_of_the_table(result: DemoResult) -> None:
    found = json.loads(json.dumps(as_dict(result), allow_nan=False))
    assert [cell["cell"] for cell in found["cells"]] == CELLS
    assert found["limit_bytes"] is None
    assert found["unlimited_because"]
    assert found["cells"][1]["hit_fraction"] == rows(result)[1].hit_fraction


def test_nothing_is_left_behind(result: DemoResult, folder: Path) -> None:
    assert result.kept is None
    assert list(folder.iterdir()) == []


@pytest.fixture
def two_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the first two cells only, for the sake of time."""
    monkeypatch.setattr(demo_run, "plan_cells", lambda *arguments: plan_cells(*arguments)[:2])


@pytest.mark.usefixtures("two_cells")
def test_without_time_every_cell_generates_at_least_one_token_and_says_so(
    folder: Path, trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_run, "_MIN_CELL_SECONDS", 0.001)
    monkeypatch.setattr(demo_run, "_KILL_AT_SHARES", 1e6)
    result = run_demo(tiny_settings(folder, trace, seconds=0.0), lambda *_: None)
    assert [row.tokens for row in rows(result)] == [1] * 2
    assert all(row.cut_short for row in rows(result))
    assert sum("there was time for 1 of 24 tokens" in sentence for sentence in sentences(result)) == 2


@pytest.mark.usefixtures("two_cells")
def test_a_cell_that_does_not_come_to_its_end_leaves_a_row_without_numbers(
    folder: Path, trace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_run, "_MIN_CELL_SECONDS", 0.02)
    result = run_demo(tiny_settings(folder, trace, seconds=0.0), lambda *_: None)
    assert [row.tok_per_s for row in rows(result)] == [None] * 2
    assert "Plain mmap did not come" in sentences(result)[0]
    assert as_dict(result)["same_tokens"] is None


def test_a_trace_that_does_not_fit_names_the_cell(folder: Path, trace: Path) -> None:
    with pytest.raises(UsageError, match=r"cell 'plain mmap': .*cannot drive"):
        run_demo(tiny_settings(folder, trace, shape="tiny-mixed"), lambda *_: None)
    assert list(folder.iterdir()) == []
