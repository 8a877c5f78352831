"""The results of a sweep on disk: lines of JSON while it runs, Parquet once it is done.

In: rows. Out: which cells are there already, and the file. Results hold the digest of the trace that they are of, so that those of another
are never taken for this one's; an interrupted sweep goes on from its journal.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from moetriage.errors import UsageError
from moetriage.replay.cells import Cell
from moetriage.replay.rows import Row
from moetriage.types import MIB

#: What tells one cell of a sweep from another.
_KEY = ("mode", "policy", "value", "evict", "cache_mb", "prefetch", "drop_in_prefill", "drop_raw_weight", "seed")
_DIGEST = "trace_digest"


class SweepJournal:
    """Rows found so far: those of an earlier Parquet, and a line for each group since, written at once."""

    def __init__(self, out: Path, digest: str) -> None:
        self._out = out
        self._path = out.with_name(out.name + ".partial")
        self._digest = digest
        self._rows: dict[tuple[Any, ...], list[Row]] = {}
        self._file: Any = None
        if out.suffix.lower() != ".parquet":
            raise UsageError(f"--out {out}: must end in .parquet")
        self._take(_read_parquet(out), out)
        self._take(_read_lines(self._path), self._path)

    def has(self, cell: Cell) -> bool:
        return _key_of_cell(cell) in self._rows

    def rows_of(self, cells: Iterable[Cell]) -> list[Row]:
        return [row for cell in cells for row in self._rows[_key_of_cell(cell)]]

    def add(self, rows: list[Row]) -> None:
        marked = [row | {_DIGEST: self._digest} for row in rows]
        self._take(marked, self._path)
        self._file.write(json.dumps(marked) + "\n")
        self._file.flush()

    def finish(self) -> None:
        """Turn all rows into the Parquet and let the journal go."""
        import polars as pl

        rows = [row for cell_rows in self._rows.values() for row in cell_rows]
        temporary = self._out.with_name(self._out.name + ".tmp")
        # Of value and cache_mb some are whole numbers, so their type is not to be guessed from the first row.
        floats = {"value": pl.Float64, "cache_mb": pl.Float64}
        try:
            pl.DataFrame(rows, schema_overrides=floats, infer_schema_length=None).write_parquet(temporary)
            temporary.replace(self._out)
        except OSError as error:
            raise UsageError(f"--out {self._out}: cannot be written: {error.strerror or error}; {self._path} has the results") from error
        self._path.unlink(missing_ok=True)

    def __enter__(self) -> SweepJournal:
        try:
            self._file = self._path.open("a", encoding="utf-8")
        except OSError as error:
            raise UsageError(f"--out {self._out}: cannot be written: {error.strerror or error}") from error
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _take(self, rows: Iterable[Row], path: Path) -> None:
        taken: dict[tuple[Any, ...], list[Row]] = {}
        for row in rows:
            if row.get(_DIGEST) != self._digest:
                raise UsageError(f"--out {self._out}: {path} holds results of another trace; give another file, or remove it")
            taken.setdefault(tuple(_number(row[name]) for name in _KEY), []).append(row)
        self._rows |= taken


def _key_of_cell(cell: Cell) -> tuple[Any, ...]:
    budget = None if cell.budget_bytes is None else cell.budget_bytes / MIB
    lossy = cell.lossy
    key = (cell.mode, lossy.name, lossy.value, cell.evict, budget, cell.prefetch, lossy.in_prefill, lossy.raw_weight, cell.seed)
    return tuple(_number(value) for value in key)


def _number(value: Any) -> Any:
    return float(value) if isinstance(value, (int, float)) else value


def _read_parquet(path: Path) -> list[Row]:
    if not path.exists():
        return []
    import polars as pl

    try:
        rows = pl.read_parquet(path).to_dicts()
    except (pl.exceptions.PolarsError, OSError) as error:
        raise UsageError(f"--out {path}: is there and is no Parquet file; give another file, or remove it") from error
    if rows and not {_DIGEST, *_KEY} <= rows[0].keys():
        raise UsageError(f"--out {path}: is there and holds no results of a sweep; give another file, or remove it")
    return rows


def _read_lines(path: Path) -> list[Row]:
    """Read a journal; its last line may be cut short by what ended the sweep."""
    if not path.exists():
        return []
    rows: list[Row] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows += json.loads(line)
        except ValueError:
            break
    return rows
