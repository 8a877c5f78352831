"""What the document that the study repeats reports, and whether our numbers say the same.

In: our figures, as mean and spread over seeds. Out: one comparison a figure, judged by a rule that was fixed before any run. The figures
are those of "Reducing dropped tokens in a small MoE model" (one GPU, three seeds); nothing here is tuned to meet them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["agrees", "same direction, other size", "disagrees", "not measured"]
#: A figure agrees if the document's lies within so many population standard deviations of ours.
SPREADS = 2.0
#: The threshold is measured once, so it has no spread; this is how far off it may be.
THRESHOLD_TOLERANCE = 0.1
SOURCE = 'The document is "Reducing dropped tokens in a small MoE model", one GPU, three seeds; its code is gpt2-nano-moe on GitHub.'
RULE = (
    f"A figure agrees if the document's lies within {SPREADS:g} population standard deviations (over our seeds) of our mean; the "
    f"threshold, which has no spread, if it is within {100 * THRESHOLD_TOLERANCE:g} %; a count of seeds if it is the same share. Where "
    "that fails, a difference of the same sign is said to go in the same direction."
)


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One figure of the document. ``signed``: a difference, whose sign means something. ``scale``, ``unit``: how it is written."""

    key: str
    text: str
    value: float
    unit: str = ""
    scale: float = 1.0
    digits: int = 2
    signed: bool = False


FIGURES = (
    Figure(key="threshold", text="margin threshold", value=0.03658, digits=5),
    Figure(key="fixed_uncovered", text="token visits without an expert, fixed top-2", value=0.1384, unit=" %", scale=100),
    Figure(key="capsel_uncovered", text="token visits without an expert, CapSel-2", value=0.0809, unit=" %", scale=100),
    Figure(key="uncovered_difference", text="the difference between them", value=-0.0574, unit=" points", scale=100, signed=True),
    Figure(
        key="requested_change",
        text="requested slots, CapSel-2 against fixed top-2",
        value=-0.154,
        unit=" %",
        scale=100,
        digits=1,
        signed=True,
    ),
    Figure(
        key="accepted_change",
        text="accepted slots, CapSel-2 against fixed top-2",
        value=-0.041,
        unit=" %",
        scale=100,
        digits=1,
        signed=True,
    ),
    Figure(key="rescue_rate", text="rejected first choices that CapSel-2 rescues", value=0.5827, unit=" %", scale=100),
    Figure(key="uncertain", text="uncertain tokens in the last evaluation", value=0.6586, unit=" %", scale=100),
    Figure(key="loss_difference", text="held-out cross entropy, CapSel-2 minus fixed top-2", value=-0.0089, digits=4, signed=True),
    Figure(key="seeds_without_gain", text="share of seeds without a gain in coverage", value=1 / 3, unit=" %", scale=100, digits=0),
)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A figure beside ours; ``std`` is the population standard deviation over seeds, None where there is no spread to speak of."""

    figure: Figure
    mean: float | None
    std: float | None
    verdict: Verdict

    def row(self) -> tuple[str, str, str, str]:
        """Return the texts of a table's row: quantity, document, here, verdict."""
        here = "-" if self.mean is None else self._written(self.mean)
        if self.std is not None:
            here += f" ± {self.figure.scale * self.std:.{self.figure.digits}f}"
        return (self.figure.text, self._written(self.figure.value), here, self.verdict)

    def _written(self, value: float) -> str:
        sign = "+" if self.figure.signed else ""
        return f"{self.figure.scale * value:{sign}.{self.figure.digits}f}{self.figure.unit}"


def compare(figure: Figure, mean: float | None, std: float | None) -> Comparison:
    """Judge one figure by ``RULE``."""
    return Comparison(figure=figure, mean=mean, std=std, verdict=_verdict(figure, mean, std))


def _verdict(figure: Figure, mean: float | None, std: float | None) -> Verdict:
    if mean is None:
        return "not measured"
    tolerance = THRESHOLD_TOLERANCE * figure.value if figure.key == "threshold" else SPREADS * (std or 0.0)
    # Shares of seeds are compared as they are; the last bits of 1 - 2 / 3 are not a disagreement.
    if abs(mean - figure.value) <= tolerance + 1e-9:
        return "agrees"
    return "same direction, other size" if figure.signed and mean * figure.value > 0 else "disagrees"
