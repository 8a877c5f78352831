from __future__ import annotations

import csv
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moetriage.config import DropConfig, StreamConfig
from moetriage.errors import AccountingError, UsageError
from moetriage.stream.telemetry import COLUMNS, CSV_MAGIC, TokenCsvWriter, check_identities, progress_line, report_as_dict
from moetriage.types import CacheStats, DropStats, Phase, PhaseCounts, PhaseTimes, RunReport, TokenMetrics

PREFILL = TokenMetrics(
    step=0,
    phase=Phase.PREFILL,
    n_tokens=5,
    wall_seconds=1.0,
    compute_seconds=0.4,
    read_wait_seconds=0.5,
    cache_seconds=0.05,
    other_seconds=0.05,
    hits=0,
    misses=12,
    dropped=0,
    routed=0,
    evictions=2,
    reads=36,
    read_bytes=36_000,
    resident_bytes=10_000,
)
DECODE = TokenMetrics(
    step=5,
    phase=Phase.DECODE,
    n_tokens=1,
    wall_seconds=0.25,
    compute_seconds=0.125,
    read_wait_seconds=0.0625,
    cache_seconds=0.03125,
    other_seconds=0.03125,
    hits=6,
    misses=1,
    dropped=1,
    routed=8,
    evictions=1,
    reads=3,
    read_bytes=3_000,
    resident_bytes=10_000,
)
STEPS = [PREFILL, DECODE, dataclasses.replace(DECODE, step=6)]
REPORT = RunReport(
    text="so\nit goes",
    token_ids=[7, 8, 9],
    generated=3,
    load_seconds=0.7,
    prefill_seconds=1.0,
    decode_seconds=0.5,
    tok_per_s=4.0,
    read_bytes=42_000,
    reads=42,
    cache=CacheStats(budget_bytes=10_000, resident_bytes=10_000, peak_bytes=11_000, hits=12, misses=14, evictions=4),
    drop=DropStats(threshold=0.75, routed=16, dropped=2, weight_dropped_fraction=0.03),
    phases=PhaseTimes(compute_seconds=0.25, read_wait_seconds=0.125, cache_seconds=0.0625, other_seconds=0.0625),
    peak_rss_bytes=123_456,
    o_direct="on",
    finish_reason="length",
    prefill=PhaseCounts(tokens=5, misses=12, reads=36, read_bytes=36_000),
    decode=PhaseCounts(tokens=2, hits=12, misses=2, dropped=2, routed=16, reads=6, read_bytes=6_000),
    config=StreamConfig(cache_mb=64, drop=DropConfig(threshold=0.75)).as_dict(),
)


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


def test_csv_has_a_row_per_step_that_reads_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "m.csv"
    with TokenCsvWriter(path, {"version": "0.1", "model": "/m a.gguf", "config": REPORT.config}) as writer:
        for metrics in STEPS:
            writer.write(metrics)
    lines = path.read_text().splitlines()
    assert lines[:3] == [CSV_MAGIC, '# version="0.1"', '# model="/m a.gguf"']
    assert json.loads(lines[3].removeprefix("# config=")) == REPORT.config
    assert lines[4] == ",".join(COLUMNS)
    parse: dict[str, Callable[[str], object]] = {"int": int, "float": float, "Phase": lambda text: Phase[text.upper()]}
    types = {field.name: str(field.type) for field in dataclasses.fields(TokenMetrics)}
    read_back = [{name: parse[types[name]](text) for name, text in row.items()} for row in rows_of(path)]
    assert read_back == [dataclasses.asdict(step) for step in STEPS]


def test_csv_can_be_followed_while_the_run_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "m.csv"
    writer = TokenCsvWriter(path, {})
    for n_rows, metrics in enumerate(STEPS, start=1):
        writer.write(metrics)
        assert len(rows_of(path)) == writer.rows == n_rows
        assert path.read_text().endswith("\n")
    writer.close()


def test_preamble_cannot_break_out_of_its_line(tmp_path: Path) -> None:
    path = tmp_path / "m.csv"
    TokenCsvWriter(path, {"model": "a\nstep,phase\n1,2"}).close()
    lines = path.read_text().splitlines()
    assert len(lines) == 3
    assert json.loads(lines[1].removeprefix("# model=")) == "a\nstep,phase\n1,2"


