"""The two best experts of each token, and one pass of requests for room in the experts: what every admission policy is made of.

Comes in: router probabilities. Goes out: choices, and for each request the slot it was given. Deliberately unknown here: which passes a
policy has and in which order. Everything has a fixed shape, synchronises with no host and loops over neither tokens nor experts.

Legend: T tokens, E experts, K = 2 choices.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

#: Bits of the largest finite float32; above every finite priority.
_LARGEST_BITS = 0x7F7FFFFF


@dataclass(frozen=True)
class Choices:
    """Whom each token may ask.

    expert_TK: (T, 2) int64, the best expert and the best of the rest; ties go to the lower index. With one expert the second is 0, too.
    score_TK: (T, 2) float32, their probabilities; 0 where there is no choice or the token is masked.
    margin_T: (T,) float32, their difference; infinite where the token is masked.
    asks_TK: (T, 2) bool, False where the token is masked or there is no such expert.
    """

    expert_TK: Tensor
    score_TK: Tensor
    margin_T: Tensor
    asks_TK: Tensor
    num_experts: int


def two_best(probs_TE: Tensor, mask_T: Tensor | None) -> Choices:
    """Return each token's two most probable experts; ``mask_T`` (bool, True = a real token) leaves the others without a request."""
    n_tokens, num_experts = probs_TE.shape
    probs_TE = probs_TE.detach()
    # 16-bit values become float32 without loss and in the same order: converting the two best alone says the same.
    if probs_TE.dtype not in (torch.bfloat16, torch.float16):
        probs_TE = probs_TE.float()
    best_T, first_T = probs_TE.max(dim=1)
    rest_T, second_T = probs_TE.scatter(1, first_T[:, None], -1.0).max(dim=1)
    expert_TK = torch.stack((first_T, second_T), 1)
    asks_TK = torch.ones_like(expert_TK, dtype=torch.bool) if mask_T is None else mask_T[:, None].expand(n_tokens, 2).clone()
    if num_experts == 1:
        asks_TK[:, 1] = False
    score_TK = torch.stack((best_T, rest_T), 1).float().masked_fill(~asks_TK, 0.0)
    margin_T = score_TK[:, 0] - score_TK[:, 1]
    if mask_T is not None:
        margin_T = margin_T.masked_fill(~mask_T, torch.inf)
    return Choices(expert_TK, score_TK, margin_T, asks_TK, num_experts)


def smallest_first(value_T: Tensor) -> Tensor:
    """Return int64 in 0..2**31 that order like these float32 values >= 0, infinity included."""
    # The bits of floats that are not negative order like integers; abs makes -0.0 equal to 0.0.
    return value_T.abs().view(torch.int32).long()


def largest_first(value_T: Tensor) -> Tensor:
    """Return int64 >= 0 that order finite float32 values >= 0 from the largest down."""
    return _LARGEST_BITS - smallest_first(value_T)


def grant(expert_T: Tensor, asks_T: Tensor, priority_T: Tensor, load_E: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    """Let the requests ``asks_T`` take what room is left, those of low ``priority_T`` (then of low index) first.

    Returns the slot each was given, -1 for none, and the new load per expert: (T,) and (E,) int64.
    """
    num_experts = len(load_E)
    group_T = expert_T.masked_fill(~asks_T, num_experts)
    key_T, order_T = torch.sort((group_T << 32) | priority_T, stable=True)
    count_E = torch.zeros(num_experts + 1, dtype=torch.int64, device=expert_T.device).scatter_add(0, group_T, torch.ones_like(group_T))
    before_E = count_E.cumsum(0) - count_E
    before_E[:-1] -= load_E
    slot_sorted_T = torch.arange(len(expert_T), device=expert_T.device) - before_E[key_T >> 32]
    slot_T = torch.empty_like(slot_sorted_T).scatter(0, order_T, slot_sorted_T)
    slot_T = slot_T.masked_fill(~asks_T | (slot_T >= capacity), -1)
    return slot_T, (load_E + count_E[:-1]).clamp(max=capacity)
