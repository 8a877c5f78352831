"""CapSel-2, its ablations and its augmenting variant: first choices, then rescue of who was refused, then second experts for the unsure.

Comes in: choices, a capacity, a margin threshold. Goes out: a plan. Deliberately unknown here: where the threshold comes from.
docs/capacity.md defines the passes.

Legend: T tokens, E experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moetriage.train.augment import Lines, Slots, augment
from moetriage.train.passes import SCORE_BITS, Choices, Queue, largest_first, queues, smallest_first
from moetriage.train.plan import Plan, make_plan

SELECTIVE = ("capsel2", "primary+rescue", "primary+optional", "capsel2-online", "augment")


def admit_selective(choices: Choices, policy: str, capacity: int, threshold: float | Tensor | None) -> Plan:
    """Run the passes of ``policy``. ``threshold`` may be None for ``primary+rescue``, which has no optional pass."""
    by_score, by_second_score, by_second_margin, *by_margin = _queues(choices, policy)
    nobody_T = torch.zeros_like(choices.asks_T)

    first_T, load_E = by_score.grant(choices.asks_T, choices.no_load(), capacity)
    refused_T = choices.asks_second_T & (first_T < 0)
    served_T = choices.asks_second_T & (first_T >= 0)

    rescue_T = nobody_T if policy == "primary+optional" else refused_T
    second_T, load_E = by_second_score.grant(rescue_T, load_E, capacity)
    if policy == "augment":
        lines = Lines(by_score, by_second_score, by_margin[0], by_second_margin)
        slots = augment(choices, lines, Slots(first_T, second_T, load_E), capacity)
        first_T, second_T, load_E = slots.first_T, slots.second_T, slots.load_E

    # Who was moved to its second choice by an augmenting step has it already.
    optional_T = nobody_T if threshold is None else served_T & (second_T < 0) & (choices.margin_T <= threshold)
    extra_T, _ = by_second_margin.grant(optional_T, load_E, capacity)
    return make_plan(choices, first_T, torch.maximum(second_T, extra_T), rescue_T, optional_T, capacity)


def _queues(choices: Choices, policy: str) -> list[Queue]:
    by_margin_T = smallest_first(choices.margin_T)
    requests = [
        (choices.first_T, largest_first(choices.best_T)),
        (choices.second_T, largest_first(choices.rest_T)),
        (choices.second_T, by_margin_T),
    ]
    if policy == "augment":
        requests.append((choices.first_T, by_margin_T))
    return queues(requests, choices.num_experts, SCORE_BITS)
