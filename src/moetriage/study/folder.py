"""The folder that a study's results are in: what it is of, and one JSON file a finished cell.

In: a spec, the data's digest, results. Out: files that appear under their names only when complete, so that a killed study goes on where it
was; a folder of another study, or on other data, is refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from moetriage.errors import UsageError
from moetriage.study.result import check_result
from moetriage.study.spec import Cell, StudySpec
from moetriage.train.files import damaged, read_object, write_whole

Row = dict[str, Any]
FORMAT = 2
_RUN_AGAIN = "remove it and run the study again"
_OTHER_FOLDER = "run the study again in another folder"


class StudyFolder:
    """``study.json`` and ``cells/*.json`` below one folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._about = path / "study.json"
        self._cells = path / "cells"

    def open(self, spec: StudySpec, data_digest: str) -> float | None:
        """Make the folder, or go on with it, and return the threshold if it was measured already.

        Raises UsageError if the folder holds another study, one on other data, or something else.
        """
        if not self._about.exists():
            if self.path.exists() and not _just_begun(self.path):
                raise UsageError(f"{self.path}: exists and is no study; choose another folder")
            _make_folder(self._cells)
            return None
        found, found_digest, threshold = self.read()
        if found != spec:
            ours, theirs = spec.as_dict(), found.as_dict()
            names = [name for name, value in ours.items() if theirs[name] != value]
            raise UsageError(f"{self.path}: holds a study with other settings ({', '.join(names)}); choose another folder")
        if found_digest != data_digest:
            raise UsageError(f"{self.path}: holds a study on other data ({found_digest}, not {data_digest}); choose another folder")
        _make_folder(self._cells)
        return threshold

    def begin(self, spec: StudySpec, data_digest: str, threshold: float) -> None:
        """Store what this study is of."""
        about = {"format": FORMAT, "spec": spec.as_dict(), "data_digest": data_digest, "threshold": threshold}
        write_json(self._about, about)

    def read(self) -> tuple[StudySpec, str, float]:
        """Return spec, digest of the data and threshold. Raises UsageError if the folder holds no study."""
        if not self._about.exists():
            raise UsageError(f"{self.path}: is no study, it has no study.json; run `moetriage study run DATA {self.path}` first")
        about = read_object(self._about, hint=_OTHER_FOLDER)
        with damaged(self._about, hint=_OTHER_FOLDER):
            if about["format"] != FORMAT:
                raise UsageError(f"is of format {about['format']!r}, and this version reads {FORMAT}")
            spec, data_digest, threshold = StudySpec.from_dict(about["spec"]), about["data_digest"], about["threshold"]
            if not isinstance(data_digest, str) or not isinstance(threshold, float) or not 0 <= threshold <= 1:
                raise ValueError(f"data {data_digest!r}, threshold {threshold!r}")
        return spec, data_digest, threshold

    def has(self, cell: Cell) -> bool:
        """Say whether the cell is done."""
        return self._file(cell).exists()

    def add(self, cell: Cell, result: Row) -> None:
        """Store the result of a cell."""
        write_json(self._file(cell), result)

    def results(self, spec: StudySpec) -> list[Row]:
        """Return the results there are, in the order of the spec. Raises UsageError for one that is damaged."""
        found = []
        for cell in spec.cells:
            if self.has(cell):
                path = self._file(cell)
                result = read_object(path, hint=_RUN_AGAIN)
                with damaged(path, hint=_RUN_AGAIN):
                    check_result(result, cell, spec)
                found.append(result)
        return found

    def _file(self, cell: Cell) -> Path:
        return self._cells / f"{cell.name}.json"


def write_json(path: Path, value: Row) -> None:
    """Write a file that is there completely or not at all. Raises UsageError if it cannot be written."""
    write_whole(path, json.dumps(value, indent=1, allow_nan=False) + "\n")


def _just_begun(path: Path) -> bool:
    """Say whether a folder holds at most what a study left that was killed before its threshold was measured."""
    return path.is_dir() and all(
        (found.name == "cells" and found.is_dir() and not any(found.iterdir())) or found.name.startswith(".study.json.")
        for found in path.iterdir()
    )


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{path}: cannot be made: {error.strerror or error}") from error
