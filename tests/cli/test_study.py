"""``moetriage study``: what it prints and leaves behind, and what it refuses."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from cli.support import Command

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="the extra train is not installed")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from moetriage.train.corpus import files_corpus
    from moetriage.train.data_build import build

    folder = tmp_path_factory.mktemp("study") / "data"
    build(files_corpus([Path(os.__file__).parent / "asyncio"]), folder, vocab_size=300)
    return folder


def test_a_study_runs_reports_and_goes_on(command: Command, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from moetriage.study import spec

    few = spec.CORE[3:]
    monkeypatch.setitem(spec.PRESETS, "smoke", lambda **options: replace(spec.smoke(**options), conditions=few))
    out = tmp_path / "out"
    result = command("study", "run", data, out, "--preset", "smoke", "--threads", "1", "--json")
    assert result.code == 0, result.err
    assert result.json["missing"] == []
    assert len(result.json["conditions"]) == 2
    assert sorted(path.name for path in out.iterdir()) == [
        "cells",
        "coverage_by_layer.svg",
        "coverage_over_training.svg",
        "report.md",
        "slots_against_coverage.svg",
        "study.json",
        "summary.json",
        "threshold_against_margins.svg",
        "uncertain_over_training.svg",
    ]
    assert json.loads((out / "summary.json").read_text()) == result.json
    cells = {path: path.stat().st_mtime_ns for path in (out / "cells").iterdir()}
    removed = out / "cells" / "capsel2@1.25-seed1.json"
    before = json.loads(removed.read_text())
    removed.unlink()
    again = command("study", "report", out, "--no-plots")
    assert again.code == 0, again.err
    assert "3 of 4 cells" in again.err
    assert "Not run yet: capsel2@1.25-seed1" in (out / "report.md").read_text()
    assert command("study", "run", data, out, "--preset", "smoke", "--threads", "1", "--no-plots").code == 0
    assert json.loads(removed.read_text())["final"] == before["final"]
    assert {path: path.stat().st_mtime_ns for path in cells if path != removed} == {p: t for p, t in cells.items() if p != removed}


def test_without_matplotlib_there_is_a_report_without_pictures_unless_they_were_asked_for(
    command: Command, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    few = ("--preset", "smoke", "--threads", "1", "--condition", "top1@1.25", "--seeds", "1")
    asked = command("study", "run", data, tmp_path / "out", *few, "--plots")
    assert (asked.code, len(asked.errors)) == (2, 1)
    assert "moetriage[plot]" in asked.err
    result = command("study", "run", data, tmp_path / "out", *few)
    assert result.code == 0
    assert "no pictures: " in result.err
    assert (tmp_path / "out/report.md").exists()


@pytest.mark.slow
def test_the_smoke_preset_runs_every_condition(command: Command, data: Path, tmp_path: Path) -> None:
    result = command("study", "run", data, tmp_path / "out", "--preset", "smoke", "--threads", "1", "--json")
    assert result.code == 0, result.err
    assert result.json["missing"] == []
    assert len(result.json["conditions"]) == 10


def test_a_study_of_chosen_conditions_and_seeds(command: Command, data: Path, tmp_path: Path) -> None:
    out, chosen = tmp_path / "out", ("--condition", "capsel2@1.25", "--condition", "fixed-top2@1.25", "--seeds", "1")
    result = command("study", "run", data, out, "--preset", "smoke", "--threads", "1", "--no-plots", "--json", *chosen)
    assert result.code == 0, result.err
    assert sorted(path.name for path in (out / "cells").iterdir()) == ["capsel2@1.25-seed0.json", "fixed-top2@1.25-seed0.json"]
    assert result.json["missing"] == []
    assert list(result.json["paired"]) == ["capsel2@1.25"]


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (("--condition", "capsel3@1.25"), "--condition capsel3@1.25: must be one of top1@1.25, top1@2, "),
        (("--seeds", "0"), "--seeds 0: must be between 1 and 1000"),
        (("--seeds", "1000000000000"), "--seeds 1000000000000: must be between 1 and 1000"),
    ],
)
def test_a_condition_or_number_of_seeds_that_is_none_is_refused(
    command: Command, data: Path, tmp_path: Path, option: tuple[str, str], message: str
) -> None:
    result = command("study", "run", data, tmp_path / "out", *option)
    assert (result.code, len(result.errors)) == (2, 1)
    assert message in result.err
    assert not (tmp_path / "out").exists()


def test_a_study_with_other_settings_is_refused(command: Command, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / "cells").mkdir(parents=True)
    from moetriage.study.folder import StudyFolder
    from moetriage.study.spec import smoke
    from moetriage.train.data import open_data

    StudyFolder(out).begin(smoke(), open_data(data).digest_with_heldout, 0.04)
    result = command("study", "run", data, out, "--preset", "smoke", "--load-balance", "0.01", "--precision", "bf16")
    assert result.code == 2
    assert result.errors == [f"moetriage: {out}: holds a study with other settings (precision, load_balance_weight); choose another folder"]


def test_missing_data_and_missing_studies_are_one_line(command: Command, tmp_path: Path) -> None:
    no_data = command("study", "run", tmp_path / "data", tmp_path / "out")
    assert (no_data.code, len(no_data.errors)) == (2, 1)
    assert "moetriage data build" in no_data.err
    no_study = command("study", "report", tmp_path)
    assert (no_study.code, len(no_study.errors)) == (2, 1)
    assert "moetriage study run DATA" in no_study.err


def test_without_torch_the_extra_is_named(command: Command, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "torch" else find(name, *rest))
    result = command("study", "run", data, tmp_path / "out")
    assert result.code == 2
    assert result.errors == ["moetriage: moetriage study run needs torch, not installed here: pip install 'moetriage[train]'"]
