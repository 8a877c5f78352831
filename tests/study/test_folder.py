"""A study's folder goes on where it was, holds whole files only, and is never mixed with another study."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from study.cells import SPEC, result

from moetriage.errors import UsageError
from moetriage.study.folder import StudyFolder
from moetriage.study.spec import StudySpec
from moetriage.train import files


@pytest.fixture
def folder(tmp_path: Path) -> StudyFolder:
    made = StudyFolder(tmp_path / "study")
    assert made.open(SPEC, "abc") is None
    made.begin(SPEC, "abc", 0.04)
    return made


def test_what_was_stored_comes_back(folder: StudyFolder) -> None:
    cell = SPEC.cells[3]
    assert not folder.has(cell)
    folder.add(cell, result(cell))
    assert folder.has(cell)
    assert folder.results(SPEC) == [result(cell)]
    assert folder.open(SPEC, "abc") == 0.04
    assert folder.read() == (SPEC, "abc", 0.04)


def test_another_study_is_refused(folder: StudyFolder) -> None:
    with pytest.raises(UsageError, match=r"other settings \(precision, steps\); choose another folder"):
        folder.open(replace(SPEC, steps=9, precision="bf16"), "abc")
    with pytest.raises(UsageError, match="a study on other data"):
        folder.open(SPEC, "abd")


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for path in (tmp_path, tmp_path / "file"):
        with pytest.raises(UsageError, match="exists and is no study"):
            StudyFolder(path).open(SPEC, "abc")
    with pytest.raises(UsageError, match=r"has no study\.json; run `moetriage study run DATA"):
        StudyFolder(tmp_path).read()


def test_a_damaged_cell_is_named(folder: StudyFolder) -> None:
    cell = SPEC.cells[0]
    path = folder.path / "cells" / f"{cell.name}.json"
    path.write_text('{"condition": ')
    with pytest.raises(UsageError, match=r"top1@1\.25-seed0\.json: is damaged"):
        folder.results(SPEC)


def test_a_full_disk_leaves_no_part_of_a_cell(folder: StudyFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(files.os, "fsync", full)
    cell = SPEC.cells[0]
    with pytest.raises(UsageError, match="No space left on device; what was finished before is kept"):
        folder.add(cell, result(cell))
    assert list((folder.path / "cells").iterdir()) == []


def test_a_spec_survives_its_json() -> None:
    assert StudySpec.from_dict(SPEC.as_dict()) == SPEC
    with pytest.raises(UsageError, match="not the settings of a study"):
        StudySpec.from_dict(SPEC.as_dict() | {"colour": "red"})
