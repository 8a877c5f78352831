"""What a cell's result must hold for a report to be made of it: a result and its cell in, nothing or an error out.

Knows names and shapes, not what the numbers should be.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from moetriage.study.spec import Cell, StudySpec

Row = dict[str, Any]
#: A number for each point of training; three, one a pass; five quantiles; one a layer.
_CURVES = {"step": 0, "loss": 0, "uncovered_fraction": 0, "uncertain_fraction": 0, "threshold": 0, "margin_quantiles": 5}
_COUNTS = ("visits", "uncovered", "optimum_uncovered", "uncertain")
#: No count, loss or time comes near, and a float still holds the whole numbers below.
_TOO_LARGE = 1 << 53
_LAYERS = ("visits", "uncovered", "optimum_uncovered")


def check_result(result: Row, cell: Cell, spec: StudySpec) -> None:
    """Raise ValueError, TypeError or KeyError for a result that is another cell's, or lacks something that a report needs."""
    if (result["condition"], result["seed"]) != (cell.condition.name, cell.seed):
        raise ValueError(f"it is the result of {result['condition']}, seed {result['seed']}")
    if not isinstance(result["environment"], dict):
        raise TypeError("environment is no object")
    _numbers("step_seconds_median", [result["step_seconds_median"]])
    _check_final(result["final"], spec)
    training = result["training"]
    points = len(training["step"])
    if points < 1:
        raise ValueError("its training has no point")
    for name, width in _CURVES.items():
        _numbers(name, _rows(name, training[name], width) if width else training[name], points * (width or 1))


def _check_final(final: Row, spec: StudySpec) -> None:
    for name in _COUNTS:
        _numbers(name, [final[name]], kind=int)
    for name in ("loss", "loss_drop_free"):
        _numbers(name, [final[name]])
    for name in ("requested", "accepted"):
        _numbers(name, final[name], 3, kind=int)
    for name in _LAYERS:
        _numbers(f"by_layer {name}", final["by_layer"][name], spec.n_layer, kind=int)
    if not (final["visits"] > 0 and sum(final["requested"]) > 0 and all(visits > 0 for visits in final["by_layer"]["visits"])):
        raise ValueError("it counts no visits or no requests")


def _rows(name: str, rows: list[list[float]], width: int) -> Iterable[float]:
    if any(len(row) != width for row in rows):
        raise ValueError(f"{name} has rows of other lengths than {width}")
    return [value for row in rows for value in row]


def _numbers(name: str, values: Iterable[Any], count: int | None = None, *, kind: Any = (int, float)) -> None:
    """Raise ValueError unless these are finite numbers of ``kind`` from 0 up, as many as said."""
    found = list(values)
    if count is not None and len(found) != count:
        raise ValueError(f"{name} has {len(found)} numbers, not {count}")
    for value in found:
        if isinstance(value, bool) or not isinstance(value, kind) or not 0 <= value < _TOO_LARGE:
            raise ValueError(f"{name} holds {value!r}, no {'count' if kind is int else 'number'} from 0 up")
