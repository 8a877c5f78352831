"""The policies whose requests are known before anybody is served: first choices, then second ones, heard in a fixed order.

Comes in: choices and a capacity. Goes out: a plan. Deliberately unknown here: margins. top2 is GShard's order (Lepikhin et al. 2020,
algorithm 1, without its random second choice), bpr is batch-prioritised routing (Riquelme et al. 2021, section 4).

Legend: T tokens, R requests (T first choices, then T second ones).
"""

from __future__ import annotations

import torch
from torch import Tensor

from moetriage.train.passes import SCORE_BITS, Choices, largest_first, queues
from moetriage.train.plan import Plan, make_plan

ONE_CHOICE = ("top1", "bpr-top1")
TWO_CHOICES = ("top2", "bpr-top2", "fixed-top2")


def admit_one_choice(choices: Choices, policy: str, capacity: int) -> Plan:
    """Let every token ask its best expert alone, in the order of position (top1) or of score (bpr-top1)."""
    if policy == "top1":
        priority_T, bits = torch.zeros_like(choices.first_T), 0
    else:
        priority_T, bits = largest_first(choices.best_T), SCORE_BITS
    (queue,) = queues([(choices.first_T, priority_T)], choices.num_experts, bits)
    slot_T, _ = queue.grant(choices.asks_T, choices.no_load(), capacity)
    nobody_T = torch.zeros_like(choices.asks_T)
    return make_plan(choices, slot_T, torch.full_like(slot_T, -1), nobody_T, nobody_T, capacity)


def admit_two_choices(choices: Choices, policy: str, capacity: int) -> Plan:
    """Let every token ask both, all first choices before any second one.

    In the order of position (top2), of the token's best score (bpr-top2), or of the score that it asks with (fixed-top2).
    """
    expert_R = torch.cat((choices.first_T, choices.second_T))
    priority_R, bits = _priorities(choices, policy)
    # A queue of both at once: within an expert, whatever has a first choice comes before whatever has a second one.
    (queue,) = queues([(expert_R, priority_R)], choices.num_experts, bits)
    slot_R, _ = queue.grant(torch.cat((choices.asks_T, choices.asks_second_T)), choices.no_load(), capacity)
    first_T, second_T = slot_R.chunk(2)
    refused_T = first_T < 0
    return make_plan(choices, first_T, second_T, choices.asks_second_T & refused_T, choices.asks_second_T & ~refused_T, capacity)


def _priorities(choices: Choices, policy: str) -> tuple[Tensor, int]:
    """Return the priority of each request and its width in bits."""
    if policy == "top2":  # first choices come before second ones, and positions in their order, by the index of the request
        return torch.zeros_like(choices.first_T).repeat(2), 0
    by_best_T = largest_first(choices.best_T)
    by_second_T = by_best_T if policy == "bpr-top2" else largest_first(choices.rest_T)
    return torch.cat((by_best_T, by_second_T + (1 << SCORE_BITS))), SCORE_BITS + 1
