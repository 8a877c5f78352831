"""``moetriage replay``: its JSON is what docs/replay.md says, its tables can be read, and what is wrong is one line."""

from __future__ import annotations

import re
import sysconfig
from pathlib import Path

import polars as pl
import pytest
from cli.support import Command

from moetriage.cli.main import invoke
from moetriage.trace.io import RouteWriter, read_trace

EXCERPT = Path(__file__).parents[2] / "src" / "moetriage" / "data" / "qwen-excerpt.route.parquet"
KEYS = [
    *("trace", "phase", "mode", "policy", "value", "evict", "cache_mb", "reads_avoided_fraction", "weight_dropped_fraction"),
    *("dropped_fraction", "hit_fraction", "read_bytes_per_token"),
]


def row_of(rows, **wanted):
    (found,) = [row for row in rows if all(row[key] == value for key, value in wanted.items())]
    return found


def test_recorded_json_has_the_published_figures(command: Command):
    result = command("replay", EXCERPT, "--json", "--drop-cold-experts", "1,0.75", "--drop-cold-experts", "0.5", "--n-expert-used", "5,3")
    assert result.code == 0, result.err
    rows = result.json["rows"]
    assert list(rows[0])[: len(KEYS)] == KEYS
    assert {row["trace"] for row in rows} == {str(EXCERPT)}
    for policy, value, avoided, lost in (
        ("drop-cold-experts", 1.0, 0.661, 0.0946),
        ("drop-cold-experts", 0.75, 0.368, 0.0444),
        ("drop-cold-experts", 0.5, 0.0584, 0.0049),
        ("n-expert-used", 5, 0.232, 0.106),
        ("n-expert-used", 3, 0.588, 0.368),
    ):
        row = row_of(rows, policy=policy, value=value, phase="decode")
        assert row["reads_avoided_fraction"] == pytest.approx(avoided, abs=5e-4)
        assert row["weight_dropped_fraction"] == pytest.approx(lost, abs=5e-4)
        assert (row["mode"], row["evict"], row["cache_mb"], row["truncated"]) == ("recorded", None, None, False)


def test_simulated_json_has_the_recorded_hits(command: Command):
    result = command("replay", EXCERPT, "--mode", "simulate", "--cache-mb", "4000", "--evict", "lru,belady", "--json")
    rows = result.json["rows"]
    assert row_of(rows, phase="all", evict="lru")["hit_fraction"] == pytest.approx(0.749, abs=5e-4)
    assert row_of(rows, phase="decode", evict="lru")["hit_fraction"] == pytest.approx(0.803, abs=5e-4)
    assert row_of(rows, phase="decode", evict="lru")["cache_mb"] == 4000
    assert row_of(rows, phase="decode", evict="belady")["hit_fraction"] > 0.9


def test_closed_loop_stands_beside_the_static_views(command: Command):
    result = command("replay", EXCERPT, "--mode", "closed-loop", "--cache-mb", "4000", "--drop-cold-experts", "0.75", "--json")
    answer = result.json
    assert {row["mode"] for row in answer["rows"]} == {"recorded", "simulate", "closed-loop"}
    (view,) = answer["static_view"]
    assert view["recorded_reads_avoided_fraction"] == pytest.approx(0.3683, abs=1e-4)
    assert view["static_reads_avoided_fraction"] == pytest.approx(0.3682, abs=1e-4)
    assert view["closed_loop_reads_avoided_fraction"] == pytest.approx(0.4504, abs=1e-4)
    assert view["missed_fraction"] == pytest.approx(0.0822, abs=1e-4)


def test_tables_hold_the_same_figures(command: Command):
    result = command("replay", EXCERPT, "--mode", "closed-loop", "--cache-mb", "4000", "--drop-cold-experts", "0.75", "--prefetch", "1")
    assert result.code == 0
    assert "T = 784.7 MiB; LRU never hits below 770.1 MiB" in result.out
    assert re.search(r"closed-loop +F = 0.75 +lru, 1 ahead +4000 +81.11 % +75.65 % +43.31 %", result.out)
    assert "static view misses" in result.out


