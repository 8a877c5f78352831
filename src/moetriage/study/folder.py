"""The folder that a study's results are in: what it is of, and one JSON file a finished cell.

In: a spec, the data's digest, results. Out: files that appear under their names only when complete, so that a killed study goes on where it
was; a folder of another study, or on other data, is refused.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from moetriage.errors import UsageError
from moetriage.study.spec import Cell, StudySpec

Row = dict[str, Any]
FORMAT = 1


class StudyFolder:
    """``study.json`` and ``cells/*.json`` below one folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._about = path / "study.json"
        self._cells = path / "cells"

    def open(self, spec: StudySpec, data_sha256: str) -> float | None:
        """Make the folder, or go on with it, and return the threshold if it was measured already.

        Raises UsageError if the folder holds another study, one on other data, or something else.
        """
        if not self._about.exists():
            if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
                raise UsageError(f"{self.path}: exists and is no study; choose another folder")
            _make_folder(self._cells)
            return None
        about = self._read_about()
        if about["spec"] != spec.as_dict():
            names = [name for name, value in spec.as_dict().items() if about["spec"].get(name) != value]
            raise UsageError(f"{self.path}: holds a study with other settings ({', '.join(names)}); choose another folder")
        if about["data_sha256"] != data_sha256:
            raise UsageError(
                f"{self.path}: holds a study on other data ({about['data_sha256'][:12]}, not {data_sha256[:12]}); choose another folder"
            )
        _make_folder(self._cells)
        return float(about["threshold"])

    def begin(self, spec: StudySpec, data_sha256: str, threshold: float) -> None:
        """Store what this study is of."""
        about = {"format": FORMAT, "spec": spec.as_dict(), "data_sha256": data_sha256, "threshold": threshold}
        write_json(self._about, about)

    def read(self) -> tuple[StudySpec, str, float]:
        """Return spec, digest of the data and threshold. Raises UsageError if the folder holds no study."""
        if not self._about.exists():
            raise UsageError(f"{self.path}: is no study, it has no study.json; run `moetriage study run DATA {self.path}` first")
        about = self._read_about()
        return StudySpec.from_dict(about["spec"]), about["data_sha256"], float(about["threshold"])

    def has(self, cell: Cell) -> bool:
        """Say whether the cell is done."""
        return self._file(cell).exists()

    def add(self, cell: Cell, result: Row) -> None:
        """Store the result of a cell."""
        write_json(self._file(cell), result)

    def results(self, spec: StudySpec) -> list[Row]:
        """Return the results there are, in the order of the spec. Raises UsageError for one that is damaged."""
        return [_read_json(self._file(cell)) for cell in spec.cells if self.has(cell)]

    def _file(self, cell: Cell) -> Path:
        return self._cells / f"{cell.name}.json"

    def _read_about(self) -> Row:
        about = _read_json(self._about)
        if about.get("format") != FORMAT:
            raise UsageError(f"{self._about}: is of format {about.get('format')!r}, and this version reads {FORMAT}")
        return about


def write_json(path: Path, value: Row) -> None:
    """Write a file that is there completely or not at all. Raises UsageError if it cannot be written."""
    write_text(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> None:
    """Write a file that is there completely or not at all. Raises UsageError if it cannot be written."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise UsageError(f"{path}: cannot be written: {error.strerror or error}; what was finished before is kept") from error
    finally:
        temporary.unlink(missing_ok=True)


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{path}: cannot be made: {error.strerror or error}") from error


def _read_json(path: Path) -> Row:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise UsageError(f"{path}: is damaged ({error}); remove it and run the study again") from error
    if not isinstance(value, dict):
        raise UsageError(f"{path}: is damaged (not an object); remove it and run the study again")
    return value
