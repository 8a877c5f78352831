"""One trace file, CSV or Parquet, as frames of raw rows in bounded memory.

In: a path. Out: the header's ``TraceMeta`` and frames with all columns of the schema (integers as int64, ``dropped`` filled in where the
file has none). It checks that each cell of the table is a number, not what the number means: ``check`` does that.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, Protocol

import polars as pl

from moetriage.errors import TraceError
from moetriage.trace.schema import MAGIC, OPTIONAL_COLUMNS, SCHEMA, TraceMeta, parse_header
from moetriage.trace.seal import seal_fault

#: Keys of a Parquet file's metadata: the header lines of the CSV layout, and the seal.
PARQUET_HEADER_KEY = "route_trace"
PARQUET_SEAL_KEY = "route_trace_seal"

_RAW: dict[str, pl.DataType] = {name: dtype if dtype == pl.Float32 else pl.Int64() for name, dtype in SCHEMA.items()}
_MAX_LINE = 1 << 20  # a header line or a row beyond this is no text file
_BYTES_PER_ROW = 32  # of the CSV layout, about; only sets how much is parsed at once

# A malformed Parquet file can make polars' reader panic, and its panic is no Exception.
READ_FAULTS = (OSError, pl.exceptions.PolarsError, pl.exceptions.PanicException)


class Source(Protocol):
    """A trace file. ``first_row`` is the number that errors give to the first data row: a line in a CSV, else 1."""

    path: str
    meta: TraceMeta
    has_dropped: bool
    first_row: int

    def frames(self, rows: int) -> Iterator[pl.DataFrame]:
        """Yield about ``rows`` rows at a time; raise TraceError, after all rows before it, where one cannot be read."""
        ...


def open_source(path: Path) -> Source:
    """Read a file's header. Raises TraceError for what is not a route trace of our version, or cannot be opened."""
    try:
        match path.suffix.lower():
            case ".csv":
                return CsvSource(path)
            case ".parquet":
                return ParquetSource(path)
    except OSError as error:
        raise TraceError(str(path), error.strerror or str(error)) from error
    raise TraceError(str(path), "a route trace is a .csv or a .parquet file")


def check_columns(names: list[str], path: str, *, row: int | None) -> None:
    """Refuse a table that lacks a column of the schema or names one twice; columns that we do not know are left unread."""
    missing = [name for name in SCHEMA if name not in names and name not in OPTIONAL_COLUMNS]
    if missing:
        raise TraceError(path, f"column {missing[0]} is missing (there are: {', '.join(names[:20]) or 'none'})", row=row)
    for name in SCHEMA:
        if names.count(name) > 1:
            raise TraceError(path, f"column {name} is there twice", row=row)


