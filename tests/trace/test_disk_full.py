"""A trace that cannot be written, or not to its end: said at once, and the file stays readable up to the last whole step."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import polars as pl
import pytest

from moetriage.errors import TraceError
from moetriage.trace import spool
from moetriage.trace.io import RouteWriter, read_trace
from moetriage.trace.schema import SCHEMA, TraceMeta

Columns = dict[str, npt.NDArray[np.generic]]
STEPS = 6_000
ROWS_A_STEP = 6


@pytest.fixture(scope="module")
def many(make_columns: Callable[..., Columns]) -> Columns:
    return make_columns([(0, 0, 0, 4, 1), *((0, 1, step, 1, 1) for step in range(4, STEPS))])


@pytest.fixture
def columns(many: Columns) -> Columns:
    return {name: values.copy() for name, values in many.items()}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 128 KiB."""
    mount = tmp_path / "small"
    mount.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(mount)], capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"no file system can be mounted here: {made.stderr.strip()}")
    yield mount
    subprocess.run(["umount", str(mount)], check=True)


def write_steps(writer: RouteWriter, columns: Columns, piece: int) -> None:
    for start in range(0, len(columns["turn"]), piece):
        writer.append({name: values[start : start + piece] for name, values in columns.items()})


def assert_whole_start(path: Path, columns: Columns, n_rows: int) -> None:
    """The file is a faultless trace of the first rows, ends with a whole step, and is alone."""
    frame = read_trace(path).frame
    assert len(frame) == n_rows
    assert frame.equals(pl.DataFrame(columns, schema=SCHEMA).head(n_rows))
    assert (n_rows - 18) % ROWS_A_STEP == 0
    assert [file.name for file in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("piece", [6, 5_000])
@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_on_a_full_disk_the_file_is_readable_up_to_the_last_whole_step(
    suffix: str, piece: int, small_disk: Path, meta: TraceMeta, columns: Columns, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool.ParquetSink, "buffer_rows", 6_000)
    path = small_disk / f"t{suffix}"
    writer = RouteWriter(path, meta)
    with pytest.raises(TraceError, match="No space left on device") as caught:
        write_steps(writer, columns, piece)
    assert f"ends after {writer.rows} rows" in str(caught.value)
    assert caught.value is writer.error
    writer.append({name: values[:6] for name, values in columns.items()})  # whoever goes on needs no guard
    writer.close()
    # CSV fills the disk to the last page; Parquet stops while its parts fit a second time, so that they can be joined.
    assert writer.rows > (2_500 if suffix == ".csv" else 6_000)
    assert_whole_start(path, columns, writer.rows)


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_disk_that_is_full_at_the_end_is_said_on_close(
    suffix: str, small_disk: Path, meta: TraceMeta, columns: Columns, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool.CsvSink, "buffer_rows", 10**9)
    path = small_disk / f"t{suffix}"
    writer = RouteWriter(path, meta)
    write_steps(writer, columns, 20_000)
    (small_disk / "other").write_bytes(bytes(60_000))
    with pytest.raises(TraceError, match="No space left on device"):
        writer.close()
    (small_disk / "other").unlink()
    writer.close()
    assert writer.rows > 1_000
    assert_whole_start(path, columns, writer.rows)


def test_parts_that_no_longer_fit_when_joined_are_given_up_from_the_end(
    small_disk: Path, meta: TraceMeta, columns: Columns, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool.ParquetSink, "buffer_rows", 1_000)
    path = small_disk / "t.parquet"
    writer = RouteWriter(path, meta)
    writer.append({name: values[:5_400] for name, values in columns.items()})
    writer.append({name: values[5_400:8_400] for name, values in columns.items()})
    spooled = writer.rows
    assert spooled == 8_400
    free = os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize
    (small_disk / "other").write_bytes(bytes(free - 4_096))
    with pytest.raises(TraceError, match="can be read"):
        writer.close()
    (small_disk / "other").unlink()
    assert 0 < writer.rows < spooled
    assert_whole_start(path, columns, writer.rows)


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_full_disk_at_the_start_is_said_before_anything_is_computed(suffix: str, small_disk: Path, meta: TraceMeta) -> None:
    stat = os.statvfs(small_disk)
    (small_disk / "other").write_bytes(bytes(stat.f_bavail * stat.f_frsize))
    with pytest.raises(TraceError, match="cannot be written: No space left on device"):
        RouteWriter(small_disk / f"t{suffix}", meta)
    assert [file.name for file in small_disk.iterdir()] == ["other"]


LIMITED = """
import resource, signal, sys
import numpy as np
from moetriage.errors import TraceError
from moetriage.trace.io import RouteWriter, read_trace
from moetriage.trace.schema import SCHEMA, TraceMeta
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (50_001, resource.RLIM_INFINITY))
meta = TraceMeta(model="m", arch="a", n_layer=1, n_expert=2, n_expert_used=1, layer_expert_bytes={0: 1})
writer = RouteWriter(sys.argv[1], meta)
try:
    for step in range(0, 100_000, 100):
        steps = np.arange(step, step + 100)
        known = {"step": steps, "phase": np.ones(100), "weight": steps / 7}
        writer.append({name: known.get(name, np.zeros(100)) for name in SCHEMA})
except TraceError as error:
    print(error.reason)
writer.close()
print(len(read_trace(sys.argv[1]).frame) == writer.rows > 1_000)
"""


def test_a_row_torn_by_a_file_size_limit_is_cut_off(tmp_path: Path) -> None:
    """Needs no privilege, unlike mounting; the limit falls into the middle of a line."""
    path = tmp_path / "t.csv"
    done = subprocess.run([sys.executable, "-c", LIMITED, str(path)], capture_output=True, text=True, check=True)
    reason, is_right = done.stdout.splitlines()
    assert reason.endswith("File too large")
    assert is_right == "True"
    assert path.read_bytes().endswith(b"\n")
    assert 49_900 < path.stat().st_size < 50_001


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("none/t.csv", "cannot be written: No such file or directory"),
        ("none/t.parquet", "cannot be written: No such file or directory"),
        ("file/t.csv", "cannot be written: Not a directory"),
        ("folder.csv", "cannot be written: Is a directory"),
        ("t.txt", "a route trace is written as .csv or .parquet"),
        ("t", "a route trace is written as .csv or .parquet"),
        ("t.csv.gz", "a route trace is written as .csv or .parquet"),
    ],
)
def test_a_place_that_cannot_be_written_is_refused_at_once(name: str, reason: str, tmp_path: Path, meta: TraceMeta) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(TraceError) as caught:
        RouteWriter(tmp_path / name, meta)
    assert caught.value.reason == reason
    assert caught.value.exit_code == 2


