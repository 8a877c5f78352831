"""A study's folder goes on where it was, holds whole files only, and is never mixed with another study."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

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


def changed(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda row: row.clear(), "'condition' is missing"),
        (lambda row: row.update(seed=1), "it is the result of top1@1.25, seed 1"),
        (lambda row: row.pop("final"), "'final' is missing"),
        (lambda row: row["final"].update(loss=1e400), "Infinity is no number"),
        (lambda row: row["final"].update(loss="x"), "loss holds 'x', no number from 0 up"),
        (lambda row: row["final"].update(visits=0), "it counts no visits"),
        (lambda row: row["final"].update(visits=5e-324), "visits holds 5e-324, no count from 0 up"),
        (lambda row: row["final"].update(uncovered=10**400), "uncovered holds 1000"),
        (lambda row: row["training"].update(step=[1, 10**300]), "step holds 1000"),
        (lambda row: row["final"].update(requested=[0, 0, 0]), "it counts no visits or no requests"),
        (lambda row: row["final"].update(accepted=[1]), "accepted has 1 numbers, not 3"),
        (lambda row: row["final"]["by_layer"].update(visits=[1] * 9), "by_layer visits has 9 numbers, not 2"),
        (lambda row: row.update(training=[]), "is damaged"),
        (lambda row: row["training"].update(step=[]), "its training has no point"),
        (lambda row: row["training"].update(loss=[1.0]), "loss has 1 numbers, not 2"),
        (lambda row: row["training"].update(margin_quantiles=[[1.0]] * 2), "margin_quantiles has rows of other lengths"),
        (lambda row: row.update(environment=3), "environment is no object"),
        (lambda row: row.update(step_seconds_median=True), "step_seconds_median holds True"),
    ],
)
def test_a_result_that_cannot_be_reported_is_named(change: Any, message: str, folder: StudyFolder) -> None:
    cell = SPEC.cells[0]
    folder.add(cell, result(cell))
    changed(folder.path / "cells" / f"{cell.name}.json", change)
    with pytest.raises(UsageError) as caught:
        folder.results(SPEC)
    assert f"{cell.name}.json: is damaged" in str(caught.value)
    assert message in str(caught.value)
    assert str(caught.value).endswith("remove it and run the study again")


@pytest.mark.parametrize(
    "change",
    [
        lambda about: about.pop("spec"),
        lambda about: about.update(spec=[]),
        lambda about: about["spec"].update(steps="x"),
        lambda about: about["spec"].update(seeds=["0"]),
        lambda about: about["spec"].update(seeds=[]),
        lambda about: about["spec"].update(conditions=[{"policy": 3, "capacity_factor": 1.0}]),
        lambda about: about["spec"].update(conditions=[{"policy": "top1", "capacity_factor": 3.0}]),
        lambda about: about["spec"].update(betas=[0.9]),
        lambda about: about["spec"].update(learning_rate=1e400),
        lambda about: about.update(threshold="x"),
        lambda about: about.update(threshold=7.0),
        lambda about: about.update(data_digest=None),
        lambda about: about.update(format=1),
    ],
)
def test_a_damaged_study_is_named(change: Any, folder: StudyFolder) -> None:
    changed(folder.path / "study.json", change)
    for action in (folder.read, lambda: folder.open(SPEC, "abc")):
        with pytest.raises(UsageError) as caught:
            action()
        assert str(folder.path / "study.json") in str(caught.value)


def test_a_study_that_was_killed_before_its_threshold_begins_again(tmp_path: Path) -> None:
    folder = StudyFolder(tmp_path)
    assert folder.open(SPEC, "abc") is None
    (tmp_path / ".study.json.123.tmp").write_text("{")
    assert folder.open(SPEC, "abc") is None
    (tmp_path / "cells" / "other.json").touch()
    with pytest.raises(UsageError, match="exists and is no study"):
        folder.open(SPEC, "abc")
