"""Write down what a study found: Markdown for people, JSON for programs.

In: the dict of ``summary.summarise``. Out: two texts. Every statement follows from the numbers; nothing is said that they do not show.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

from moetriage.study.reference import RULE, SOURCE, Verdict
from moetriage.study.spec import BASELINE
from moetriage.study.summary import CAPSEL
from moetriage.train.policies import ONLINE

Row = dict[str, Any]

_CAVEATS = (
    "Score-ordered admission is not causal: whether a token is served depends on the other tokens of its batch, later ones too. So the "
    'loss with drops is not that of a text being generated, and the column "loss, drop-free" gives the one without any capacity limit.',
    "A visit is one token at one MoE layer; an uncovered one gets nothing from the layer's experts and goes on with its residual.",
    "Regret is what a policy leaves uncovered beyond the least that any assignment over each token's two best experts could, given the "
    "same router probabilities and capacity (maximum flow). Each condition has trained routers of its own, so the bounds differ, too.",
    "Fixed top-2 has no rescue pass; its second requests of rejected tokens are counted as rescue, all others as optional.",
)


_INCOMPARABLE = "This study has other settings than the document's, so its figures are not set beside them; `--preset full` has the same."


def markdown(summary: Row, *, plots: Sequence[str] = ()) -> str:
    """Return the report. plots: names of pictures that lie beside it."""
    parts = [
        "# Admission policies under one capacity: the matched study",
        *_in_short(summary),
        _design(summary),
        "## Coverage and slots",
        "Mean ± population standard deviation over seeds, on held-out text with the policy's own drops. Bold: the document's conditions.",
        coverage_table(summary).markdown(),
        "## Slots by pass",
        _by_condition(summary, _PASSES).markdown(),
        "## Loss and time",
        _by_condition(summary, _LOSS).markdown(),
        "## Over training",
        "Means over seeds of each point, which is itself a mean over the steps since the one before.",
        _training_table(summary).markdown(),
        f"## Seed by seed, against {BASELINE}",
        "Same initialisation, same batches; a negative number is better than the baseline.",
        Table(("condition", "quantity", "per seed", "mean", "better in"), _paired_rows(summary)).markdown(),
        "## Beside the document",
        SOURCE,
        *((RULE, reference_table(summary).markdown(), _tally(summary)) if summary["comparable"] else (_INCOMPARABLE,)),
        "## How to read it",
        *(f"- {caveat}" for caveat in _CAVEATS),
        *(f"![{name}]({name})" for name in plots),
        "## Where it ran",
        *(f"- {_environment(environment)}" for environment in summary["environments"]),
    ]
    return "\n\n".join(parts).replace("\n\n- ", "\n- ") + "\n"


@dataclass(frozen=True)
class Table:
    """Titles and rows of texts."""

    titles: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        """Return the table as Markdown; numbers stand on the right."""
        lines = [self.titles, ["---", *["---:"] * (len(self.titles) - 1)], *self.rows]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def coverage_table(summary: Row) -> Table:
    """Return coverage and slots of each condition, and the bound."""
    table = _by_condition(summary, _COVERAGE)
    return Table(table.titles, [*table.rows, *_bounds(summary)])


def short_table(summary: Row) -> Table:
    """Return what fits a terminal: coverage, slots and loss of each condition."""
    table = _by_condition(summary, _SHORT)
    return Table(table.titles, [[text.strip("*") for text in row] for row in table.rows])


def _in_short(summary: Row) -> list[str]:
    """Return one paragraph: what the document compares, here."""
    paired = summary["paired"].get(CAPSEL)
    if paired is None:
        return []
    ours, theirs = (next(c["metrics"] for c in summary["conditions"] if c["name"] == name) for name in (CAPSEL, BASELINE))
    better = {name: f"{sum(value < 0 for value in paired[name])} of {len(paired[name])} seeds" for name in ("uncovered_fraction", "loss")}
    return [
        f"In short: {CAPSEL} leaves {100 * ours['uncovered_fraction']['mean']:.2f} % of token visits without an expert, {BASELINE} "
        f"{100 * theirs['uncovered_fraction']['mean']:.2f} % (CapSel-2 is better in {better['uncovered_fraction']}), with "
        f"{100 * (ours['requested_slots']['mean'] / theirs['requested_slots']['mean'] - 1):+.1f} % requested slots. Its held-out loss "
        f"differs by {statistics.fmean(paired['loss']):+.4f} (better in {better['loss']})."
    ]


def _training_table(summary: Row) -> Table:
    """Return coverage and uncertainty at a few points of training."""
    conditions = [condition for condition in summary["conditions"] if condition["seeds"]]
    steps = conditions[0]["over_training"]["step"] if conditions else []
    points = sorted({round(part * (len(steps) - 1) / 4) for part in range(5)}) if steps else []
    titles = ["condition", "quantity", *(f"step {steps[point]:g}" for point in points)]
    rows = [
        (condition["name"], title, *(f"{100 * condition['over_training'][quantity][point]:.2f}" for point in points))
        for condition in conditions
        for quantity, title in (("uncovered_fraction", "no expert, %"), ("uncertain_fraction", "uncertain, %"))
    ]
    return Table(titles, rows)


def reference_table(summary: Row) -> Table:
    """Return the document's figures beside ours."""
    return Table(("quantity", "document", "here", "verdict"), [row["row"] for row in summary["reference"]])


