"""Read route traces: a file or a directory of them, whole or in pieces of bounded size.

In: a path. Out: ``Trace``, or a stream of frames cut at whole steps. Anything that is not a complete, consistent trace of our version is
refused with the row and the reason, or, on request, read up to the last whole step, which the result then says.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from moetriage.errors import TraceError
from moetriage.trace.check import WholeSteps
from moetriage.trace.schema import SCHEMA, TraceMeta
from moetriage.trace.sources import Source, open_source

#: Rows handled at once by default: about 100 MB while they are checked.
ROWS_AT_ONCE = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Trace:
    """A whole trace in memory (31 bytes a row).

    frame: the columns of ``schema.SCHEMA``, whole batches only. has_dropped: the files had the ``dropped`` column.
    truncated: something at the end was left out because it was incomplete or corrupt; ``truncated_reason`` says what.
    """

    meta: TraceMeta
    frame: pl.DataFrame
    path: str
    has_dropped: bool
    truncated: bool
    truncated_reason: str | None


class TraceReader:
    """One pass over a trace in bounded memory.

    A directory stands for all .csv and .parquet files in it, in the order of their names. They must be of the same model and width.
    Each is a run of its own: its turns are numbered on from those of the file before it.

    Attributes: ``meta`` (of the first file), ``has_dropped`` (all files have the column), ``path``, and, once ``batches`` has run to
    its end, ``truncated_reason`` (None if nothing was left out) and ``rows`` read.

    Raises TraceError when a header is wrong; with ``allow_truncated`` too.
    """

    def __init__(self, path: Path | str, *, allow_truncated: bool = False) -> None:
        self.path = str(path)
        self.truncated_reason: str | None = None
        self.rows = 0
        self._allow_truncated = allow_truncated
        self._sources = [open_source(file) for file in _files(Path(path))]
        self.meta = self._sources[0].meta
        self.has_dropped = all(source.has_dropped for source in self._sources)
        for source in self._sources[1:]:
            if not source.meta.same_model(self.meta):
                raise TraceError(source.path, f"is of another model or width than {self._sources[0].path}; give them apart")

    def batches(self, rows: int = ROWS_AT_ONCE) -> Iterator[pl.DataFrame]:
        """Yield frames of about ``rows`` rows in the schema's dtypes; each ends where a batch ends.

        Raises TraceError at the first fault, and for a trace without a single whole step. With ``allow_truncated`` a fault ends the
        file it is in instead, and ``truncated_reason`` tells of it.
        """
        next_turn = 0
        for source in self._sources:
            shift = next_turn
            for frame in self._checked(source, rows):
                frame = frame.with_columns((pl.col("turn") + shift).cast(pl.Int32)) if shift else frame
                next_turn = int(frame["turn"][-1]) + 1
                self.rows += len(frame)
                yield frame
        if not self.rows:
            reason = "holds no routing at all" if self.truncated_reason is None else f"holds no whole step: {self.truncated_reason}"
            raise TraceError(self.path, reason)

    def _checked(self, source: Source, rows: int) -> Iterator[pl.DataFrame]:
        """Yield the non-empty, whole batches of one file."""
        steps = WholeSteps(source.meta)
        fault: TraceError | None = None
        try:
            for frame in source.frames(rows):
                if len(whole := steps.push(frame)):
                    yield whole
                if steps.fault is not None:
                    break
        except TraceError as error:  # a row that cannot be read; what was before it may still end in a whole step
            fault = error
        if len(whole := steps.finish(cut=fault is not None)):
            yield whole
        if fault is None and steps.fault is not None:
            fault = TraceError(source.path, steps.fault.reason, row=source.first_row + steps.fault.index)
        if fault is not None:
            self._stop(fault, steps.last_step)

    def _stop(self, fault: TraceError, last_step: int | None) -> None:
        if not self._allow_truncated:
            until = "" if last_step is None else f"; --allow-truncated reads up to step {last_step}"
            raise TraceError(fault.path, fault.reason + until, row=fault.row)
        self.truncated_reason = str(fault) if self.truncated_reason is None else f"{self.truncated_reason}; {fault}"


def scan_batches(path: Path | str, *, rows: int = ROWS_AT_ONCE, allow_truncated: bool = False) -> Iterator[pl.DataFrame]:
    """Yield a trace in frames of about ``rows`` rows, cut at whole batches; see ``TraceReader`` for what it refuses."""
    yield from TraceReader(path, allow_truncated=allow_truncated).batches(rows)


def read_meta(path: Path | str) -> TraceMeta:
    """Return what a trace says about its model, without reading its rows. Raises TraceError for a wrong header."""
    return TraceReader(path).meta


def read_trace(path: Path | str, *, allow_truncated: bool = False) -> Trace:
    """Return a whole trace; see ``TraceReader`` for what is refused and what ``allow_truncated`` lets pass."""
    reader = TraceReader(path, allow_truncated=allow_truncated)
    frame = pl.concat([pl.DataFrame(schema=SCHEMA), *reader.batches()], rechunk=True)
    return Trace(
        meta=reader.meta,
        frame=frame,
        path=reader.path,
        has_dropped=reader.has_dropped,
        truncated=reader.truncated_reason is not None,
        truncated_reason=reader.truncated_reason,
    )


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    files = sorted(file for file in path.iterdir() if file.suffix.lower() in (".csv", ".parquet") and not file.name.startswith("."))
    if not files:
        raise TraceError(str(path), "is a directory without .csv or .parquet files")
    return files