def test_a_bound_says_where_a_threshold_stands(command: Command, tmp_path: Path):
    """On its first tokens; what it says of the whole recording is pinned in tests/replay."""
    trace = read_trace(EXCERPT)
    frame = trace.frame.filter(trace.frame["step"] < 40)
    with RouteWriter(tmp_path / "short.parquet", trace.meta) as writer:
        writer.append({name: frame[name].to_numpy() for name in frame.columns})
    arguments = ("replay", tmp_path / "short.parquet", "--bound", "--mode", "simulate", "--cache-mb", "2000", "--drop-cold-experts", "0.75")
    rows = command(*arguments, "--json").json["bounds"]
    assert [(row["evict"], row["value"]) for row in rows] == [("lru", None), ("belady", None), ("lru", 0.75)]
    assert all(row["bound_read_bytes"] <= row["schedule_read_bytes"] for row in rows)
    assert 0.3 < rows[2]["possible_fraction_at_least"] <= rows[2]["possible_fraction_at_most"] < 0.6


def test_a_sweep_writes_parquet_and_goes_on(command: Command, tmp_path: Path):
    out = tmp_path / "sweep.parquet"
    arguments = ("replay", EXCERPT, "--sweep", "--out", out, "--cache-mb", "1000,4000", "--evict", "lru,s3fifo", "--jobs", "2")
    result = command(*arguments, "--drop-cold-experts", "0.75", "--json")
    assert result.code == 0, result.err
    assert result.json["out"] == str(out)
    assert len(result.json["rows"]) == 2 * 2 * 2 * 3
    assert f"8 cells are in {out}" in result.err
    frame = pl.read_parquet(out)
    assert set(KEYS) <= set(frame.columns)
    assert frame.filter(phase="decode", evict="lru", cache_mb=4000, mode="simulate")["hit_fraction"][0] == pytest.approx(0.803, abs=5e-4)
    again = command(*arguments, "--drop-cold-experts", "0.75")
    assert re.search(r"closed-loop +F = 0.75 +lru +4000 +81.03 %", again.out)


def test_advice_names_setting_formula_and_floor(command: Command):
    arguments = ("replay", EXCERPT, "--advise", "--memory-mb", "5000", "--disk-mb-s", "1300", "--compute-ms", "60")
    result = command(*arguments)
    assert "--cache-mb 4459, --drop-cold-experts 0.75" in result.out
    assert re.search(r"sum\(0.0600 s compute, 0.0\d+ s reads\) = 0.1\d+ s a token if nothing overlaps; max\(", result.out)
    assert "the floor is the compute" in " ".join(result.out.split())
    advice = command(*arguments, "--max-weight-dropped", "0", "--json").json["advice"]
    assert advice["best"]["drop_cold_experts"] is None
    assert advice["best"]["floor"] == "disk"


