"""What routing did, counted: outputs of the model in, JSON-ready numbers out.

Counting waits for the device, so it is done outside of what is timed. Knows no model and no data.

Legend: T tokens. L layers. A visit is one token at one MoE layer; the three passes are primary, rescue and optional.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moetriage.train.lm import LMOutput

Row = dict[str, Any]
#: Which quantiles of the margins are kept.
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


def margins(output: LMOutput) -> Tensor:
    """Return the margins of all visits, layer by layer, (L * T,) float32. Every layer must have a plan."""
    return torch.cat([plan.margin_T for plan in output.plans if plan is not None])


def margin_quantiles(margins_of: Sequence[Tensor]) -> list[float]:
    """Return the ``QUANTILES`` of all these margins."""
    values = torch.cat(list(margins_of)).float()
    found: list[float] = values.quantile(torch.tensor(QUANTILES, device=values.device)).tolist()
    return found


class Counts:
    """Sums over batches. threshold: what makes a visit uncertain; None: the policy's own threshold, as the layers counted it."""

    def __init__(self, threshold: float | None) -> None:
        self._threshold = threshold
        self._margins: list[Tensor] = []
        self._by_layer: list[list[int]] = []
        self._requested, self._accepted = [0, 0, 0], [0, 0, 0]
        self._uncertain = 0

    def add(self, output: LMOutput, least_uncovered_L: Sequence[int] | None = None) -> None:
        """Count a batch. least_uncovered_L: how many visits of each layer the best assignment would have left uncovered."""
        least = [0] * len(output.stats) if least_uncovered_L is None else least_uncovered_L
        layers = [[int(s.tokens), int(s.uncovered), left] for s, left in zip(output.stats, least, strict=True)]
        self._by_layer = _sum_rows(self._by_layer, layers) if self._by_layer else layers
        for stats in output.stats:
            self._requested = _sum(self._requested, stats.requested.tolist())
            self._accepted = _sum(self._accepted, stats.accepted.tolist())
        found = margins(output)
        own = self._threshold is None
        self._uncertain += sum(int(s.uncertain) for s in output.stats) if own else int((found <= self._threshold).sum())
        self._margins.append(found)

    def as_dict(self) -> Row:
        """Return the sums."""
        visits, uncovered, least = ([layer[column] for layer in self._by_layer] for column in range(3))
        return {
            "visits": sum(visits),
            "uncovered": sum(uncovered),
            "optimum_uncovered": sum(least),
            "requested": self._requested,
            "accepted": self._accepted,
            "uncertain": self._uncertain,
            "margin_quantiles": margin_quantiles(self._margins),
            "by_layer": {"visits": visits, "uncovered": uncovered, "optimum_uncovered": least},
        }


class Curves:
    """How training went: points, each over the steps since the one before."""

    def __init__(self, threshold: float | None) -> None:
        """threshold: as for ``Counts``."""
        self._threshold = threshold
        self._points: list[Row] = []
        self._begin()

    def _begin(self) -> None:
        self._counts, self._losses = Counts(self._threshold), list[float]()

    def add(self, output: LMOutput, loss: float) -> None:
        """Take a step into the next point."""
        self._counts.add(output)
        self._losses.append(loss)

    def record(self, step: int, threshold: float) -> None:
        """End a point. threshold: what the policy compares margins with from here on."""
        counts = self._counts.as_dict()
        layers = counts["by_layer"]
        self._points.append(
            {
                "step": step,
                "loss": statistics.fmean(self._losses),
                "uncovered_fraction": counts["uncovered"] / counts["visits"],
                "uncovered_fraction_by_layer": [u / v for u, v in zip(layers["uncovered"], layers["visits"], strict=True)],
                "uncertain_fraction": counts["uncertain"] / counts["visits"],
                "requested": counts["requested"],
                "accepted": counts["accepted"],
                "threshold": threshold,
                "margin_quantiles": counts["margin_quantiles"],
            }
        )
        self._begin()

    def as_dict(self) -> Row:
        """Return each quantity's points in one list."""
        return {name: [point[name] for point in self._points] for name in self._points[0]}


def _sum(a: list[int], b: list[int]) -> list[int]:
    return [x + y for x, y in zip(a, b, strict=True)]


def _sum_rows(a: list[list[int]], b: list[list[int]]) -> list[list[int]]:
    return [_sum(x, y) for x, y in zip(a, b, strict=True)]
