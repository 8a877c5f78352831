"""Put whole steps on disk as CSV or Parquet, and keep the file readable when the disk takes no more.

In: frames of whole steps (``writer`` holds back the rest). Out: a file. Rows go to a temporary file beside the target, which takes its
name at the end. A Parquet file cannot be appended to: rows are spooled as small Parquet files, which are joined at the end. The spool
stops while there is still room for that.
"""

from __future__ import annotations

import errno
import io
import os
import uuid
from abc import ABC, abstractmethod
from pathlib import Path

import polars as pl

from moetriage.errors import TraceError
from moetriage.trace.check import WholeSteps
from moetriage.trace.schema import SCHEMA, TraceMeta, header_lines
from moetriage.trace.seal import UNSEALED, seal
from moetriage.trace.sources import PARQUET_HEADER_KEY, PARQUET_SEAL_KEY

#: Rows of a Parquet row group and of the buffer before it: 8 MB in memory, some 700 tokens of a 48-layer, top-8 model.
ROW_GROUP_ROWS = 262_144


class Sink(ABC):
    """A trace file being written. ``rows`` are safe in it; more may wait in the buffer, as polars is slow on a few rows at a time."""

    buffer_rows: int

    def __init__(self) -> None:
        self.rows = 0
        self._buffer: list[pl.DataFrame] = []
        self._buffered_rows = 0

    def write(self, frame: pl.DataFrame) -> None:
        """Add whole steps. Raises OSError; what fits of the buffer, up to a whole step, is kept. Not to be called again after that."""
        if frame.is_empty():
            return
        self._buffer.append(frame)
        self._buffered_rows += len(frame)
        if self._buffered_rows >= self.buffer_rows:
            self._flush()

    def finish(self) -> None:
        """Give the file its final name. Raises OSError if rows were lost on the way; the file is there all the same."""
        try:
            self._flush()
        finally:
            self._complete()

    def _flush(self) -> None:
        if self._buffer:
            frame = pl.concat(self._buffer, rechunk=True)
            self._buffer.clear()
            self._buffered_rows = 0
            self._put(frame)

    @abstractmethod
    def _put(self, frame: pl.DataFrame) -> None:
        """Write rows; on OSError keep, and count, those of the first whole steps that fit."""

    @abstractmethod
    def _complete(self) -> None:
        """Give the file its final name."""