@pytest.mark.parametrize(
    ("name", "reason"), [("none/m.csv", "No such file or directory"), (".", "Is a directory"), ("file/m", "Not a directory")]
)
def test_metrics_that_cannot_be_written_are_refused_at_once(name: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=f"the metrics cannot be written: {reason}") as caught:
        TokenCsvWriter(tmp_path / name, {})
    assert caught.value.exit_code == 2


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_disk_that_is_full_from_the_start_is_refused_at_once() -> None:
    with pytest.raises(UsageError, match="No space left on device"):
        TokenCsvWriter("/dev/full", {})


LIMITED = """
import resource, signal, sys
sys.path.insert(0, sys.argv[2])
from test_telemetry import DECODE
from moetriage.errors import UsageError
from moetriage.stream.telemetry import TokenCsvWriter
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (2_001, resource.RLIM_INFINITY))
writer = TokenCsvWriter(sys.argv[1], {"version": "0.1"})
failures = []
for _ in range(100):
    try:
        writer.write(DECODE)
    except UsageError as error:
        failures.append(str(error))
writer.close()
print(writer.rows, len(failures), failures[0])
"""


def test_when_the_disk_fills_up_the_file_ends_with_a_whole_row_and_it_is_said_once(tmp_path: Path) -> None:
    path = tmp_path / "m.csv"
    command = [sys.executable, "-c", LIMITED, str(path), str(Path(__file__).parent)]
    n_rows, n_failures, message = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split(" ", 2)
    assert message.strip() == f"{path}: the metrics end after {n_rows} steps: File too large"
    assert n_failures == "1"
    rows = rows_of(path)
    assert len(rows) == int(n_rows) > 10
    assert all(row["resident_bytes"] == "10000" for row in rows)
    assert path.read_text().endswith("\n")


def test_progress_is_one_line_of_json_with_the_columns_as_keys() -> None:
    line = progress_line(DECODE)
    assert "\n" not in line
    assert json.loads(line) == dataclasses.asdict(DECODE) | {"phase": "decode"}
    assert tuple(json.loads(line)) == COLUMNS


def test_report_has_the_documented_keys_and_is_json() -> None:
    report = json.loads(json.dumps(report_as_dict(REPORT), allow_nan=False))
    assert list(report) == [
        *("text", "token_ids", "generated", "load_seconds", "prefill_seconds", "decode_seconds", "tok_per_s", "read_bytes", "reads"),
        *("cache", "drop", "phases", "peak_rss_bytes", "o_direct", "finish_reason", "prefill", "decode", "config"),
    ]
    assert set(report["cache"]) == {"budget_bytes", "resident_bytes", "peak_bytes", "hits", "misses", "evictions"}
    assert set(report["drop"]) == {"threshold", "routed", "dropped", "weight_dropped_fraction"}
    assert set(report["phases"]) == {"compute_seconds", "read_wait_seconds", "cache_seconds", "other_seconds"}
    for phase in ("prefill", "decode"):
        assert set(report[phase]) == {"tokens", "hits", "misses", "dropped", "routed", "reads", "read_bytes"}
    assert report["config"]["drop"]["threshold"] == 0.75


def test_every_key_is_documented(repo_root: Path) -> None:
    text = (repo_root / "docs" / "telemetry.md").read_text()
    report = report_as_dict(REPORT)
    nested = [f"{outer}.{key}" for outer in ("cache", "drop", "phases", "decode") for key in dataclasses.asdict(getattr(REPORT, outer))]
    for key in [*report, *nested, *COLUMNS]:
        assert f"| `{key}` |" in text, key


def test_consistent_counters_pass() -> None:
    check_identities(REPORT, STEPS, layer_bytes=1_000)
    check_identities(REPORT, [], layer_bytes=1_000)


def test_without_streaming_there_are_no_lookups_to_account_for() -> None:
    config = StreamConfig(mmap=True).as_dict()
    counts: dict[str, Any] = {"hits": 0, "misses": 0, "dropped": 0, "reads": 0, "read_bytes": 0, "evictions": 0, "resident_bytes": 0}
    none = {"cache": CacheStats(), "drop": DropStats(), "prefill": PhaseCounts(tokens=5), "decode": PhaseCounts(tokens=2, routed=16)}
    report = dataclasses.replace(REPORT, config=config, reads=0, read_bytes=0, **none)
    check_identities(report, [dataclasses.replace(step, **counts) for step in STEPS])


def test_counts_of_an_interrupted_evaluation_belong_to_no_phase() -> None:
    cache = dataclasses.replace(REPORT.cache, hits=15)
    check_identities(dataclasses.replace(REPORT, cache=cache, finish_reason="interrupted"), [], layer_bytes=1_000)