def test_a_picture_is_drawn(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("moetriage.replay.figure_data._BOUND_POINTS", 3)  # for the sake of time
    path = tmp_path / "replay.svg"
    result = command("replay", EXCERPT, "--plot", path, "--cache-mb", "4000", "--json")
    assert result.code == 0, result.err
    assert result.json["plot"] == str(path)
    assert path.stat().st_size > 50_000


def test_the_budget_of_a_trace_of_ours_is_the_default(command: Command, model: Path, tmp_path: Path):
    trace = tmp_path / "run.csv"
    ran = command(
        "run", model, "-p", "Hello there", "-n", "12", "--cache-mb", "2", "--drop-cold-experts", "0.75", "--route-trace", trace, "--json"
    )
    assert ran.code == 0, ran.err
    report = ran.json
    assert report["drop"]["dropped"] > 0
    result = command("replay", trace, "--mode", "closed-loop", "--drop-cold-experts", "0.75", "--json")
    row = row_of(result.json["rows"], mode="closed-loop", phase="decode")
    assert row["cache_mb"] == 2
    assert [row[key] for key in ("hits", "misses", "dropped")] == [report["decode"][key] for key in ("hits", "misses", "dropped")]
    whole = row_of(result.json["rows"], mode="closed-loop", phase="all")
    assert (whole["hits"], whole["misses"]) == (report["cache"]["hits"], report["cache"]["misses"])


def test_several_traces_give_rows_each(command: Command, model: Path, tmp_path: Path):
    trace = tmp_path / "run.parquet"
    assert command("run", model, "-p", "Hello there", "-n", "6", "--route-trace", trace, "--json").code == 0
    result = command("replay", EXCERPT, trace, "--json")
    assert [about["trace"] for about in result.json["traces"]] == [str(EXCERPT), str(trace)]
    assert {row["trace"] for row in result.json["rows"]} == {str(EXCERPT), str(trace)}


@pytest.fixture(scope="module")
def csv_lines(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    trace, path = read_trace(EXCERPT), tmp_path_factory.mktemp("csv") / "qwen.csv"
    with RouteWriter(path, trace.meta) as writer:
        writer.append({name: trace.frame[name].to_numpy() for name in trace.frame.columns})
    return path.read_text().splitlines(keepends=True)


def test_an_incomplete_trace_is_refused_or_said_in_every_result(command: Command, tmp_path: Path, csv_lines: list[str]):
    path = tmp_path / "cut.csv"
    path.write_text("".join(csv_lines[:20_000]))
    refused = command("replay", path)
    assert refused.code == 2
    assert refused.out == ""
    assert re.search(rf"{path}, row 20000: the trace ends inside step \d+", refused.err)
    for arguments in (
        ("--mode", "simulate", "--cache-mb", "4000"),
        ("--sweep", "--cache-mb", "4000", "--evict", "lru", "--out", tmp_path / "cut.parquet", "--jobs", "1"),
        ("--advise", "--memory-mb", "5000", "--disk-mb-s", "1000", "--compute-ms", "50"),
    ):
        read = command("replay", path, "--allow-truncated", "--json", *arguments)
        assert read.code == 0, read.err
        assert "read up to the last whole step only" in read.err
        assert all(row["truncated"] for row in read.json["rows"])
        assert "row 20000" in read.json["traces"][0]["truncated_reason"]


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda lines: lines[:60] + lines[61:], "row 61"),
        (lambda lines: [*lines[:70], lines[70].replace(",0,3059712", ",2,3059712"), *lines[71:]], "residency 2 is neither 0"),
        (lambda lines: ["time,object,size\n", "1,2,3\n"], "is not a route trace"),
        (lambda lines: lines[:51], "holds no routing at all"),
        (lambda lines: ["# route_trace v9\n", *lines[1:]], "version 9"),
    ],
    ids=["a row is missing", "a value cannot be", "foreign", "empty", "newer"],
)
def test_a_hostile_trace_is_one_line_with_row_and_reason(command: Command, tmp_path: Path, csv_lines: list[str], spoil, reason: str):
    path = tmp_path / "bad.csv"
    path.write_text("".join(spoil(csv_lines)))
    result = command("replay", path, "--mode", "simulate", "--cache-mb", "4000", "--json")
    assert result.code == 2
    assert result.out == ""
    assert len(result.errors) == 1
    assert str(path) in result.err
    assert reason in result.err


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        ("--mode predicted", ("--mode predicted", "recorded, simulate, closed-loop")),
        ("--mode simulate --cache-mb 4000 --evict lur", ("--evict lur", "lru, lfu, lfuda, s3fifo, partition, random, belady")),
        ("--mode simulate --cache-mb 4000 --evict lru,", ("--evict :",)),
        ("--mode simulate", ("does not say what cache", "--cache-mb")),
        ("--mode simulate --cache-mb -1", ("--cache-mb -1", "0 (off)")),
        ("--mode simulate --cache-mb nan", ("--cache-mb nan", "0 (off)")),
        ("--mode simulate --cache-mb inf", ("--cache-mb inf", "0 (off)")),
        ("--mode simulate --cache-mb many", ("--cache-mb many", "numbers")),
        ("--cache-mb 4000", ("--cache-mb does nothing with --mode recorded",)),
        ("--evict lfu", ("--evict does nothing with --mode recorded",)),
        ("--prefetch 1", ("--prefetch does nothing with --mode recorded",)),
        ("--drop-cold-experts nan", ("--drop-cold-experts nan", "above 0 and at most 1")),
        ("--drop-cold-experts 0", ("--drop-cold-experts 0", "above 0 and at most 1")),
        ("--drop-cold-experts 1.5", ("--drop-cold-experts 1.5", "above 0 and at most 1")),
        ("--n-expert-used 7", ("--n-expert-used 7", "between 1 and the 6")),
        ("--n-expert-used 0", ("--n-expert-used 0", "between 1 and the 6")),
        ("--n-expert-used 2.5", ("--n-expert-used 2.5", "whole numbers")),
        ("--drop-in-prefill --n-expert-used 5", ("--drop-in-prefill", "--drop-cold-experts F")),
        ("--mode closed-loop --cache-mb 0 --drop-cold-experts 1", ("--drop-cold-experts with --cache-mb 0", "give the cache memory")),
        ("--mode closed-loop --cache-mb 0 --n-expert-used 5 --prefetch 1", ("--prefetch 1 with --cache-mb 0",)),
        ("--mode simulate --cache-mb 4000 --prefetch -1", ("--prefetch -1",)),
        ("--mode simulate --cache-mb 4000 --evict belady --prefetch 1", ("--prefetch does nothing for --evict belady",)),
        ("--mode simulate --cache-mb 4000 --seed 3", ("--seed 3 does nothing without --evict random",)),
        ("--mode simulate --cache-mb 4000 --evict random --seed -3", ("--seed -3", "between 0 and 2^64")),
        ("--sweep --mode simulate", ("--mode does nothing with --sweep",)),
        ("--sweep --advise", ("one at a time",)),
        ("--sweep --jobs 0", ("--jobs 0", "at least 1")),
        ("--jobs 2", ("--jobs 2 does nothing without --sweep",)),
        ("--out a.parquet", ("--out a.parquet does nothing without --sweep",)),
        ("--sweep --out a.csv", ("--out a.csv", ".parquet")),
        ("--plot a.gif --cache-mb 4000", ("--plot a.gif", ".svg, .png, .pdf")),
        ("--advise", ("--advise needs --memory-mb M",)),
        ("--advise --memory-mb 0 --disk-mb-s 1 --compute-ms 1", ("--memory-mb 0", "above 0")),
        ("--advise --memory-mb 100 --disk-mb-s 1 --compute-ms 1", ("--memory-mb 100", "541 MiB")),
        ("--advise --memory-mb 5000 --disk-mb-s nan --compute-ms 1", ("--disk-mb-s nan",)),
        ("--advise --memory-mb 5000 --disk-mb-s 9 --compute-ms 1 --cache-mb 5", ("--cache-mb does nothing with --advise",)),
        ("--advise --memory-mb 5000 --disk-mb-s 9 --compute-ms 1 --max-weight-dropped 2", ("--max-weight-dropped 2",)),
        ("--max-weight-dropped 0.1", ("--max-weight-dropped 0.1 does nothing without --advise",)),
    ],
)
def test_a_bad_flag_is_one_line(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str, parts: tuple[str, ...]):
    monkeypatch.chdir(tmp_path)
    result = command("replay", EXCERPT, *flags.split())
    assert result.code == 2, result.err
    assert result.out == ""
    assert len(result.errors) == 1, result.err
    for part in parts:
        assert part in result.err
    assert list(tmp_path.iterdir()) == []