def as_json(summary: Row) -> str:
    """Return the summary as JSON text."""
    return json.dumps(summary, indent=1, allow_nan=False) + "\n"


#: Columns: title, metric, scale, digits.
_Column = tuple[str, str, float, int]
_COVERAGE: tuple[_Column, ...] = (
    ("no expert, %", "uncovered_fraction", 100, 2),
    ("least possible, %", "optimum_uncovered_fraction", 100, 2),
    ("regret, points", "regret_fraction", 100, 2),
    ("assignments dropped, %", "assignment_drop_fraction", 100, 2),
    ("requested slots", "requested_slots", 1, 0),
    ("accepted slots", "accepted_slots", 1, 0),
    ("rescued, % of rejected", "rescue_fraction", 100, 2),
    ("uncertain, %", "uncertain_fraction", 100, 2),
)
#: For a terminal.
_SHORT: tuple[_Column, ...] = (_COVERAGE[0], _COVERAGE[2], _COVERAGE[4], _COVERAGE[5], ("loss, own drops", "loss", 1, 4))
_PASSES: tuple[_Column, ...] = tuple(
    (f"{name}, {kind}", f"{kind}_{name}", 1.0, 0) for name in ("primary", "rescue", "optional") for kind in ("requested", "accepted")
)
_LOSS: tuple[_Column, ...] = (
    ("loss, own drops", "loss", 1, 4),
    ("loss, drop-free", "loss_drop_free", 1, 4),
    ("seconds a step (median)", "step_seconds", 1, 3),
)


def _design(summary: Row) -> str:
    spec = summary["spec"]
    seeds = ", ".join(map(str, spec["seeds"]))
    missing = f" Not run yet: {', '.join(summary['missing'])}." if summary["missing"] else ""
    balance = f"load-balancing loss x {spec['load_balance_weight']:g}" if spec["load_balance_weight"] else "no load-balancing loss"
    return (
        f"{len(spec['conditions'])} conditions, seeds {seeds}; {spec['n_layer']} layers of width {spec['d_model']}, "
        f"{spec['num_experts']} experts, context {spec['context']}; {spec['steps']} steps of {spec['batch_size']} x {spec['context']} "
        f"tokens, {spec['heldout_batches']} held-out batches; {spec['precision']}; AdamW {spec['learning_rate']:g}, betas "
        f"{spec['betas'][0]:g} and {spec['betas'][1]:g}, weight decay {spec['weight_decay']:g}, {spec['warmup_steps']} warm-up steps, then "
        f"a cosine down to {spec['final_lr_fraction']:g} of it, gradients clipped at {spec['clip_norm']:g}; {balance}. Conditions share "
        f"data, order of batches and initialisation within a seed. The margin threshold, {summary['threshold']:.5f}, is the median margin "
        f"of {spec['calibration_batches']} batches at the first seed's initialisation, and fixed ({ONLINE} alone lets it follow "
        f"the running median).{missing}"
    )


def _by_condition(summary: Row, columns: Sequence[_Column]) -> Table:
    titles = ("condition", *(title for title, *_ in columns))
    return Table(titles, [_cells(condition, columns) for condition in summary["conditions"]])


def _cells(condition: Row, columns: Sequence[_Column]) -> tuple[str, ...]:
    name = f"**{condition['name']}**" if condition["core"] else condition["name"]
    return (name, *(_written(condition["metrics"][metric], scale, digits) for _, metric, scale, digits in columns))


def _written(spread: Row | None, scale: float, digits: int) -> str:
    if spread is None:
        return "-"
    return f"{scale * spread['mean']:,.{digits}f} ± {scale * spread['std']:,.{digits}f}"


def _bounds(summary: Row) -> list[tuple[str, ...]]:
    """Return the bound as a row: what the best assignment leaves uncovered with the routers that fixed-top2 and capsel2 trained."""
    rows = []
    for condition in summary["conditions"]:
        spread = condition["metrics"]["optimum_uncovered_fraction"]
        if condition["name"] in (BASELINE, "capsel2@1.25") and spread is not None:
            rows.append((f"*optimum, routers of {condition['name']}*", _written(spread, 100, 2), *("-",) * (len(_COVERAGE) - 1)))
    return rows


_PAIRED = {
    "uncovered_fraction": ("no expert, points", 100, 2),
    "loss": ("loss, own drops", 1, 4),
    "loss_drop_free": ("loss, drop-free", 1, 4),
}


def _paired_rows(summary: Row) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for name, differences in summary["paired"].items():
        for metric, (title, scale, digits) in _PAIRED.items():
            values = [scale * value for value in differences[metric]]
            texts = [f"{value:+.{digits}f}" for value in values]
            better = sum(value < 0 for value in values)
            mean = f"{statistics.fmean(values):+.{digits}f} ± {statistics.pstdev(values):.{digits}f}"
            rows.append((name, title, ", ".join(texts), mean, f"{better} of {len(values)}"))
    return rows


def _tally(summary: Row) -> str:
    verdicts = [row["verdict"] for row in summary["reference"]]
    counts = [f"{kind}: {verdicts.count(kind)}" for kind in get_args(Verdict) if kind in verdicts]
    return f"Of {len(verdicts)} figures, {'; '.join(counts)}."


def _environment(environment: Row) -> str:
    return "; ".join(f"{key.replace('_', ' ')} {value}" for key, value in environment.items())
