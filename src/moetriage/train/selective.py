"""CapSel-2, its ablations and its augmenting variant: first choices, then rescue of who was refused, then second experts for the uncertain.

Comes in: choices, a capacity, a margin threshold. Goes out: a plan. Deliberately unknown here: where the threshold comes from.
docs/capacity.md defines the passes.

Legend: T tokens, E experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moetriage.train.augment import Queues, Slots, augment
from moetriage.train.passes import SCORE_BITS, Choices, Queue, largest_first, queue, smallest_first
from moetriage.train.plan import Plan, make_plan


def admit_selective(choices: Choices, policy: str, capacity: int, threshold: float | Tensor | None) -> Plan:
    """Run the passes of ``policy``. ``threshold`` may be None for ``primary+rescue``, which has no optional pass."""
    by_score = queue(choices.first_T, choices.num_experts, largest_first(choices.best_T))
    first_T, load_E = by_score.grant(choices.asks_T, choices.no_load(), capacity)
    seconds = _second_choices(choices, first_T)

    nobody_T = torch.zeros_like(choices.asks_T)
    rescue_T = nobody_T if policy == "primary+optional" else choices.asks_second_T & (first_T < 0)
    optional_T = nobody_T if threshold is None else choices.asks_second_T & (first_T >= 0) & (choices.margin_T <= threshold)
    if policy == "augment":
        rescued_T, load_E = seconds.grant(rescue_T, load_E, capacity)
        by_margin = queue(choices.first_T, choices.num_experts, smallest_first(choices.margin_T))
        slots = augment(choices, Queues(by_score, by_margin, seconds), Slots(first_T, rescued_T, load_E), capacity)
        optional_T = optional_T & (slots.second_T < 0)  # who was moved to its second choice has it already
        extra_T, _ = seconds.grant(optional_T, slots.load_E, capacity)
        return make_plan(choices, slots.first_T, torch.maximum(slots.second_T, extra_T), rescue_T, optional_T, capacity)
    # One queue for both passes: it hears every rescue first.
    second_T, _ = seconds.grant(rescue_T | optional_T, load_E, capacity)
    return make_plan(choices, first_T, second_T, rescue_T, optional_T, capacity)


def _second_choices(choices: Choices, first_slot_T: Tensor) -> Queue:
    """Line up second choices: of refused tokens by score, then of served ones by smallest margin."""
    rescue_T, optional_T = largest_first(choices.rest_T), smallest_first(choices.margin_T) + (1 << SCORE_BITS)
    return queue(choices.second_T, choices.num_experts, torch.where(first_slot_T < 0, rescue_T, optional_T), SCORE_BITS + 1)