def test_a_trace_that_is_not_there_is_one_line(command: Command, tmp_path: Path):
    result = command("replay", tmp_path / "none.csv")
    assert (result.code, len(result.errors)) == (2, 1)
    assert str(tmp_path / "none.csv") in result.err


def test_one_of_a_kind_is_refused_for_several(command: Command):
    result = command("replay", EXCERPT, EXCERPT, "--plot", "a.svg", "--cache-mb", "4000")
    assert result.code == 2
    assert "--plot is about one trace, and 2 were given" in result.err


def test_replaying_needs_neither_llama_nor_matplotlib():
    import subprocess

    code = (
        "import sys; from moetriage.cli.main import invoke\n"
        f"assert invoke(['replay', {str(EXCERPT)!r}, '--mode', 'simulate', '--cache-mb', '4000']) == 0\n"
        "print([name for name in ('llama_cpp', 'matplotlib', 'torch') if name in sys.modules])"
    )
    python = Path(sysconfig.get_path("scripts")) / "python"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]"


def test_help_names_every_mode_and_order(capsys: pytest.CaptureFixture[str]):
    assert invoke(["replay", "--help"]) == 0
    text = capsys.readouterr().out
    for word in ("recorded", "s3fifo", "--bound", "--sweep", "--plot", "--advise"):
        assert word in text
