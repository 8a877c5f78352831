"""A disk that fills up while a run writes to it: the generation goes on or stops, by choice; the file stays readable."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli.support import Command

from moetriage.trace import spool
from moetriage.trace.io import read_trace

LONG = ("-p", "Hello", "-n", "300", "--temp", "0")


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write often, so that the disk is full long before the run's end."""
    monkeypatch.setattr(spool.CsvSink, "buffer_rows", 256)
    monkeypatch.setattr(spool.ParquetSink, "buffer_rows", 256)


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_the_generation_goes_on_without_the_trace(suffix: str, command: Command, model: Path, small_disk: Path) -> None:
    path = small_disk / f"t{suffix}"
    result = command("run", model, *LONG, "--json", "--route-trace", path)
    assert result.code == 0
    assert result.json["generated"] == 300
    assert len(result.errors) == 1
    for part in (str(path), "No space left on device", "The generation goes on without it"):
        assert part in result.err
    assert_readable_start(path, 300)


def test_the_generation_stops_if_that_was_chosen(command: Command, model: Path, small_disk: Path) -> None:
    path = small_disk / "t.csv"
    result = command("run", model, *LONG, "--route-trace", path, "--trace-errors", "stop")
    assert result.code == 2
    assert len(result.errors) == 1
    assert "No space left on device" in result.err
    assert 0 < len(result.out) < len(command("run", model, *LONG).out)
    assert_readable_start(path, 300)


def test_metrics_end_with_their_last_whole_row(command: Command, model: Path, small_disk: Path) -> None:
    (small_disk / "ballast").write_bytes(bytes(40_000))
    path = small_disk / "m.csv"
    result = command("run", model, *LONG, "--json", "--csv", path)
    assert result.code == 0
    assert len(result.errors) == 1
    assert "No space left on device" in result.err
    lines = path.read_text().splitlines()
    assert 5 < len(lines) < 300
    assert len({line.count(",") for line in lines[4:]}) == 1


@pytest.mark.parametrize("flag", ["--csv", "--route-trace"])
def test_a_disk_that_is_full_before_is_refused(flag: str, command: Command, model: Path, small_disk: Path) -> None:
    (small_disk / "ballast").write_bytes(bytes(64 * 1024))
    result = command("run", model, *LONG, flag, small_disk / "t.csv")
    assert result.code == 2
    assert len(result.errors) == 1
    assert "cannot be written: No space left on device" in result.err
    assert [path.name for path in small_disk.iterdir()] == ["ballast"]


def assert_readable_start(path: Path, n_tokens: int) -> None:
    steps = read_trace(path).frame["step"].n_unique()
    assert 10 < steps < n_tokens
    assert [found.name for found in path.parent.iterdir()] == [path.name]
