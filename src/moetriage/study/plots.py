"""Draw a study: coverage per layer and over training, slots against coverage, the threshold against the margins.

In: the cells' results and their spec. Out: pictures. matplotlib is an extra (``pip install 'moetriage[plot]'``) and imported only here.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from moetriage.errors import UsageError
from moetriage.study.spec import BASELINE, CORE, EXTRA, Condition, StudySpec
from moetriage.study.summary import CAPSEL, METRICS, mean_rows, summarise
from moetriage.train.files import write_whole
from moetriage.train.policies import ONLINE

Row = dict[str, Any]
Cells = dict[str, list[Row]]

# Okabe and Ito's colours, which people with colour blindness can tell apart, and two darker ones; markers tell them apart, too.
_COLOURS = ("#999999", "#56B4E9", "#E69F00", "#D55E00", "#0072B2", "#009E73", "#CC79A7", "#000000", "#7B4F2A", "#A89B00")
_MARKERS = "os^DvPX*<>"
#: The condition whose threshold follows training.
_ONLINE = f"{ONLINE}@1.25"
_QUANTILE_NAMES = ("5 %", "25 %", "median", "75 %", "95 %")


def check_matplotlib() -> None:
    """Raise UsageError if the extra is missing."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise UsageError("plots need matplotlib: pip install 'moetriage[plot]', or leave them out with --no-plots") from error


def draw(spec: StudySpec, threshold: float, cells: Sequence[Row], folder: Path) -> list[str]:
    """Write the pictures into ``folder`` and return their names; none without a result. Raises UsageError without matplotlib."""
    check_matplotlib()
    groups = {c.name: [cell for cell in cells if cell["condition"] == c.name] for c in spec.conditions}
    groups = {name: group for name, group in groups.items() if group}
    if not groups:
        return []
    styles = {c.name: _style(c) for c in spec.conditions}
    conditions = summarise(spec, threshold, cells)["conditions"]
    conditions = [condition for condition in conditions if condition["seeds"]]
    pictures: dict[str, Callable[[Any], None]] = {
        "coverage_by_layer.svg": lambda axes: _by_layer(axes, conditions, styles),
        "coverage_over_training.svg": lambda axes: _over_training(axes, groups, styles, "uncovered_fraction"),
        "uncertain_over_training.svg": lambda axes: _over_training(axes, groups, styles, "uncertain_fraction"),
        "slots_against_coverage.svg": lambda axes: _slots(axes, groups, styles),
        "threshold_against_margins.svg": lambda axes: _margins(axes, groups, threshold),
    }
    for name, paint in pictures.items():
        _save(paint, folder / name)
    return list(pictures)


def _style(condition: Condition) -> dict[str, Any]:
    """Return what a condition's line looks like, the same in every picture and study; what is no core condition is dashed."""
    number = (CORE + EXTRA).index(condition)
    return {"color": _COLOURS[number], "marker": _MARKERS[number], "linestyle": "-" if condition.core else "--"}


def _save(paint: Callable[[Any], None], path: Path) -> None:
    import matplotlib
    from matplotlib.figure import Figure

    # Names in the file come from this salt instead of random numbers, so that the same results give the same file.
    with matplotlib.rc_context({"svg.hashsalt": "moetriage"}):
        figure = Figure(figsize=(9, 5.5), layout="constrained")
        axes = figure.subplots()
        paint(axes)
        axes.grid(alpha=0.3)
        figure.legend(loc="outside right upper", fontsize=8, handlelength=4)
        picture = io.BytesIO()
        figure.savefig(picture, format="svg", metadata={"Date": None})
    write_whole(path, picture.getvalue())


def _by_layer(axes: Any, conditions: Sequence[Row], styles: dict[str, Any]) -> None:
    for condition in conditions:
        shares = [100 * share for share in condition["uncovered_fraction_by_layer"]]
        axes.plot(range(len(shares)), shares, label=condition["name"], **styles[condition["name"]])
    axes.set(xlabel="layer", ylabel="token visits without an expert, % (held-out, mean over seeds)")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_title("Which layers leave tokens without an expert?")


_CURVES = {
    "uncovered_fraction": ("token visits without an expert", "How coverage develops in training (line: mean, shade: range of seeds)"),
    "uncertain_fraction": ("uncertain token visits", "How many tokens are uncertain in training? (line: mean, shade: range of seeds)"),
}


def _over_training(axes: Any, groups: Cells, styles: dict[str, Any], quantity: str) -> None:
    """Draw each condition's mean over seeds, and behind the two that the study is about the range of their seeds."""
    what, title = _CURVES[quantity]
    highest = 0.0
    for name, group in groups.items():
        steps = group[0]["training"]["step"]
        curves = [[100 * value for value in cell["training"][quantity]] for cell in group]
        highest = max(highest, *(max(curve) for curve in curves))
        axes.plot(steps, mean_rows(curves), label=name, markevery=0.1, markersize=5, **styles[name])
        if name in (CAPSEL, BASELINE):
            low, high = ([end(column) for column in zip(*curves, strict=True)] for end in (min, max))
            axes.fill_between(steps, low, high, color=styles[name]["color"], alpha=0.12, linewidth=0)
    axes.set(xlabel="step", ylabel=f"{what}, %", ylim=(-0.02 * highest, 1.05 * highest or 1))
    axes.set_title(title)


def _slots(axes: Any, groups: Cells, styles: dict[str, Any]) -> None:
    for name, group in groups.items():
        colour = styles[name]["color"]
        uncovered = [100 * _number("uncovered_fraction", cell) for cell in group]
        for kind, face in (("requested_slots", "none"), ("accepted_slots", colour)):
            slots = [_number(kind, cell) / cell["final"]["visits"] for cell in group]
            label = name if kind == "accepted_slots" else None
            axes.scatter(slots, uncovered, facecolors=face, edgecolors=colour, label=label, marker=styles[name]["marker"])
    axes.set(xlabel="slots a token visit: requested (hollow), accepted (filled)", ylabel="token visits without an expert, %")
    axes.set_title("What coverage costs (one mark a seed)")


def _number(metric: str, cell: Row) -> float:
    value = METRICS[metric](cell)
    assert value is not None
    return value


def _margins(axes: Any, groups: Cells, threshold: float) -> None:
    """Draw the margins' quantiles of the condition whose threshold is fixed, and what the one that follows them used."""
    name = next(n for n in (CAPSEL, *groups) if n in groups)
    training = [cell["training"] for cell in groups[name]]
    steps = training[0]["step"]
    low, quarter, median, three, high = (mean_rows([[q[i] for q in t["margin_quantiles"]] for t in training]) for i in range(5))
    axes.fill_between(
        steps, low, high, color="#0072B2", alpha=0.12, label=f"margins of {name}: {_QUANTILE_NAMES[0]} to {_QUANTILE_NAMES[4]}"
    )
    axes.fill_between(steps, quarter, three, color="#0072B2", alpha=0.25, label=f"{_QUANTILE_NAMES[1]} to {_QUANTILE_NAMES[3]}")
    axes.plot(steps, median, color="#0072B2", label=_QUANTILE_NAMES[2])
    axes.axhline(threshold, color="black", linestyle="--", label=f"fixed threshold {threshold:.5f}")
    online = groups.get(_ONLINE)
    if online:
        axes.plot(steps, mean_rows([cell["training"]["threshold"] for cell in online]), color="#D55E00", label=f"threshold of {ONLINE}")
    axes.set(xlabel="step", ylabel="difference of the two best router probabilities", yscale="log")
    axes.set_title("Does the threshold still mean what it meant at the start?")
