"""What an admission policy decided, in one frozen record that dispatch, combine and the metrics read.

Comes in: slots per choice and who asked in which pass. Goes out: a ``Plan``. Deliberately unknown here: how it was decided.

Legend: T tokens, K = 2 choices.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moetriage.train.passes import Choices, or_none

NONE, PRIMARY, RESCUE, OPTIONAL = 0, 1, 2, 3


@dataclass(frozen=True)
class Plan:
    """What was granted. Column 0 belongs to a token's first choice, column 1 to its second.

    expert_TK: (T, 2) int64, -1 where nothing was granted.
    slot_TK: (T, 2) int64, position in the expert's buffer: below the capacity, each once, without gaps; -1 where nothing was granted.
    pass_TK: (T, 2) int8, the pass that granted it: 0 none, 1 primary, 2 rescue, 3 optional.
    margin_T: (T,) float32, difference of the two best probabilities; infinite where the token is masked.
    requested, accepted: (3,) int64, counts of the primary, rescue and optional pass. ``requested[0]`` is the number of unmasked tokens,
    and ``accepted[p - 1]`` that of entries p in ``pass_TK``.
    """

    expert_TK: Tensor
    slot_TK: Tensor
    pass_TK: Tensor
    margin_T: Tensor
    requested: Tensor
    accepted: Tensor
    capacity: int

    @property
    def room(self) -> int:
        """Rows of an expert's buffer: never more than all tokens, and one at least, which keeps the graph whole without any capacity."""
        return max(1, min(self.capacity, len(self.slot_TK)))

    @property
    def covered_T(self) -> Tensor:
        """(T,) bool: the token has at least one expert. A masked token never has."""
        return (self.slot_TK >= 0).any(dim=1)


def make_plan(choices: Choices, slot_first_T: Tensor, slot_second_T: Tensor, rescue_T: Tensor, optional_T: Tensor, capacity: int) -> Plan:
    """Return the plan of these slots (-1 for none).

    rescue_T, optional_T: bool, who asked in these passes. Who asked for rescue and holds the first choice got it by way of rescue; a second
    choice that nobody asked for is a primary admission that moved there. Only the policy ``augment`` has either.
    """
    has_first_T, has_second_T = slot_first_T >= 0, slot_second_T >= 0
    rescued_T, has_optional_T = (has_first_T | has_second_T) & rescue_T, has_second_T & optional_T
    pass_first_T = has_first_T * (rescue_T.to(torch.int8) + PRIMARY)
    pass_second_T = has_second_T * (rescue_T.to(torch.int8) + (optional_T.to(torch.int8) * 2 + PRIMARY))
    rescued, optional = rescued_T.sum(), has_optional_T.sum()
    return Plan(
        expert_TK=torch.stack((or_none(has_first_T, choices.first_T), or_none(has_second_T, choices.second_T)), 1),
        slot_TK=torch.stack((slot_first_T, slot_second_T), 1),
        pass_TK=torch.stack((pass_first_T, pass_second_T), 1),
        margin_T=choices.margin_T,
        requested=torch.stack((choices.asks_T.sum(), rescue_T.sum(), optional_T.sum())),
        accepted=torch.stack((has_first_T.sum() + has_second_T.sum() - rescued - optional, rescued, optional)),
        capacity=capacity,
    )