def test_a_folder_without_permission_is_refused_at_once(tmp_path: Path, meta: TraceMeta, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: object, **_kwargs: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(Path, "open", refuse)  # permissions do not bind root, who runs some of our machines
    for suffix in (".csv", ".parquet"):
        with pytest.raises(TraceError, match="cannot be written: Permission denied"):
            RouteWriter(tmp_path / f"t{suffix}", meta)


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_cancelled_run_leaves_a_trace_of_its_whole_steps(suffix: str, tmp_path: Path, meta: TraceMeta, columns: Columns) -> None:
    path = tmp_path / f"t{suffix}"

    def run() -> None:
        with RouteWriter(path, meta) as writer:
            writer.append({name: values[:75] for name, values in columns.items()})
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run()
    assert_whole_start(path, columns, 72)


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_trace_without_rows_is_a_file_all_the_same(suffix: str, tmp_path: Path, meta: TraceMeta) -> None:
    path = tmp_path / f"t{suffix}"
    RouteWriter(path, meta).close()
    with pytest.raises(TraceError, match="holds no routing at all"):
        read_trace(path)


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_row_that_breaks_the_format_is_not_written(suffix: str, tmp_path: Path, meta: TraceMeta, columns: Columns) -> None:
    columns["weight"][90] = np.nan
    path = tmp_path / f"t{suffix}"
    writer = RouteWriter(path, meta)
    with pytest.raises(TraceError, match=r"the trace ends after 90 rows, .* weight nan is not a finite number") as caught:
        write_steps(writer, columns, 1_000)
    assert caught.value.row == 91
    writer.close()
    assert_whole_start(path, columns, 90)


def test_a_header_that_no_trace_can_have_is_refused(tmp_path: Path) -> None:
    meta = TraceMeta(model="m", arch="a", n_layer=1, n_expert=2, n_expert_used=3, layer_expert_bytes={0: 1})
    with pytest.raises(TraceError, match="n_expert_used=3 is not between"):
        RouteWriter(tmp_path / "t.csv", meta)


def test_wrong_use_is_a_programmers_error(tmp_path: Path, meta: TraceMeta, columns: Columns) -> None:
    with RouteWriter(tmp_path / "t.csv", meta) as writer:
        with pytest.raises(ValueError, match="columns are missing: slot"):
            writer.append({name: values for name, values in columns.items() if name != "slot"})
        with pytest.raises(ValueError, match="columns differ in length"):
            writer.append(columns | {"slot": columns["slot"][1:]})
    with pytest.raises(ValueError, match="is closed"):
        writer.append(columns)
