"""Which tokens which experts take when each has room for so many: the admission policies, as one function from probabilities to a plan.

Comes in: router probabilities, a policy, a capacity. Goes out: a ``Plan``. Deliberately unknown here: layers, gates, gradients (a plan is
integers; gates are the caller's, gathered from its own probabilities). The capsel2 policies follow docs/capacity.md; top2 is GShard's order
(Lepikhin et al. 2020, section 2.2), bpr is batch-prioritised routing (Riquelme et al. 2021, section 4).

Legend: T tokens, E experts, K = 2 choices.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from moetriage.errors import UsageError
from moetriage.train.passes import Choices, grant, largest_first, smallest_first, two_best

POLICIES = (
    "top1",
    "top2",
    "bpr-top1",
    "bpr-top2",
    "fixed-top2",
    "capsel2",
    "primary+rescue",
    "primary+optional",
    "capsel2-online",
)
#: These have an optional pass, so they need a margin threshold.
THRESHOLD_POLICIES = frozenset({"capsel2", "primary+optional", "capsel2-online"})
NONE, PRIMARY, RESCUE, OPTIONAL = 0, 1, 2, 3
#: Above this a capacity factor is a slip: no router has ever needed a buffer of 1024 times the tokens.
MAX_CAPACITY_FACTOR = 1024


@dataclass(frozen=True)
class Plan:
    """What was granted. Column 0 belongs to a token's first choice, column 1 to its second.

    expert_TK: (T, 2) int64, -1 where nothing was granted.
    slot_TK: (T, 2) int64, position in the expert's buffer, 0 up to capacity, without gaps; -1 where nothing was granted.
    pass_TK: (T, 2) int8: 0 none, 1 primary, 2 rescue, 3 optional.
    margin_T: (T,) float32, difference of the two best probabilities; infinite where the token is masked.
    requested, accepted: (3,) int64, requests per pass: primary, rescue, optional. ``requested[0]`` is the number of unmasked tokens.
    """

    expert_TK: Tensor
    slot_TK: Tensor
    pass_TK: Tensor
    margin_T: Tensor
    requested: Tensor
    accepted: Tensor
    capacity: int

    @property
    def covered_T(self) -> Tensor:
        """(T,) bool: the token has at least one expert. A masked token never has."""
        return (self.expert_TK >= 0).any(dim=1)


def capacity(factor: float | str | Fraction, n_tokens: int, n_experts: int) -> int:
    """Return ceil(factor * n_tokens / n_experts), exactly: 1.1 is eleven tenths, not the float next to it.

    factor: above 0, at most 1024; a float counts as the decimal it is written as. n_tokens: unmasked tokens. Raises UsageError.
    """
    try:
        exact = Fraction(str(factor))
    except (ValueError, ZeroDivisionError):
        raise UsageError(f"capacity factor {factor}: must be a number above 0 and at most {MAX_CAPACITY_FACTOR}; 1.25 is usual") from None
    if not 0 < exact <= MAX_CAPACITY_FACTOR:
        raise UsageError(f"capacity factor {factor}: must be above 0 and at most {MAX_CAPACITY_FACTOR}; 1.25 is usual")
    if n_experts < 1 or n_tokens < 0:
        raise UsageError(f"capacity of {n_experts} experts for {n_tokens} tokens: needs at least 1 expert and 0 tokens")
    return -(-exact.numerator * n_tokens // (exact.denominator * n_experts))


def admit(
    probs_TE: Tensor,
    policy: str = "capsel2",
    *,
    capacity: int,
    margin_threshold: float | Tensor | None = None,
    mask_T: Tensor | None = None,
    sequence_length: int | None = None,
    check_values: bool = True,
) -> Plan:
    """Decide which of their two best experts the tokens get.

    probs_TE: (T, E) router probabilities, any float type; they are compared as float32. capacity: tokens that an expert takes, 0 up.
    margin_threshold: a second expert is asked for by a served token whose two best probabilities differ by at most this; needed by the
    policies with an optional pass. mask_T: (T,) bool, True = a real token; the others ask for nothing.
    check_values: look for NaN, infinite and negative probabilities; waits for the device, is skipped while compiling.
    Raises UsageError. Ties go to the lower token index, and among experts to the lower expert index.
    """
    _check(probs_TE, policy, capacity, margin_threshold, mask_T)
    choices = two_best(probs_TE, mask_T)
    if check_values and not torch.compiler.is_compiling():
        _check_values(choices)
    return _three_passes(choices, policy, capacity, margin_threshold)


def _three_passes(choices: Choices, policy: str, capacity: int, threshold: float | Tensor | None) -> Plan:
    """Run the policies that take first choices, then second ones, all from the same capacity."""
    first_T, second_T = choices.expert_TK.unbind(1)
    asks_T, may_ask_second_T = choices.asks_TK.unbind(1)
    load_E = torch.zeros(choices.num_experts, dtype=torch.int64, device=first_T.device)
    by_position_T = torch.zeros_like(first_T)
    by_best_T, by_second_T = largest_first(choices.score_TK[:, 0]), largest_first(choices.score_TK[:, 1])
    slot_T, load_E = grant(first_T, asks_T, by_position_T if policy in ("top1", "top2") else by_best_T, load_E, capacity)
    rescue_T = may_ask_second_T & (slot_T < 0)
    optional_T = may_ask_second_T & (slot_T >= 0)
    if policy in THRESHOLD_POLICIES:
        optional_T = optional_T & (choices.margin_T <= threshold)
    none_T = torch.zeros_like(rescue_T)
    if policy in ("top1", "bpr-top1"):
        rescue_T = optional_T = none_T
    if policy == "primary+rescue":
        optional_T = none_T
    if policy == "primary+optional":
        rescue_T = none_T
    if policy in ("top2", "bpr-top2", "fixed-top2"):
        priority_T = {"top2": by_position_T, "bpr-top2": by_best_T, "fixed-top2": by_second_T}[policy]
        second_slot_T, _ = grant(second_T, may_ask_second_T, priority_T, load_E, capacity)
    else:
        rescued_T, load_E = grant(second_T, rescue_T, by_second_T, load_E, capacity)
        second_slot_T, _ = grant(second_T, optional_T, smallest_first(choices.margin_T), load_E, capacity)
        second_slot_T = torch.maximum(rescued_T, second_slot_T)
    return _plan(choices, torch.stack((slot_T, second_slot_T), 1), rescue_T, optional_T, capacity)


def _plan(choices: Choices, slot_TK: Tensor, rescue_T: Tensor, optional_T: Tensor, capacity: int) -> Plan:
    granted_TK = slot_TK >= 0
    asked_TP = torch.stack((choices.asks_TK[:, 0], rescue_T, optional_T), 1)
    granted_TP = asked_TP & torch.cat((granted_TK[:, :1], granted_TK[:, 1:], granted_TK[:, 1:]), 1)
    return Plan(
        expert_TK=choices.expert_TK.masked_fill(~granted_TK, -1),
        slot_TK=slot_TK,
        pass_TK=torch.stack((granted_TP[:, 0] * PRIMARY, granted_TP[:, 1] * RESCUE + granted_TP[:, 2] * OPTIONAL), 1).to(torch.int8),
        margin_T=choices.margin_T,
        requested=asked_TP.sum(0),
        accepted=granted_TP.sum(0),
        capacity=capacity,
    )


def _check(probs_TE: Tensor, policy: str, capacity: int, threshold: float | Tensor | None, mask_T: Tensor | None) -> None:
    if policy not in POLICIES:
        raise UsageError(f"unknown admission policy {policy!r}: use one of {', '.join(POLICIES)}")
    if probs_TE.dim() != 2 or probs_TE.shape[1] < 1 or not probs_TE.is_floating_point():
        raise UsageError(
            f"probabilities of shape {tuple(probs_TE.shape)}, {probs_TE.dtype}: admission needs (tokens, experts) of a float type"
        )
    if capacity < 0:
        raise UsageError(f"capacity {capacity}: must be 0 or more tokens per expert")
    if mask_T is not None and (mask_T.shape != probs_TE.shape[:1] or mask_T.dtype != torch.bool):
        raise UsageError(f"mask of shape {tuple(mask_T.shape)}, {mask_T.dtype}: must be bool, one for each of the {len(probs_TE)} tokens")
    if policy in THRESHOLD_POLICIES and threshold is None:
        raise UsageError(f"policy {policy} has an optional pass: give margin_threshold")
    if isinstance(threshold, float) and threshold != threshold:
        raise UsageError("margin threshold nan: must be a number; 0 asks for second experts at exact ties only")


def _check_values(choices: Choices) -> None:
    # NaN and infinity come out of a maximum, so the two best tell of any; smaller ones that are negative change nothing.
    score_TK = choices.score_TK
    if not bool(((score_TK >= 0) & (score_TK < torch.inf)).all()):
        bad_T = ~((score_TK >= 0) & (score_TK < torch.inf)).all(1)
        token = int(bad_T.nonzero()[0, 0])
        raise UsageError(
            f"token {token}: router probabilities {score_TK[token].tolist()} of its two best experts are not numbers from 0 up"
        )