def open_sink(path: Path, meta: TraceMeta) -> Sink:
    """Start a file. Raises TraceError for a suffix we do not write, OSError where nothing can be written."""
    suffix = path.suffix.lower()
    if suffix not in (".csv", ".parquet"):
        raise TraceError(str(path), "a route trace is written as .csv or .parquet")
    target = path.resolve()  # a link is written through, not replaced
    if target.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if target.exists() and not os.access(target, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    return CsvSink(target, meta) if suffix == ".csv" else ParquetSink(target, meta)


class CsvSink(Sink):
    """The CSV layout. Floats are written in the shortest form that reads back as the same float32."""

    buffer_rows = 8_192

    def __init__(self, target: Path, meta: TraceMeta) -> None:
        super().__init__()
        self._target, self._meta = target, meta
        self._partial = _partial(target)
        self._file = self._partial.open("xb", buffering=0)
        header = "\n".join([*header_lines(meta), ",".join(SCHEMA)]) + "\n"
        try:
            _write_all(self._file, header.encode("utf-8", errors="replace"))
        except OSError:
            self._file.close()
            self._partial.unlink()
            raise

    def _put(self, frame: pl.DataFrame) -> None:
        text = frame.write_csv(include_header=False).encode()
        start = self._file.tell()
        try:
            _write_all(self._file, text)
        except OSError:
            written = text[: os.fstat(self._file.fileno()).st_size - start]
            kept = _whole_rows(frame.head(written.count(b"\n")), self._meta)
            os.ftruncate(self._file.fileno(), start + sum(len(line) for line in written.splitlines(keepends=True)[:kept]))
            self.rows += kept
            raise
        self.rows += len(frame)

    def _complete(self) -> None:
        try:
            self._file.close()
        finally:
            self._partial.replace(self._target)


class ParquetSink(Sink):
    """Parquet, zstd, with the header lines of the CSV layout in the file's metadata, sealed."""

    buffer_rows = ROW_GROUP_ROWS

    def __init__(self, target: Path, meta: TraceMeta) -> None:
        super().__init__()
        self._target, self._meta = target, meta
        self._metadata = {PARQUET_HEADER_KEY: "\n".join(header_lines(meta)), PARQUET_SEAL_KEY: UNSEALED}
        self._parts: list[tuple[Path, int]] = []
        # Stands for the trace until there is a row, and shows at once whether the place can be written.
        self._empty = _partial(target)
        self._spool(self._empty, pl.DataFrame(schema=SCHEMA))

    def _put(self, frame: pl.DataFrame) -> None:
        lost: OSError | None = None
        while len(frame):
            part = _partial(self._target)
            try:
                self._spool(part, frame)
            except OSError as error:
                lost = lost or error
                half = frame.head(len(frame) // 2)
                frame = half.head(_whole_rows(half, self._meta))
                continue
            self._parts.append((part, len(frame)))
            self.rows += len(frame)
            break
        if lost is not None:
            raise lost

    def _complete(self) -> None:
        lost: OSError | None = None
        joined = self._parts[0][0] if self._parts else self._empty
        while len(self._parts) > 1:
            try:
                joined = self._join()
                break
            except OSError as error:  # the room that was left for it is gone: give up the end of the trace
                lost = lost or error
                self._drop_last_part()
        joined.replace(self._target)
        for partial in (self._empty, *(path for path, _ in self._parts)):
            partial.unlink(missing_ok=True)
        if lost is not None:
            raise lost

    def _spool(self, path: Path, frame: pl.DataFrame) -> None:
        """Write one Parquet file, if what then has to be joined still fits on the disk a second time."""
        packed = io.BytesIO()
        frame.write_parquet(packed, metadata=self._metadata, row_group_size=ROW_GROUP_ROWS)
        needed = packed.tell()
        if self._parts:
            needed += packed.tell() + sum(part.stat().st_size for part, _ in self._parts)
        stat = os.statvfs(path.parent)
        if stat.f_bavail * stat.f_frsize < needed:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        try:
            with path.open("xb", buffering=0) as file:
                _write_all(file, packed.getvalue())
            seal(path)
        except OSError:
            path.unlink(missing_ok=True)
            raise

    def _join(self) -> Path:
        joined = _partial(self._target)
        try:
            rows = pl.scan_parquet([path for path, _ in self._parts], glob=False)
            rows.sink_parquet(joined, metadata=self._metadata, row_group_size=ROW_GROUP_ROWS)
            seal(joined)
        except (OSError, pl.exceptions.PolarsError) as error:
            joined.unlink(missing_ok=True)
            raise OSError(getattr(error, "errno", None) or errno.EIO, str(error).split("\n", 1)[0]) from error
        return joined

    def _drop_last_part(self) -> None:
        path, rows = self._parts.pop()
        path.unlink()
        self.rows -= rows


def _partial(target: Path) -> Path:
    return target.with_name(f".{target.name}.{uuid.uuid4().hex[:12]}.partial")


def _whole_rows(frame: pl.DataFrame, meta: TraceMeta) -> int:
    """Return how many rows at the start of a frame that begins with a step are certainly whole steps."""
    steps = WholeSteps(meta)
    steps.push(frame)
    return steps.rows_out


def _write_all(file: io.FileIO, data: bytes) -> None:
    # An unbuffered write may take only a part, as it does when the disk fills up; the next one then says why.
    view = memoryview(data)
    while view:
        view = view[file.write(view) :]
