"""The two best experts of each token, and queues before the experts: what every admission policy is made of.

Comes in: router probabilities. Goes out: choices, and for each request the slot it was given. Deliberately unknown here: which passes a
policy has and in which order. Everything has a fixed shape, waits for no device and loops over neither tokens nor experts. Ranks within
experts come from one stable sort of integers; GShard (Lepikhin et al. 2020, algorithm 1) has them from sums over one-hot matrices.

Legend: T tokens, R requests (a queue's entries), E experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

#: float32 that are not negative, read as integers, need so many bits.
SCORE_BITS = 31
_LARGEST_FINITE = 0x7F7FFFFF


@dataclass(frozen=True)
class Choices:
    """Whom each token may ask.

    first_T, second_T: int64, the best expert and the best of the rest; ties go to the lower index. With one expert the second is 0, too.
    best_T, rest_T: float32, their probabilities; 0 where there is no such choice or the token is masked.
    margin_T: float32, their difference; infinite where the token is masked.
    asks_T, asks_second_T: bool, False where the token is masked, or there is no second expert.
    """

    first_T: Tensor
    second_T: Tensor
    best_T: Tensor
    rest_T: Tensor
    margin_T: Tensor
    asks_T: Tensor
    asks_second_T: Tensor
    num_experts: int

    def no_load(self) -> Tensor:
        """Return (E,) zeros: the load of empty buffers."""
        return self.first_T.new_zeros(self.num_experts)


def two_best(probs_TE: Tensor, mask_T: Tensor | None) -> Choices:
    """Return each token's two most probable experts; ``mask_T`` (bool, True = a real token) leaves the others without a request."""
    n_tokens, num_experts = probs_TE.shape
    probs_TE = probs_TE.detach()
    # 16-bit values become float32 without loss and in the same order: converting the two best alone says the same.
    if probs_TE.dtype not in (torch.bfloat16, torch.float16):
        probs_TE = probs_TE.float()
    # Two maxima: sorting the rows takes several times as long, and topk leaves ties open.
    best_T, first_T = probs_TE.max(dim=1)
    rest_T, second_T = probs_TE.scatter(1, first_T[:, None], -1.0).max(dim=1)
    asks_T = torch.ones(n_tokens, dtype=torch.bool, device=probs_TE.device) if mask_T is None else mask_T
    asks_second_T = asks_T
    best_T, rest_T = best_T.float(), rest_T.float()
    if num_experts == 1:
        rest_T, asks_second_T = torch.zeros_like(rest_T), torch.zeros_like(asks_T)
    margin_T = best_T - rest_T
    if mask_T is not None:  # also hides NaN at padding, which is nobody's fault
        best_T, rest_T, margin_T = (x.masked_fill(~mask_T, fill) for x, fill in ((best_T, 0.0), (rest_T, 0.0), (margin_T, torch.inf)))
    return Choices(first_T, second_T, best_T, rest_T, margin_T, asks_T, asks_second_T, num_experts)


def or_none(has_R: Tensor, index_R: Tensor) -> Tensor:
    """Return ``index_R`` where ``has_R``, else -1."""
    return (index_R + 1) * has_R - 1  # on a CPU in less than half the time of torch.where


def smallest_first(value_T: Tensor) -> Tensor:
    """Return int64 from 0 below 2**31 that order like these float32 values >= 0, infinity included."""
    # The bits of floats that are not negative order like integers; abs makes -0.0 equal to 0.0.
    return value_T.abs().view(torch.int32).long()


def largest_first(value_T: Tensor) -> Tensor:
    """Return int64 from 0 below 2**31 that order finite float32 values >= 0 from the largest down."""
    return _LARGEST_FINITE - smallest_first(value_T)


@dataclass(frozen=True)
class Queue:
    """Requests in front of the experts, in the order in which they are heard.

    expert_R: the expert of each request. order_R: requests by (expert, priority, index); place_R: where each is in it. start_E: (E + 1,),
    where each expert's begin.
    """

    expert_R: Tensor
    order_R: Tensor
    place_R: Tensor
    start_E: Tensor

    def ranks(self, asks_R: Tensor) -> tuple[Tensor, Tensor]:
        """Count, for each request, the ones of ``asks_R`` that its expert hears before it, and for each expert all of them."""
        before_R = self._asking_before(asks_R)
        before_E = before_R.index_select(0, self.start_E)
        return before_R.index_select(0, self.place_R) - before_E.index_select(0, self.expert_R), before_E.diff()

    def among_first(self, asks_R: Tensor, most_E: Tensor) -> Tensor:
        """Return ``ranks(asks_R)[0] < most_E[expert_R]``, in half the time: found at each expert's last one, not counted for all."""
        before_R = self._asking_before(asks_R)
        last_E = torch.searchsorted(before_R, before_R.index_select(0, self.start_E[:-1]) + most_E) - 1
        return self.place_R <= last_E.index_select(0, self.expert_R)

    def _asking_before(self, asks_R: Tensor) -> Tensor:
        """Count the ones of ``asks_R`` before each place of the order, and before its end: (R + 1,)."""
        return functional.pad(asks_R.index_select(0, self.order_R).cumsum(0), (1, 0))

    def grant(self, asks_R: Tensor, load_E: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
        """Let the requests ``asks_R`` take what room is left. Returns the slot of each, -1 for none, and the new load per expert."""
        rank_R, count_E = self.ranks(asks_R)
        slot_R = rank_R + load_E.index_select(0, self.expert_R)
        return or_none(asks_R & (slot_R < capacity), slot_R), (load_E + count_E).clamp(max=capacity)


def queue(expert_R: Tensor, num_experts: int, priority_R: Tensor | None = None, priority_bits: int = SCORE_BITS) -> Queue:
    """Line up requests before their experts, low priorities first (int64 from 0 below 2**priority_bits), by index if there is none.

    Queues are sorted one by one. One sort for all would be faster alone on a machine: from 32,768 integers on torch sorts on all threads,
    which meet for each byte of the keys. But where another process takes a processor away, that took a second instead of 1 ms.
    """
    if priority_R is None:
        key_R, priority_bits = expert_R, 0
    else:
        key_R = (expert_R << priority_bits) + priority_R
    bits = num_experts.bit_length() + priority_bits
    dtype = torch.int16 if bits < 16 else torch.int32 if bits < 32 else torch.int64  # short keys mean fewer such meetings
    sorted_R, order_R = key_R.to(dtype).sort(stable=True)
    first_key_E = torch.arange(num_experts + 1, device=expert_R.device) << priority_bits
    place_R = torch.empty_like(order_R).scatter(0, order_R, torch.arange(len(order_R), device=order_R.device))
    return Queue(expert_R, order_R, place_R, torch.searchsorted(sorted_R, first_key_E.to(dtype)))