def changed(path: str, value: object) -> RunReport:
    outer, _, inner = path.rpartition(".")
    return dataclasses.replace(
        REPORT, **({outer: dataclasses.replace(getattr(REPORT, outer), **{inner: value})} if outer else {inner: value})
    )


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("decode_seconds", 0.502, "phases sum to 0.500000 s, but decode_seconds is 0.502000"),
        ("phases.compute_seconds", 0.2, "phases sum to 0.450000 s"),
        ("phases.other_seconds", -0.01, "other_seconds is -0.01"),
        ("phases.cache_seconds", float("nan"), "cache_seconds is nan"),
        ("prefill_seconds", float("inf"), "prefill_seconds is inf"),
        ("prefill_seconds", 0.5, "steps of prefill took 1.000000 s, longer than prefill_seconds 0.500000"),
        ("load_seconds", -1.0, "load_seconds is -1"),
        ("generated", 4, "generated 4 is not the number of token_ids (3)"),
        ("tok_per_s", 8.0, "tok_per_s 8 x decode_seconds 0.5 is not generated (3)"),
        ("tok_per_s", 3.9, "tok_per_s 3.9 x decode_seconds 0.5 is not generated (3)"),
        ("cache.resident_bytes", 11_001, "cache resident_bytes 11001 is above the budget of 10000 bytes and one layer (1000)"),
        ("cache.peak_bytes", 11_001, "cache peak_bytes 11001 is above the budget"),
        ("cache.peak_bytes", 9_999, "cache resident_bytes 10000 is above its peak_bytes 9999"),
        ("cache.hits", 13, "hits of all steps are 12, the report says 13"),
        ("cache.misses", 13, "misses of all steps are 14, the report says 13"),
        ("cache.evictions", 3, "evictions of all steps are 4, more than the report's 3"),
        ("reads", 41, "reads of all steps are 42, more than the report's 41"),
        ("read_bytes", 41_999, "read_bytes of all steps are 42000, more than the report's 41999"),
        ("drop.dropped", 3, "dropped of all steps are 2, the report says 3"),
        ("drop.dropped", 17, "dropped 17 is above routed 16"),
        ("drop.weight_dropped_fraction", 1.1, "weight_dropped_fraction 1.1"),
        ("decode.routed", 15, "decode: hits 12 + misses 2 + dropped 2 is 16, not routed 15"),
        ("decode.hits", 11, "hits of prefill 0 and of decode 11 are not the report's 12"),
        ("prefill.misses", 13, "misses of prefill 13 and of decode 2 are not the report's 14"),
        ("prefill.dropped", 1, "dropped of prefill 1 and of decode 2 are not the report's 2"),
        ("drop.dropped", 0, "weight_dropped_fraction 0.03 does not go with 0 dropped"),
    ],
)
def test_a_report_that_contradicts_itself_is_an_error(path: str, value: object, message: str) -> None:
    with pytest.raises(AccountingError) as caught:
        check_identities(changed(path, value), STEPS, layer_bytes=1_000)
    assert message in str(caught.value)
    assert caught.value.exit_code == 1


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("hits", 5, "step 5: hits 5 + misses 1 + dropped 1 is 7, not routed 8"),
        ("routed", 9, "step 5: hits 6 + misses 1 + dropped 1 is 8, not routed 9"),
        ("dropped", 9, "step 5: dropped 9 is above routed 8"),
        ("wall_seconds", 0.2505, "step 5: phases sum to 0.250000 s, but wall_seconds is 0.250500"),
        ("read_wait_seconds", -0.1, "step 5: read_wait_seconds is -0.1"),
        ("misses", -1, "step 5: misses is -1"),
        ("reads", 0, "step 5: 0 reads cannot have read 3000 bytes"),
        ("n_tokens", 0, "step 5: n_tokens 0 is below 1"),
    ],
)
def test_a_step_that_contradicts_itself_is_an_error(name: str, value: float, message: str) -> None:
    change: dict[str, Any] = {name: value}
    steps = [PREFILL, dataclasses.replace(DECODE, **change), STEPS[2]]
    with pytest.raises(AccountingError) as caught:
        check_identities(REPORT, steps, layer_bytes=1_000)
    assert message in str(caught.value)


def test_many_faults_make_one_line() -> None:
    steps = [dataclasses.replace(DECODE, step=step, hits=0) for step in range(100)]
    with pytest.raises(AccountingError, match="; and 1") as caught:
        check_identities(REPORT, steps, layer_bytes=1_000)
    assert len(str(caught.value)) < 600
