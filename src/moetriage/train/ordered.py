"""The policies that hear every first choice, then every second one, in an order that depends on nobody's fate.

Comes in: choices and a capacity. Goes out: a plan. Deliberately unknown here: margins. top2 is GShard's order (Lepikhin et al. 2020,
algorithm 1, without its random second choice), bpr is batch-prioritised routing (Riquelme et al. 2021, section 4).

Legend: T tokens, E experts.
"""

from __future__ import annotations

import torch

from moetriage.train.passes import Choices, largest_first, queue
from moetriage.train.plan import Plan, make_plan
from moetriage.train.policies import ORDERED


def admit_ordered(choices: Choices, policy: str, capacity: int) -> Plan:
    """Let every token ask its best expert, then, if the policy has second choices, every token its second one."""
    priorities = [None if name is None else largest_first(getattr(choices, name)) for name in ORDERED[policy]]
    first_T, load_E = queue(choices.first_T, choices.num_experts, priorities[0]).grant(choices.asks_T, choices.no_load(), capacity)
    if len(priorities) == 1:
        nobody_T = torch.zeros_like(choices.asks_T)
        return make_plan(choices, first_T, torch.full_like(first_T, -1), nobody_T, nobody_T, capacity)
    second_T, _ = queue(choices.second_T, choices.num_experts, priorities[1]).grant(choices.asks_second_T, load_E, capacity)
    refused_T = first_T < 0
    return make_plan(choices, first_T, second_T, choices.asks_second_T & refused_T, choices.asks_second_T & ~refused_T, capacity)
