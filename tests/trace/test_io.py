from __future__ import annotations

import dataclasses
import itertools
import os
import stat
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetriage.errors import TraceError
from moetriage.trace.io import RouteWriter, TraceReader, read_meta, read_trace, scan_batches
from moetriage.trace.schema import SCHEMA, TraceMeta

Columns = dict[str, npt.NDArray[np.generic]]
RECORDING = "src/moetriage/data/qwen-excerpt.route.parquet"


@pytest.mark.parametrize("name", ["t.csv", "t.parquet", "T.CSV"])
def test_written_trace_reads_back_as_it_was(name: str, write: Callable[[str], Path], meta: TraceMeta, columns: Columns) -> None:
    trace = read_trace(write(name))
    assert trace.meta == meta
    assert trace.has_dropped
    assert not trace.truncated
    assert dict(trace.frame.schema) == SCHEMA
    for column, values in columns.items():
        assert np.array_equal(trace.frame[column].to_numpy(), values), column


@given(weight=st.floats(0, width=32, allow_nan=False, allow_infinity=False))
@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_weights_keep_every_bit(suffix: str, weight: float, tmp_path_factory: pytest.TempPathFactory) -> None:
    meta = TraceMeta(model="m", arch="a", n_layer=1, n_expert=2, n_expert_used=1, layer_expert_bytes={0: 1})
    columns = {name: np.zeros(1, np.int64) for name in SCHEMA} | {"weight": np.array([weight], np.float32), "phase": np.array([1])}
    path = tmp_path_factory.getbasetemp() / f"bits{suffix}"
    with RouteWriter(path, meta) as writer:
        writer.append(columns)
    assert read_trace(path).frame["weight"].to_numpy().view(np.uint32)[0] == columns["weight"].view(np.uint32)[0]


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
@pytest.mark.parametrize("piece", [1, 3, 7])
def test_rows_may_come_in_pieces_of_any_size(piece: int, suffix: str, tmp_path: Path, meta: TraceMeta, columns: Columns) -> None:
    path = tmp_path / f"t{suffix}"
    buffer = {name: np.empty(piece, values.dtype) for name, values in columns.items()}
    with RouteWriter(path, meta) as writer:
        for start in range(0, len(columns["turn"]), piece):
            for name, values in columns.items():  # the engine uses its buffers again
                buffer[name] = buffer[name][: len(values[start : start + piece])]
                buffer[name][:] = values[start : start + piece]
            writer.append(buffer)
    assert read_trace(path).frame.equals(pl.DataFrame(columns, schema=SCHEMA))


@pytest.mark.parametrize("rows", [1, 5, 14, 10_000])
@pytest.mark.parametrize("name", ["t.csv", "t.parquet"])
def test_scan_gives_all_rows_in_frames_of_whole_batches(rows: int, name: str, write: Callable[[str], Path], columns: Columns) -> None:
    path = write(name)
    frames = list(scan_batches(path, rows=rows))
    assert pl.concat(frames).equals(pl.DataFrame(columns, schema=SCHEMA))
    for before, after in itertools.pairwise(frames):
        assert after["layer"][0] == 1
        assert before["layer"][-1] == 3
        assert after["step"][0] == before["step"][-1] + 1


def test_a_long_csv_is_parsed_in_blocks(tmp_path: Path, meta: TraceMeta, make_columns: Callable[..., Columns]) -> None:
    columns = make_columns([(0, 1, step, 1, 1) for step in range(9_000)])
    path = tmp_path / "t.csv"
    with RouteWriter(path, meta) as writer:
        writer.append(columns)
    assert path.stat().st_size > (1 << 20), "must be longer than a block"
    frames = list(scan_batches(path, rows=1))
    assert len(frames) > 1
    assert pl.concat(frames).equals(pl.DataFrame(columns, schema=SCHEMA))
    lines = path.read_text().split("\n")
    lines[50_000] = lines[50_000].replace(",", ";", 1)
    path.write_text("\n".join(lines))
    with pytest.raises(TraceError, match=r"row 50001: has 9 of 10 fields"):
        read_trace(path)


