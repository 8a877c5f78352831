"""From the results of the cells to the study's numbers: mean and spread over seeds, paired differences, regret, and the document beside it.

In: the cells' JSON (``run`` writes it). Out: one JSON-ready dict, which ``report`` writes down and ``plots`` draws from. Computes nothing
that needs the models; a cell that is missing is said to be missing.

A slot is one token at one expert. A visit is one token at one MoE layer.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from moetriage.study.reference import FIGURES, compare
from moetriage.study.spec import BASELINE, Condition, StudySpec

Row = dict[str, Any]
Spread = dict[str, float]
CAPSEL = "capsel2@1.25"

#: What is said of each run, from its evaluation on held-out text unless said otherwise.
METRICS: dict[str, Callable[[Row], float | None]] = {
    "uncovered_fraction": lambda cell: _ratio(cell["final"]["uncovered"], cell["final"]["visits"]),
    "optimum_uncovered_fraction": lambda cell: _ratio(cell["final"]["optimum_uncovered"], cell["final"]["visits"]),
    "regret_fraction": lambda cell: _ratio(cell["final"]["uncovered"] - cell["final"]["optimum_uncovered"], cell["final"]["visits"]),
    "assignment_drop_fraction": lambda cell: 1 - sum(cell["final"]["accepted"]) / sum(cell["final"]["requested"]),
    "requested_slots": lambda cell: sum(cell["final"]["requested"]),
    "accepted_slots": lambda cell: sum(cell["final"]["accepted"]),
    **{f"requested_{name}": lambda cell, i=i: cell["final"]["requested"][i] for i, name in enumerate(("primary", "rescue", "optional"))},  # type: ignore[misc]
    **{f"accepted_{name}": lambda cell, i=i: cell["final"]["accepted"][i] for i, name in enumerate(("primary", "rescue", "optional"))},  # type: ignore[misc]
    "rescue_fraction": lambda cell: _ratio(cell["final"]["accepted"][1], cell["final"]["requested"][0] - cell["final"]["accepted"][0]),
    "uncertain_fraction": lambda cell: _ratio(cell["final"]["uncertain"], cell["final"]["visits"]),
    "loss": lambda cell: cell["final"]["loss"],
    "loss_drop_free": lambda cell: cell["final"]["loss_drop_free"],
    "step_seconds": lambda cell: cell["step_seconds_median"],
}


def summarise(spec: StudySpec, threshold: float, cells: Sequence[Row]) -> Row:
    """Return everything the report says, as JSON-ready values.

    cells: results as ``run`` stored them, in any order. Raises nothing for cells that are missing; ``missing`` names them.
    """
    found = {(cell["condition"], cell["seed"]): cell for cell in cells}
    by_condition = {c.name: [found[c.name, seed] for seed in spec.seeds if (c.name, seed) in found] for c in spec.conditions}
    return {
        "spec": spec.as_dict(),
        "threshold": threshold,
        "missing": [cell.name for cell in spec.cells if (cell.condition.name, cell.seed) not in found],
        "environments": _distinct([cell["environment"] for cell in cells]),
        "conditions": [_condition(condition, by_condition[condition.name]) for condition in spec.conditions],
        "paired": _paired(spec, found),
        "comparable": spec.comparable,
        "reference": _reference(threshold, by_condition, spec, found),
    }


def _condition(condition: Condition, cells: Sequence[Row]) -> Row:
    return {
        "name": condition.name,
        "core": condition.core,
        "seeds": [cell["seed"] for cell in cells],
        "over_training": {name: _mean_curve(cells, name) for name in ("step", "uncovered_fraction", "uncertain_fraction", "loss")},
        "uncovered_fraction_by_layer": mean_rows([_layer_shares(cell) for cell in cells]),
        "metrics": {name: _spread([metric(cell) for cell in cells]) for name, metric in METRICS.items()},
    }


def _mean_curve(cells: Sequence[Row], name: str) -> list[float]:
    return mean_rows([cell["training"][name] for cell in cells])


def _layer_shares(cell: Row) -> list[float]:
    layers = cell["final"]["by_layer"]
    return [uncovered / visits for uncovered, visits in zip(layers["uncovered"], layers["visits"], strict=True)]


def mean_rows(rows: Sequence[Sequence[float]]) -> list[float]:
    """Return the mean over seeds, element by element."""
    return [statistics.fmean(column) for column in zip(*rows, strict=True)]


def _paired(spec: StudySpec, found: dict[tuple[str, int], Row]) -> Row:
    """Return, for each condition, its difference to the baseline seed by seed: same initialisation, same batches."""
    differences: Row = {}
    for condition in spec.conditions:
        seeds = [seed for seed in spec.seeds if (condition.name, seed) in found and (BASELINE, seed) in found]
        if condition.name == BASELINE or not seeds:
            continue
        differences[condition.name] = {
            name: [_difference(METRICS[name], found[condition.name, seed], found[BASELINE, seed]) for seed in seeds]
            for name in ("uncovered_fraction", "loss", "loss_drop_free")
        } | {"seeds": seeds}
    return differences


def _difference(metric: Callable[[Row], float | None], cell: Row, baseline: Row) -> float:
    ours, theirs = metric(cell), metric(baseline)
    assert ours is not None
    assert theirs is not None
    return ours - theirs


def _reference(threshold: float, by_condition: dict[str, list[Row]], spec: StudySpec, found: dict[tuple[str, int], Row]) -> list[Row]:
    """Return each of the document's figures beside ours."""
    seeds = [seed for seed in spec.seeds if (CAPSEL, seed) in found and (BASELINE, seed) in found]
    pairs = [(found[CAPSEL, seed], found[BASELINE, seed]) for seed in seeds]
    differences = [_difference(METRICS["uncovered_fraction"], *pair) for pair in pairs]
    values: dict[str, list[float | None]] = {
        "fixed_uncovered": [METRICS["uncovered_fraction"](cell) for cell in by_condition.get(BASELINE, [])],
        "capsel_uncovered": [METRICS["uncovered_fraction"](cell) for cell in by_condition.get(CAPSEL, [])],
        "uncovered_difference": [*differences],
        "requested_change": [sum(a["final"]["requested"]) / sum(b["final"]["requested"]) - 1 for a, b in pairs],
        "accepted_change": [sum(a["final"]["accepted"]) / sum(b["final"]["accepted"]) - 1 for a, b in pairs],
        "rescue_rate": [METRICS["rescue_fraction"](cell) for cell in by_condition.get(CAPSEL, [])],
        "uncertain": [METRICS["uncertain_fraction"](cell) for cell in by_condition.get(CAPSEL, [])],
        "loss_difference": [_difference(METRICS["loss"], *pair) for pair in pairs],
    }
    spreads = {key: _spread(of_seeds) for key, of_seeds in values.items()}
    # One measurement and one count: no spread over seeds.
    spreads["threshold"] = {"mean": threshold}
    spreads["seeds_without_gain"] = {"mean": sum(d >= 0 for d in differences) / len(differences)} if differences else None
    return [_compared(figure, spreads[figure.key]) for figure in FIGURES]


def _compared(figure: Any, spread: Spread | None) -> Row:
    comparison = compare(figure, *(None, None) if spread is None else (spread["mean"], spread.get("std")))
    return {
        "key": figure.key,
        "document": figure.value,
        "mean": comparison.mean,
        "std": comparison.std,
        "verdict": comparison.verdict,
        "row": list(comparison.row()),
    }


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _spread(values: Sequence[float | None]) -> Spread | None:
    """Return mean and population standard deviation; None where a run has no such number (no rejected first choice, say)."""
    numbers = [value for value in values if value is not None]
    if not numbers or len(numbers) < len(values):
        return None
    return {"mean": statistics.fmean(numbers), "std": statistics.pstdev(numbers)}


def _distinct(values: Sequence[Row]) -> list[Row]:
    return [value for index, value in enumerate(values) if value not in values[:index]]
