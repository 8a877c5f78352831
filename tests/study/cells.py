"""Results of cells made up for tests of what is said about them; the numbers of one condition and seed differ from those of any other."""

from __future__ import annotations

from typing import Any

from moetriage.study.spec import Cell, Condition, StudySpec, smoke

SPEC = smoke()
#: Uncovered visits of 1000 in each evaluation, by condition and seed.
UNCOVERED = {"fixed-top2@1.25": (140, 130), "capsel2@1.25": (80, 131)}


def result(cell: Cell, *, uncovered: int | None = None, loss: float = 5.0) -> dict[str, Any]:
    """Return what a run stores: 1000 visits in two layers."""
    number = UNCOVERED.get(cell.condition.name, (200, 210))[cell.seed] if uncovered is None else uncovered
    rejected = number + 100
    return {
        "condition": cell.condition.name,
        "seed": cell.seed,
        "environment": {"threads": 1, "torch": "2.13.0"},
        "training": {
            "step": [2, 4],
            "loss": [6.0, 5.5],
            "uncovered_fraction": [0.2, 0.1],
            "uncertain_fraction": [0.5, 0.6],
            "requested": [[1000, 100, 500]] * 2,
            "accepted": [[900, 50, 400]] * 2,
            "threshold": [0.03, 0.05],
            "margin_quantiles": [[0.001, 0.01, 0.03, 0.06, 0.2]] * 2,
        },
        "final": {
            "visits": 1000,
            "uncovered": number,
            "optimum_uncovered": 50,
            "requested": [1000, rejected, 700 - 10 * cell.seed],
            "accepted": [1000 - rejected, 100, 400],
            "uncertain": 650,
            "loss": loss + 0.01 * cell.seed - (0.02 if cell.condition.policy == "capsel2" else 0.0),
            "loss_drop_free": loss - 0.5,
            "margin_quantiles": [0.001, 0.01, 0.03, 0.06, 0.2],
            "by_layer": {"visits": [500, 500], "uncovered": [number - 20, 20], "optimum_uncovered": [40, 10]},
        },
        "step_seconds_median": 0.1,
        "wall_seconds": 10.0,
    }


def all_results(spec: StudySpec = SPEC) -> list[dict[str, Any]]:
    """Return a result for each cell of the spec."""
    return [result(cell) for cell in spec.cells]


def cell_of(policy: str, seed: int = 0) -> Cell:
    return Cell(condition=Condition(policy=policy, capacity_factor=1.25), seed=seed)
