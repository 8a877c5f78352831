"""CapSel-2 in the order of time: within a sequence, no token's admission depends on later tokens.

Comes in: choices, a capacity, a margin threshold, the length of the sequences. Goes out: a plan. Deliberately unknown here: scores beyond
the two best. docs/capacity.md gives the definition, and why the rounds below end.

Legend: T tokens = sequences x positions, R = 2T requests (first choices, then second ones), E experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from moetriage.train.fixpoint import fixpoint
from moetriage.train.passes import Choices, or_none, queue
from moetriage.train.plan import Plan, make_plan


def admit_causal(choices: Choices, capacity: int, threshold: float | Tensor, sequence_length: int) -> Plan:
    """Serve the tokens one after another, by position, then by sequence; each asks for its rescue or its second expert at once.

    A served token gets its second expert only while the tokens that named that expert so far, this one included, are no more than the
    capacity that it has accrued: capacity * (position + 1) / sequence_length. So early second experts do not starve later first choices. A
    token names its first choice, and its second one if it is uncertain.
    """
    uncertain_T = choices.asks_second_T & (choices.margin_T <= threshold)
    stream = _stream(choices, uncertain_T, capacity, sequence_length)
    full_from_E = choices.no_load()
    if capacity > 0:
        full_from_E = fixpoint(lambda full_from_E: stream.full_from(full_from_E, capacity), torch.full_like(full_from_E, stream.never))
    first_T, second_T = stream.slots(full_from_E, capacity).chunk(2)
    refused_T = first_T < 0
    return make_plan(choices, first_T, second_T, choices.asks_second_T & refused_T, uncertain_T & ~refused_T, capacity)


@dataclass(frozen=True)
class _Stream:
    """All requests, by expert, then by time. That an expert is full from some time on, for good, is all the state that serving has.

    always_R: takes a place if there is one, whatever happened before. late_R: only as a rescue, once the token's first choice is full.
    first_R: that first choice. start_E: (E + 1,), where each expert's requests begin. order_R: the request's index, to go back.
    """

    expert_R: Tensor
    first_R: Tensor
    time_R: Tensor
    always_R: Tensor
    late_R: Tensor
    order_R: Tensor
    start_E: Tensor

    @property
    def never(self) -> int:
        """A time after all."""
        return len(self.time_R) // 2

    def _takes(self, full_from_E: Tensor) -> tuple[Tensor, Tensor]:
        """Return which requests take a place if there is one, (R,) bool, and how many come before each of them and the end, (R + 1,)."""
        takes_R = self.always_R | (self.late_R & (self.time_R >= full_from_E.index_select(0, self.first_R)))
        return takes_R, functional.pad(takes_R.cumsum(0), (1, 0))

    def full_from(self, full_from_E: Tensor, capacity: int) -> Tensor:
        """Return from when on each expert is full if those others are full from ``full_from_E`` on: right after its last place is taken."""
        _, before_R = self._takes(full_from_E)
        last_E = torch.searchsorted(before_R, before_R.index_select(0, self.start_E[:-1]) + capacity) - 1
        fills_E = last_E < self.start_E[1:]
        time_E = functional.pad(self.time_R, (0, 1)).index_select(0, torch.where(fills_E, last_E, 0))
        return torch.where(fills_E, time_E + 1, self.never)

    def slots(self, full_from_E: Tensor, capacity: int) -> Tensor:
        """Return the slot of each request in the order in which they were made, -1 for none."""
        takes_R, before_R = self._takes(full_from_E)
        slot_R = before_R[:-1] - before_R.index_select(0, self.start_E).index_select(0, self.expert_R)
        slot_R = or_none(takes_R & (slot_R < capacity), slot_R)
        return torch.empty_like(slot_R).scatter(0, self.order_R, slot_R)


def _stream(choices: Choices, uncertain_T: Tensor, capacity: int, sequence_length: int) -> _Stream:
    n_tokens = len(uncertain_T)
    index_T = torch.arange(n_tokens, device=uncertain_T.device)
    position_T = index_T % sequence_length
    time_T = position_T * (n_tokens // sequence_length) + index_T // sequence_length
    expert_R = torch.cat((choices.first_T, choices.second_T))
    requests = queue(expert_R, choices.num_experts, time_T.repeat(2), n_tokens.bit_length())

    # Who names an expert does not depend on who was refused. So an expert that fills earlier never makes another one fill later.
    named_before_R, _ = requests.ranks(torch.cat((choices.asks_T, uncertain_T)))
    in_share_T = (named_before_R[n_tokens:] + 1) * sequence_length <= (position_T + 1) * capacity
    always_T = uncertain_T & in_share_T
    late_R = torch.cat((torch.zeros_like(always_T), choices.asks_second_T & ~always_T))

    def by_expert_and_time(x_R: Tensor) -> Tensor:
        return x_R.index_select(0, requests.order_R)

    return _Stream(
        expert_R=by_expert_and_time(expert_R),
        first_R=by_expert_and_time(choices.first_T.repeat(2)),
        time_R=by_expert_and_time(time_T.repeat(2)),
        always_R=by_expert_and_time(torch.cat((choices.asks_T, always_T))),
        late_R=by_expert_and_time(late_R),
        order_R=requests.order_R,
        start_E=requests.start_E,
    )