class CsvSource:
    """A trace in the CSV layout: ``#`` lines, a line of column names, then rows."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        with path.open("rb") as file:
            header, names = self._read_header(file)
            self._data_offset = file.tell()
        self.meta = parse_header(header, self.path)
        check_columns(names, self.path, row=len(header) + 1)
        self._names = names
        self.has_dropped = "dropped" in names
        self.first_row = len(header) + 2

    def _read_header(self, file: BinaryIO) -> tuple[list[str], list[str]]:
        lines: list[str] = []
        while (raw := file.readline(_MAX_LINE)).startswith(b"#"):
            lines.append(raw.decode("utf-8", errors="replace").rstrip("\r\n"))
        if not lines:
            raise TraceError(self.path, "is empty" if not raw else f"is not a route trace: its first line must be {MAGIC!r}", row=1)
        if not raw:
            parse_header(lines, self.path)  # says what else is wrong with it, if anything
            raise TraceError(self.path, "ends after its header: the line of column names is missing", row=len(lines) + 1)
        return lines, [name.strip() for name in raw.decode("utf-8", errors="replace").split(",")]

    def frames(self, rows: int) -> Iterator[pl.DataFrame]:
        row = self.first_row
        for block in self._blocks(rows * _BYTES_PER_ROW):
            frame = self._parse(block)
            if frame is None:
                n_good, n_bytes, reason = self._diagnose(block)
                good = self._parse(block[:n_bytes]) if n_good else None
                if good is not None:
                    yield good
                raise TraceError(self.path, reason, row=row + n_good)
            yield frame
            row += len(frame)

    def _blocks(self, size: int) -> Iterator[bytes]:
        """Yield the rows' text in pieces that end at a line's end (the last one where the file ends)."""
        with Path(self.path).open("rb") as file:
            file.seek(self._data_offset)
            rest = b""
            while block := file.read(max(size, _MAX_LINE)):
                head, newline, tail = (rest + block).rpartition(b"\n")
                if newline:
                    yield head + newline
                rest = tail
                if len(rest) > 2 * _MAX_LINE:  # no row is that long: let it be parsed, and refused, instead of collecting the file
                    break
            if rest:
                yield rest

    def _parse(self, block: bytes) -> pl.DataFrame | None:
        """Return the rows of a block, or None if one of them is malformed."""
        by_place = {f"{place}": _RAW.get(name, pl.String()) for place, name in enumerate(self._names)}
        try:
            frame = pl.read_csv(block, has_header=False, schema=by_place, quote_char=None)
        except READ_FAULTS:
            return None
        frame = _complete(frame.rename({f"{place}": name for place, name in enumerate(self._names) if name in SCHEMA}))
        return None if any(frame.null_count().row(0)) else frame

    def _diagnose(self, block: bytes) -> tuple[int, int, str]:
        """Return how many rows and bytes of a malformed block are good, and what is wrong after them."""
        n_bytes = 0
        for index, line in enumerate(block.split(b"\n")):
            if (reason := self._line_fault(line.rstrip(b"\r"))) is not None:
                return index, n_bytes, reason
            n_bytes += len(line) + 1
        return 0, 0, "the rows from here on cannot be parsed"

    def _line_fault(self, line: bytes) -> str | None:
        fields = line.split(b",")
        if len(fields) != len(self._names):
            return f"has {len(fields) if line else 0} of {len(self._names)} fields"
        for name, field in zip(self._names, fields, strict=True):
            if name in SCHEMA and not _is_number(field, whole=SCHEMA[name] != pl.Float32):
                text = field[:40].decode("utf-8", errors="replace")
                return f"{name} {text!r} is not a {'whole ' if SCHEMA[name] != pl.Float32 else ''}number"
        return None


class ParquetSource:
    """A trace in Parquet as ``spool`` writes it: the same columns, the header lines of the CSV layout in the metadata, and a seal."""

    first_row = 1

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        if (fault := seal_fault(path)) is not None:
            raise TraceError(self.path, fault)
        try:
            header = pl.read_parquet_metadata(path).get(PARQUET_HEADER_KEY)
            types = pl.read_parquet_schema(path)
        except READ_FAULTS as error:
            raise TraceError(self.path, f"is not a readable Parquet file: {_first_line(error)}") from error
        if header is None:
            raise TraceError(self.path, f"is not a route trace: its metadata has no key {PARQUET_HEADER_KEY!r}")
        self.meta = parse_header(header.split("\n"), self.path)
        check_columns(list(types), self.path, row=None)
        for name, dtype in _RAW.items():
            if name in types and not (types[name].is_float() if dtype == pl.Float32 else types[name].is_integer()):
                raise TraceError(self.path, f"column {name} is of type {types[name]}, not {'float' if dtype == pl.Float32 else 'integer'}")
        self.has_dropped = "dropped" in types

    def frames(self, rows: int) -> Iterator[pl.DataFrame]:
        names = [name for name in SCHEMA if name != "dropped" or self.has_dropped]
        offset = 0
        while True:
            try:
                # Slices of a lazy scan decode only the row groups they touch, so memory is bounded by a slice and a row group.
                frame = pl.scan_parquet(self.path, glob=False).select(names).slice(offset, rows).collect()
                frame = _complete(frame.cast({name: _RAW[name] for name in names}))
            except READ_FAULTS as error:
                raise TraceError(self.path, f"cannot be read: {_first_line(error)}", row=offset + 1) from error
            if frame.is_empty():
                return
            if any(frame.null_count().row(0)):
                index, name = min((int(column.is_null().arg_max() or 0), column.name) for column in frame if column.null_count())
                yield frame.head(index)
                raise TraceError(self.path, f"{name} is empty", row=offset + index + 1)
            yield frame
            offset += len(frame)


def _complete(frame: pl.DataFrame) -> pl.DataFrame:
    """Return the columns of the schema in its order, ``dropped`` as 0 where the file has none."""
    if "dropped" not in frame.columns:
        frame = frame.with_columns(pl.lit(0, pl.Int64).alias("dropped"))
    return frame.select(list(SCHEMA))


def _is_number(field: bytes, *, whole: bool) -> bool:
    try:
        return -(2**63) <= int(field) < 2**63 if whole else bool(float(field) or True)
    except ValueError:
        return False


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0]
