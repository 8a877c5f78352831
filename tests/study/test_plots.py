"""The pictures are drawn from any part of a study, and the same results give the same files."""

from __future__ import annotations

from pathlib import Path

from study.cells import SPEC, all_results, cell_of, result

from moetriage.study.plots import draw

NAMES = [
    "coverage_by_layer.svg",
    "coverage_over_training.svg",
    "uncertain_over_training.svg",
    "slots_against_coverage.svg",
    "threshold_against_margins.svg",
]


def test_the_same_results_give_the_same_pictures(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
        assert draw(SPEC, 0.04, all_results(), folder) == NAMES
    for name in NAMES:
        first, second = ((folder / name).read_bytes() for folder in folders)
        assert first == second


def test_a_study_that_has_just_begun_can_be_drawn(tmp_path: Path) -> None:
    assert draw(SPEC, 0.04, [], tmp_path) == []
    assert draw(SPEC, 0.04, [result(cell_of("top1"))], tmp_path) == NAMES
    assert all((tmp_path / name).stat().st_size for name in NAMES)
