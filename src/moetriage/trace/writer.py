"""Write a route trace while a run goes on: CSV or Parquet, in bounded memory, readable even if the disk fills up.

In: columns from the engine, in pieces of any size. Out: one file under its final name, complete up to the last whole step, whatever
happened. Every row passes ``check`` first, so no file is written that ``reader`` would refuse. ``spool`` does the writing.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import polars as pl

from moetriage.errors import TraceError
from moetriage.trace.check import WholeSteps
from moetriage.trace.schema import SCHEMA, TraceMeta
from moetriage.trace.spool import open_sink


class RouteWriter:
    """Append routing records to a new trace; a context manager that closes on leaving, by an exception too.

    path: the target, .csv or .parquet; an existing file is replaced on close. meta: what the header says of the model.

    Attribute ``error``: set once writing has failed.

    Raises TraceError at once for another suffix, a header that no trace can have, or a place that cannot be written.
    """

    def __init__(self, path: Path | str, meta: TraceMeta) -> None:
        self.path = str(path)
        self.error: TraceError | None = None
        self._closed = False
        if (fault := meta.fault()) is not None:
            raise TraceError(self.path, f"header: {fault}")
        self._steps = WholeSteps(meta)
        try:
            self._sink = open_sink(Path(path), meta)
        except OSError as error:
            raise TraceError(self.path, f"cannot be written: {error.strerror or error}") from error

    @property
    def rows(self) -> int:
        """Rows that are safe in the file; more may wait to be written."""
        return self._sink.rows

    def append(self, columns: Mapping[str, npt.NDArray[Any]]) -> None:
        """Take rows: one array per column of the schema, all of one length (copied, so that buffers can be used again).

        Raises TraceError once, when a row breaks the format or the disk takes no more. The caller may stop or go on: the file keeps
        what was written up to the last whole step, and later rows are ignored.
        """
        if self.error is not None:
            return
        if self._closed:
            raise ValueError(f"{self.path} is closed")
        whole = self._steps.push(_frame(columns))
        self._write(whole)
        if self._steps.fault is not None:
            reason = f"a recorded row breaks the format: {self._steps.fault.reason}"
            raise self._failed(reason, rows=self._steps.rows_out, row=self._steps.fault.index + 1)

    def close(self) -> None:
        """Put the file under its final name, without the rows of a step that never became whole. A second call does nothing.

        Raises TraceError if the last rows could not be written and no earlier call has said so; the file is there all the same.
        """
        if self._closed:
            return
        self._closed = True
        told = self.error is not None
        if not told:
            last = self._steps.finish()
            try:
                self._sink.write(last)
            except OSError as error:
                self._failed(error.strerror or str(error), rows=self.rows)
        try:
            self._sink.finish()
        except OSError as error:
            self._failed(error.strerror or str(error), rows=self.rows)
        if self.error is not None and not told:
            raise self.error

    def _write(self, whole: pl.DataFrame) -> None:
        try:
            self._sink.write(whole)
        except OSError as error:
            raise self._failed(error.strerror or str(error), rows=self.rows) from error

    def _failed(self, reason: str, *, rows: int, row: int | None = None) -> TraceError:
        if self.error is None:
            self.error = TraceError(self.path, f"the trace ends after {rows} rows, up to which it can be read: {reason}", row=row)
        return self.error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None) -> None:
        try:
            self.close()
        except TraceError:
            if exc is None:  # else the exception that ended the run is the one to report
                raise


def _frame(columns: Mapping[str, npt.NDArray[Any]]) -> pl.DataFrame:
    """Return the columns as raw rows. Raises ValueError, for it is a programmer's fault, if one is missing or longer than another."""
    missing = [name for name in SCHEMA if name not in columns]
    if missing:
        raise ValueError(f"columns are missing: {', '.join(missing)}")
    lengths = {len(columns[name]) for name in SCHEMA}
    if len(lengths) != 1:
        raise ValueError(f"columns differ in length: { {name: len(columns[name]) for name in SCHEMA} }")
    return pl.DataFrame({name: np.array(columns[name], np.float32 if name == "weight" else np.int64) for name in SCHEMA})
