"""What is said of a study follows from its numbers: means, spreads, differences, and the verdicts beside the document."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from study.cells import SPEC, all_results, cell_of, result

from moetriage.study.reference import FIGURES, Figure, compare
from moetriage.study.report import as_json, markdown
from moetriage.study.spec import StudySpec, full, named, smoke
from moetriage.study.summary import METRICS, summarise

SUMMARY = summarise(SPEC, 0.04, all_results())


def condition(name: str) -> dict[str, dict[str, float]]:
    (found,) = [c for c in SUMMARY["conditions"] if c["name"] == name]
    return found["metrics"]  # type: ignore[no-any-return]


def test_means_and_population_spreads_are_over_seeds() -> None:
    metrics = condition("capsel2@1.25")
    assert metrics["uncovered_fraction"] == pytest.approx({"mean": 0.1055, "std": 0.0255})
    assert metrics["regret_fraction"]["mean"] == pytest.approx(0.1055 - 0.05)
    assert metrics["requested_slots"]["mean"] == pytest.approx((1000 + 180 + 700 + 1000 + 231 + 690) / 2)


def test_the_rescue_rate_is_of_rejected_first_choices() -> None:
    assert METRICS["rescue_fraction"](result(cell_of("capsel2"), uncovered=100)) == pytest.approx(100 / 200)
    everything_served = result(cell_of("top1")) | {"final": {"accepted": [10, 0, 0], "requested": [10, 0, 0]}}
    assert METRICS["rescue_fraction"](everything_served) is None


def test_the_assignment_drop_is_of_requested_slots() -> None:
    cell = result(cell_of("capsel2"), uncovered=100)
    assert METRICS["assignment_drop_fraction"](cell) == pytest.approx(1 - (800 + 100 + 400) / (1000 + 200 + 700))


def test_differences_are_taken_within_a_seed() -> None:
    paired = SUMMARY["paired"]["capsel2@1.25"]
    assert paired["uncovered_fraction"] == pytest.approx([-0.060, 0.001])
    assert paired["loss"] == pytest.approx([-0.02, -0.02])
    assert "fixed-top2@1.25" not in SUMMARY["paired"]


def test_training_and_layers_are_means_over_seeds() -> None:
    (capsel,) = [c for c in SUMMARY["conditions"] if c["name"] == "capsel2@1.25"]
    assert capsel["over_training"]["uncertain_fraction"] == [0.5, 0.6]
    assert capsel["uncovered_fraction_by_layer"] == pytest.approx([(60 + 111) / 2 / 500, 20 / 500])
    assert "| capsel2@1.25 | uncertain, % | 50.00 | 60.00 |" in markdown(SUMMARY)


def test_a_seed_without_gain_is_counted() -> None:
    (row,) = [row for row in SUMMARY["reference"] if row["key"] == "seeds_without_gain"]
    assert row["mean"] == 0.5
    assert row["verdict"] == "disagrees"


def test_missing_cells_are_named_and_their_figures_are_not_made_up() -> None:
    done = [cell for cell in all_results() if cell["condition"] not in ("capsel2@1.25",)]
    summary = summarise(SPEC, 0.04, done)
    assert summary["missing"] == ["capsel2@1.25-seed0", "capsel2@1.25-seed1"]
    verdicts = {row["key"]: row["verdict"] for row in summary["reference"]}
    assert verdicts["capsel_uncovered"] == verdicts["uncovered_difference"] == verdicts["seeds_without_gain"] == "not measured"
    assert verdicts["fixed_uncovered"] != "not measured"
    assert "Not run yet: capsel2@1.25-seed0" in markdown(summary)


def test_no_result_at_all_can_be_reported() -> None:
    text = markdown(summarise(full(), 0.04, []))
    assert "Of 10 figures, agrees: 1; not measured: 9." in text
    assert "In short" not in text


@pytest.mark.parametrize("other", [smoke(), full(load_balance_weight=0.01), replace(full(), steps=499)])
def test_a_study_of_other_settings_is_not_judged_by_the_document(other: StudySpec) -> None:
    text = markdown(summarise(replace(other, seeds=(0, 1)), 0.04, all_results()))
    assert "its figures are not set beside them" in text
    assert "agree" not in text


def test_fewer_conditions_other_seeds_and_precision_leave_a_study_comparable() -> None:
    assert full(conditions=named(["capsel2@1.25"]), seeds=(7, 8), precision="bf16").comparable


def test_the_report_begins_with_what_the_document_compares() -> None:
    paragraph = markdown(SUMMARY).split("\n\n")[1]
    assert paragraph == (
        "In short: capsel2@1.25 leaves 10.55 % of token visits without an expert, fixed-top2@1.25 13.50 % (CapSel-2 is better in 1 of 2 "
        "seeds), with -1.5 % requested slots. Its held-out loss differs by -0.0200 (better in 2 of 2 seeds)."
    )


FIGURE = Figure(key="x", text="x", value=-0.10, signed=True)


@pytest.mark.parametrize(
    ("figure", "mean", "std", "verdict"),
    [
        (FIGURE, -0.12, 0.01, "agrees"),
        (FIGURE, -0.13, 0.01, "same direction, other size"),
        (FIGURE, 0.01, 0.01, "disagrees"),
        (FIGURE, None, None, "not measured"),
        (Figure(key="x", text="x", value=0.10), 0.13, 0.01, "disagrees"),
        (Figure(key="threshold", text="x", value=0.10), 0.109, None, "agrees"),
        (Figure(key="threshold", text="x", value=0.10), 0.111, None, "disagrees"),
        (Figure(key="seeds_without_gain", text="x", value=1 / 3), 1 - 2 / 3, None, "agrees"),
    ],
)
def test_verdicts_follow_the_rule(figure: Figure, mean: float | None, std: float | None, verdict: str) -> None:
    assert compare(figure, mean, std).verdict == verdict


#: The document's settings, with numbers made up.
FULL = full(seeds=(0, 1))


def test_each_figure_of_the_document_is_beside_ours() -> None:
    summary = summarise(FULL, 0.04, all_results(FULL))
    assert [row["key"] for row in summary["reference"]] == [figure.key for figure in FIGURES]
    text = markdown(summary)
    assert "| token visits without an expert, fixed top-2 | 13.84 % | 13.50 % ± 0.50 | agrees |" in text
    assert "| share of seeds without a gain in coverage | 33 % | 50 % | disagrees |" in text


def test_the_verdicts_change_with_the_numbers() -> None:
    worse = [result(cell, uncovered=300 if cell.condition.policy == "capsel2" else None) for cell in SPEC.cells]
    verdicts = {row["key"]: row["verdict"] for row in summarise(SPEC, 0.04, worse)["reference"]}
    assert verdicts["uncovered_difference"] == "disagrees"
    assert verdicts["capsel_uncovered"] == "disagrees"


def test_the_report_names_every_condition_and_its_bound() -> None:
    text = markdown(SUMMARY, plots=["a.svg"])
    for one in SPEC.conditions:
        assert one.name in text
    assert "| *optimum, routers of capsel2@1.25* | 5.00 ± 0.00 |" in text
    assert "| capsel2@1.25 | no expert, points | -6.00, +0.10 | -2.95 ± 3.05 | 1 of 2 |" in text
    assert "![a.svg](a.svg)" in text


def test_the_summary_is_json() -> None:
    assert json.loads(as_json(SUMMARY)) == json.loads(json.dumps(SUMMARY))