def test_parquet_of_many_row_groups_is_one_file_in_order(
    tmp_path: Path, meta: TraceMeta, make_columns: Callable[..., Columns], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moetriage.trace.spool.ParquetSink.buffer_rows", 12)
    columns = make_columns([(0, 1, step, 1, 1) for step in range(40)])
    path = tmp_path / "t.parquet"
    with RouteWriter(path, meta) as writer:
        for start in range(0, 240, 6):
            writer.append({name: values[start : start + 6] for name, values in columns.items()})
        assert len(list(tmp_path.iterdir())) > 10, "must have spooled"
    assert [file.name for file in tmp_path.iterdir()] == ["t.parquet"]
    assert read_trace(path).frame.equals(pl.DataFrame(columns, schema=SCHEMA))
    assert read_trace(path).meta == meta


def test_recorded_csv_without_dropped_column_reads_as_nothing_dropped(write: Callable[[str], Path], columns: Columns) -> None:
    path = write("t.csv")
    lines = path.read_text().splitlines()
    n_header = sum(line.startswith("#") for line in lines)
    path.write_text("\n".join(lines[:n_header] + [line.rsplit(",", 1)[0] for line in lines[n_header:]]) + "\n")
    trace = read_trace(path)
    assert not trace.has_dropped
    assert trace.frame.equals(pl.DataFrame(columns, schema=SCHEMA))


def test_columns_are_found_by_name_and_unknown_ones_left_unread(write: Callable[[str], Path], tmp_path: Path, columns: Columns) -> None:
    lines = write("t.csv").read_text().splitlines()
    n_header = sum(line.startswith("#") for line in lines)
    turned = [",".join(["note", *reversed(lines[n_header].split(","))])]
    turned += [",".join(["some text", *reversed(line.split(","))]) for line in lines[n_header + 1 :]]
    (tmp_path / "turned.csv").write_text("\r\n".join(lines[:n_header] + turned) + "\r\n")
    assert read_trace(tmp_path / "turned.csv").frame.equals(pl.DataFrame(columns, schema=SCHEMA))


def test_a_directory_is_read_in_name_order_and_its_turns_are_numbered_on(write: Callable[[str], Path], columns: Columns) -> None:
    path = write("b.parquet")
    write("a.csv")
    (path.parent / "README.md").write_text("no trace")
    trace = read_trace(path.parent)
    n_rows = len(columns["turn"])
    assert len(trace.frame) == 2 * n_rows
    assert trace.frame["turn"].to_list() == [*columns["turn"], *(columns["turn"] + 2)]
    assert trace.frame.drop("turn")[n_rows:].equals(trace.frame.drop("turn")[:n_rows])


def test_a_directory_of_two_models_is_refused(write: Callable[[str], Path], meta: TraceMeta, columns: Columns) -> None:
    path = write("a.csv")
    other = dataclasses.replace(meta, model="other")
    with RouteWriter(path.with_name("b.csv"), other) as writer:
        writer.append(columns)
    with pytest.raises(TraceError, match=r"b\.csv: is of another model or width than .*a\.csv"):
        read_trace(path.parent)


def test_meta_is_read_without_the_rows(write: Callable[[str], Path], meta: TraceMeta) -> None:
    path = write("t.csv")
    path.write_text(path.read_text() + "garbage\n")
    assert read_meta(path) == meta


def test_reader_counts_rows(write: Callable[[str], Path], columns: Columns) -> None:
    reader = TraceReader(write("t.csv"))
    assert sum(len(frame) for frame in reader.batches(rows=10)) == reader.rows == len(columns["turn"])


def test_file_replaces_the_old_one_only_on_close(write: Callable[[str], Path], meta: TraceMeta, columns: Columns) -> None:
    path = write("t.csv")
    old = path.read_bytes()
    with RouteWriter(path, dataclasses.replace(meta, model="new")) as writer:
        writer.append(columns)
        assert path.read_bytes() == old
    assert read_meta(path).model == "new"
    assert [file.name for file in path.parent.iterdir()] == ["t.csv"]
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask


def test_link_is_written_through(write: Callable[[str], Path], meta: TraceMeta, columns: Columns) -> None:
    path = write("t.csv")
    link = path.with_name("link.csv")
    link.symlink_to(path)
    with RouteWriter(link, dataclasses.replace(meta, model="new")) as writer:
        writer.append(columns)
    assert link.is_symlink()
    assert read_meta(path).model == "new"


def test_recording_in_the_package_is_the_published_one(repo_root: Path) -> None:
    trace = read_trace(repo_root / RECORDING)
    decode = trace.frame.filter(pl.col("phase") == 1)
    prefill = trace.frame.filter(pl.col("phase") == 0)
    assert (len(trace.frame), len(prefill), len(decode)) == (44_766, 7_902, 36_864)
    # Counted in the published CSV: 7,267 misses in decode (80.3 % hits), 2,662 distinct experts in prefill (74.9 % in all).
    assert decode["residency"].sum() == 29_597
    lookups = len(decode) + prefill.filter(pl.col("expert_bytes") > 0).height
    assert lookups == 39_526
    assert round(100 * 29_597 / lookups, 1) == 74.9
    assert trace.frame["expert_bytes"].sum() == 28_535_648_256
    assert round(float(trace.frame["weight"].sum()), 1) == 7461.0
