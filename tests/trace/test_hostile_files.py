"""Files that are incomplete, corrupt or not ours: refused with row and reason, or read up to the last whole step."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import polars as pl
import pytest

from moetriage.errors import TraceError
from moetriage.trace.io import read_trace
from moetriage.trace.schema import MAGIC, SCHEMA, header_lines
from moetriage.trace.seal import UNSEALED, seal
from moetriage.trace.sources import PARQUET_HEADER_KEY, PARQUET_SEAL_KEY

Columns = dict[str, npt.NDArray[np.generic]]

N_HEADER = 8  # lines before the first row of the standard trace
#: Step -> rows of the standard trace up to and with it (6 a decoded token; 18 for the prompt of 4, whose last layer holds one token).
ROWS_UP_TO_STEP = {3: 18, 4: 24, 5: 30, 6: 36, 8: 46, 9: 52}


@pytest.fixture
def csv(write: Callable[[str], Path]) -> Path:
    return write("t.csv")


def refused(path: Path) -> TraceError:
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2
    return caught.value


def edit(path: Path, row: int, **values: object) -> int:
    """Change fields of a data row (from 0); return its line in the file."""
    lines = path.read_text().splitlines()
    assert len(lines) == N_HEADER + 52
    fields = lines[N_HEADER + row].split(",")
    for name, value in values.items():
        fields[list(SCHEMA).index(name)] = str(value)
    lines[N_HEADER + row] = ",".join(fields)
    path.write_text("\n".join(lines) + "\n")
    return N_HEADER + row + 1


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("turn", -1, "turn -1 is not between"),
        ("turn", 2**40, f"turn {2**40} is not between"),
        ("phase", 2, "phase 2 is neither 0 (prefill) nor 1 (decode)"),
        ("step", -4, "step -4 is not between"),
        ("step", 2**31, f"step {2**31} is not between"),
        ("layer", 0, "layer 0 is not one of the 3 layers with experts"),
        ("layer", 4, "layer 4 is not one of"),
        ("layer", -1, "layer -1 is not one of"),
        ("slot", 2, "slot 2 is not between 0 and 1"),
        ("expert", 8, "expert 8 is not between 0 and 7"),
        ("expert", -1, "expert -1 is not between"),
        ("weight", "nan", "weight nan is not a finite number"),
        ("weight", "inf", "weight inf is not a finite number"),
        ("weight", "-inf", "weight -inf is not a finite number"),
        ("weight", "1e39", "weight inf is not a finite number"),
        ("weight", -0.1, "weight -0.1"),
        ("residency", 2, "residency 2 is neither 0 (miss) nor 1 (hit)"),
        ("dropped", -1, "dropped -1 is neither 0 nor 1"),
        ("expert_bytes", 999, "expert_bytes 999 is neither 0 nor what the header says"),
        ("expert_bytes", -1000, "expert_bytes -1000 is neither"),
        ("expert", "x", "expert 'x' is not a whole number"),
        ("expert", "1.5", "expert '1.5' is not a whole number"),
        ("expert", "", "expert '' is not a whole number"),
        ("expert", 10**30, "is not a whole number"),
        ("weight", "much", "weight 'much' is not a number"),
        ("weight", "", "weight '' is not a number"),
        ("turn", '"0"', "is not a whole number"),
        ("turn", "# 0", "is not a whole number"),
        ("turn", "\udcff\udcfe", "is not a whole number"),
        ("turn", "\0", "is not a whole number"),
    ],
)
@pytest.mark.parametrize("row", [0, 25, 51])
def test_value_that_no_trace_can_hold_is_refused_by_row_and_reason(csv: Path, row: int, name: str, value: object, reason: str) -> None:
    text = str(value)
    line = edit(csv, row, **{name: text.encode("utf-8", "surrogateescape").decode("latin-1")})
    error = refused(csv)
    assert error.row == line
    assert reason in error.reason


def test_bytes_of_an_expert_that_was_not_read_are_refused(csv: Path) -> None:
    line = edit(csv, 30, residency=1, expert_bytes=1000)
    assert refused(csv).row == line
    edit(csv, 30, residency=0, dropped=1, expert_bytes=1000)
    assert "was dropped and so not read" in refused(csv).reason


@pytest.mark.parametrize(
    ("row", "values", "at", "reason"),
    [
        (19, {"slot": 0}, 19, "slot 0 is there twice"),
        (20, {"slot": 1}, 20, "slot 0 is missing before slot 1"),
        (21, {"layer": 3}, 21, "step 4, layer 2 has only 1 of 2 slots"),
        (21, {"turn": 1}, 21, "has only 1 of 2 slots"),
        (21, {"phase": 0}, 21, "has only 1 of 2 slots"),
        (21, {"step": 5}, 21, "has only 1 of 2 slots"),
    ],
)
def test_incomplete_or_repeated_slots_are_refused(csv: Path, row: int, values: dict[str, int], at: int, reason: str) -> None:
    edit(csv, row, **values)
    error = refused(csv)
    assert error.row == N_HEADER + at + 1
    assert reason in error.reason


def test_an_expert_in_two_slots_of_a_routing_is_refused(csv: Path) -> None:
    edit(csv, 24, expert=3)
    line = edit(csv, 25, expert=3)
    error = refused(csv)
    assert error.row == line - 1
    assert "an expert is named in two slots" in error.reason


@pytest.mark.parametrize(
    ("removed", "at", "reason"),
    [
        (range(18, 24), 18, "step 5 comes after step 3"),
        (range(20, 22), 20, "step 4, layer 3 comes after step 4, layer 1"),
        (range(22, 24), 22, "step 4 stops at layer 2"),
        (range(18, 20), 18, "step 4 begins at layer 2"),
        (range(2, 4), 2, "step 2, layer 1 comes after step 0, layer 1"),
        (range(12, 14), 12, "step 3, layer 2 comes after step 1, layer 2"),
        (range(14, 18), 14, "step 2 stops at layer 2"),
        (range(2), 6, "step 0, layer 2 comes after step 3, layer 1"),
    ],
)
def test_gaps_are_refused(csv: Path, removed: range, at: int, reason: str) -> None:
    lines = csv.read_text().splitlines()
    csv.write_text("\n".join(line for i, line in enumerate(lines) if i - N_HEADER not in removed) + "\n")
    error = refused(csv)
    assert (error.row, reason in error.reason) == (N_HEADER + at + 1, True), str(error)


@pytest.mark.parametrize(
    ("repeated", "at", "reason"),
    [
        (range(24, 30), 30, "step 5, layer 1 comes after step 5, layer 3"),
        (range(18, 24), 30, "step 4 comes after step 5"),
        (range(18), 30, "step 0 comes after step 5"),
    ],
)
def test_repeated_steps_are_refused(csv: Path, repeated: range, at: int, reason: str) -> None:
    lines = csv.read_text().splitlines()
    rows = lines[N_HEADER:]
    csv.write_text("\n".join([*lines[:N_HEADER], *rows[:30], *(rows[i] for i in repeated), *rows[30:]]) + "\n")
    error = refused(csv)
    assert (error.row, reason in error.reason) == (N_HEADER + at + 1, True), str(error)


def test_turns_that_go_back_are_refused(csv: Path) -> None:
    lines = csv.read_text().splitlines()
    rows = lines[N_HEADER:]
    csv.write_text("\n".join([*lines[:N_HEADER], *rows[36:], *rows[:36]]) + "\n")
    error = refused(csv)
    assert (error.row, error.reason) == (N_HEADER + 17, "turn 0 comes after turn 1; --allow-truncated reads up to step 9")


def test_a_prefill_batch_without_output_may_leave_the_last_layer_out(tmp_path: Path, csv: Path) -> None:
    lines = csv.read_text().splitlines()
    without = [line for i, line in enumerate(lines) if i - N_HEADER not in (16, 17)]
    # As it is followed by a decoded token in this trace, and so is a batch of its own, only its missing rows tell.
    (tmp_path / "n.csv").write_text("\n".join(without) + "\n")
    assert len(read_trace(tmp_path / "n.csv").frame) == 50


def whole_before(n_rows: int) -> tuple[int, int]:
    """Return the last step, and its row count, that is certainly whole when ``n_rows`` and a part of another row are left."""
    step = max(step for step, rows in ROWS_UP_TO_STEP.items() if rows < n_rows or (rows == n_rows and step not in (3, 8)))
    return step, ROWS_UP_TO_STEP[step]


#: Anywhere in the last four rows, and at each seventh byte (rows are no multiple of it) of the three steps before.
CUTS = (*range(2, 130), *range(130, 400, 7))


@pytest.mark.parametrize("n_bytes_cut", CUTS)
def test_a_cut_file_is_refused_or_read_up_to_the_last_whole_step(csv: Path, n_bytes_cut: int) -> None:
    whole = read_trace(csv).frame
    text = csv.read_bytes()[:-n_bytes_cut]
    csv.write_bytes(text)
    n_rows = text.count(b"\n") - N_HEADER
    if text.endswith(b"\n") and n_rows in (*ROWS_UP_TO_STEP.values(), 44):
        # Cut between two steps: it is a shorter trace. (After 44 rows a prefill lacks its last layer, as if it had asked for no output.)
        assert len(read_trace(csv).frame) == n_rows
        return
    if not text.endswith(b"\n") and text.endswith((b",0", b",1")) and text.split(b"\n")[-1].count(b",") == len(SCHEMA) - 1:
        n_rows += 1  # only the line's end is missing, not the row
        if n_rows in (*ROWS_UP_TO_STEP.values(), 44):
            assert len(read_trace(csv).frame) == n_rows
            return
    error = refused(csv)
    step, n_whole = whole_before(n_rows)
    assert error.row in (N_HEADER + n_rows, N_HEADER + n_rows + 1)
    assert f"--allow-truncated reads up to step {step}" in error.reason
    trace = read_trace(csv, allow_truncated=True)
    assert trace.truncated
    assert f"row {error.row}" in str(trace.truncated_reason)
    assert trace.frame.equals(whole.head(n_whole))


def test_a_corrupt_row_ends_a_trace_that_may_be_truncated(csv: Path) -> None:
    whole = read_trace(csv).frame
    line = edit(csv, 33, expert=99)
    trace = read_trace(csv, allow_truncated=True)
    assert trace.frame.equals(whole.head(30))
    assert trace.truncated_reason == f"{csv}, row {line}: expert 99 is not between 0 and 7 (n_expert)"


def test_nothing_whole_is_refused_even_if_it_may_be_truncated(csv: Path) -> None:
    edit(csv, 3, expert=99)
    with pytest.raises(TraceError, match=r"holds no whole step: .*row 12: expert 99"):
        read_trace(csv, allow_truncated=True)


def test_in_a_directory_each_file_is_read_up_to_its_last_whole_step(csv: Path, write: Callable[[str], Path]) -> None:
    edit(csv, 33, expert=99)
    write("z.csv")
    trace = read_trace(csv.parent, allow_truncated=True)
    assert len(trace.frame) == 30 + 52
    assert str(trace.truncated_reason).startswith(f"{csv}, row 42")


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("t.csv", b"", "is empty"),
        ("t.csv", b"step,wall_ms\n1,2\n", "is not a route trace: its first line must be"),
        ("t.csv", b"# summary\nstep,wall_ms\n1,2\n", "is not a route trace"),
        ("t.csv", b"\x89PNG\r\n\x1a\n" + bytes(100), "is not a route trace"),
        ("t.csv", b"#" * 3_000_000, "is not a route trace"),
        ("t.csv", (MAGIC + "\n").encode(), "the header has no line '# model="),
        ("t.parquet", b"", "is not a route trace written by moetriage, or is cut short"),
        ("t.parquet", b"PAR1" + b"\xff\xff\xff\x7fPAR1", "is not a route trace written by moetriage, or is cut short"),
        ("t.parquet", b"PAR1" + bytes(50) + b"PAR1", "is not a route trace written by moetriage, or is cut short"),
        ("t.parquet", b"PAR1" + UNSEALED.encode() + b"\x2f\0\0\0PAR1", "is damaged"),
        ("t.parquet", b"PAR1" + UNSEALED[:-1].encode() + b"\x2e\0\0\0PAR1", "is not a route trace written by moetriage, or is cut short"),
        ("t.txt", MAGIC.encode(), "a route trace is a .csv or a .parquet file"),
        ("t.csv.gz", b"\x1f\x8b", "a route trace is a .csv or a .parquet file"),
    ],
)
def test_foreign_files_are_refused(name: str, content: bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    assert reason in refused(path).reason
    with pytest.raises(TraceError):
        read_trace(path, allow_truncated=True)


def test_missing_files_and_empty_directories_are_refused(tmp_path: Path) -> None:
    assert refused(tmp_path / "none.csv").reason == "No such file or directory"
    assert refused(tmp_path / "none.parquet").reason == "No such file or directory"
    assert refused(tmp_path).reason == "is a directory without .csv or .parquet files"


def test_csv_without_rows_or_column_names_is_refused(csv: Path) -> None:
    lines = csv.read_text().splitlines()
    csv.write_text("\n".join(lines[:N_HEADER]) + "\n")
    assert refused(csv).reason == "holds no routing at all"
    csv.write_text("\n".join(lines[: N_HEADER - 1]) + "\n")
    assert "the line of column names is missing" in refused(csv).reason


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("slot,", "", "column slot is missing"),
        ("slot", "step", "column slot is missing"),
        ("dropped", "slot", "column slot is there twice"),
    ],
)
def test_wrong_column_names_are_refused(csv: Path, old: str, new: str, reason: str) -> None:
    csv.write_text(csv.read_text().replace(old, new, 1))
    error = refused(csv)
    assert reason in error.reason
    assert error.row == N_HEADER


def test_rows_with_more_fields_or_none_are_refused(csv: Path) -> None:
    lines = csv.read_text().splitlines()
    csv.write_text("\n".join([*lines, lines[-1] + ",7"]) + "\n")
    assert "has 11 of 10 fields" in refused(csv).reason
    csv.write_text("\n".join([*lines[:20], "", *lines[20:]]) + "\n")
    assert (refused(csv).row, "has 0 of 10 fields" in refused(csv).reason) == (21, True)


def test_a_line_without_end_is_refused_and_not_collected(csv: Path) -> None:
    with csv.open("ab") as file:
        file.write(b"1" * 20_000_000)
    assert refused(csv).row == N_HEADER + 53


def parquet(path: Path, frame: pl.DataFrame, header: str | None) -> Path:
    metadata = {PARQUET_SEAL_KEY: UNSEALED} | ({} if header is None else {PARQUET_HEADER_KEY: header})
    frame.write_parquet(path, metadata=metadata)
    seal(path)
    return path


def test_parquet_that_is_no_trace_is_refused(tmp_path: Path, csv: Path) -> None:
    trace = read_trace(csv)
    header = "\n".join(header_lines(trace.meta))
    path = tmp_path / "t.parquet"
    frame = trace.frame
    for table, head, reason in (
        (frame, None, "its metadata has no key 'route_trace'"),
        (frame, "# route_trace v9", "version 9 of the trace format"),
        (frame.drop("weight"), header, "column weight is missing"),
        (frame.cast({"expert": pl.Float64}), header, "column expert is of type Float64, not integer"),
        (frame.cast({"weight": pl.String}), header, "column weight is of type String, not float"),
        (frame.clear(), header, "holds no routing at all"),
    ):
        assert reason in refused(parquet(path, table, head)).reason
    nulls = frame.with_columns(pl.when(pl.int_range(pl.len()) != 40).then("expert"))
    error = refused(parquet(path, nulls, header))
    assert (error.row, error.reason) == (41, "expert is empty; --allow-truncated reads up to step 6")
    assert read_trace(path, allow_truncated=True).frame.equals(frame.head(36))
    parquet(path, frame.drop("dropped").cast({"expert": pl.UInt64, "weight": pl.Float64}), header)
    assert read_trace(path).frame.equals(frame)


def test_damaged_parquet_is_refused_before_it_is_parsed(write: Callable[[str], Path]) -> None:
    path = write("t.parquet")
    whole = path.read_bytes()
    rng = random.Random(0)
    for _ in range(300):
        place = rng.randrange(len(whole))
        damaged = whole[:place] + bytes([whole[place] ^ rng.randrange(1, 256)]) + whole[place + 1 :]
        path.write_bytes(damaged)
        reason = refused(path).reason
        assert reason.startswith(("is damaged", "is not a route trace written by moetriage"))
    for size in range(0, len(whole), 50):
        path.write_bytes(whole[:size])
        assert "cut short" in refused(path).reason


def test_sealed_file_that_is_no_parquet_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    path.write_bytes(b"PAR1" + UNSEALED.encode() + b"\x2f\0\0\0PAR1")
    seal(path)
    assert "is not a readable Parquet file" in refused(path).reason
