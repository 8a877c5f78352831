"""Which tokens which experts take when each has room for so many: the admission policies, as one function from probabilities to a plan.

Comes in: router probabilities, a policy, a capacity. Goes out: a ``Plan``. Deliberately unknown here: layers, gates and gradients (a plan
is integers, and gates are the caller's, gathered from its own probabilities). docs/capacity.md defines every policy.

Legend: T tokens, E experts, K = 2 choices.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moetriage.errors import UsageError
from moetriage.train.causal import admit_causal
from moetriage.train.ordered import admit_ordered
from moetriage.train.passes import Choices, two_best
from moetriage.train.plan import NONE, OPTIONAL, PRIMARY, RESCUE, Plan
from moetriage.train.policies import CAUSAL, ORDERED, POLICIES, THRESHOLD_POLICIES, capacity
from moetriage.train.selective import admit_selective

__all__ = ["NONE", "OPTIONAL", "POLICIES", "PRIMARY", "RESCUE", "THRESHOLD_POLICIES", "Plan", "admit", "capacity"]

#: More tokens than any batch has; times a position it is still an int64.
MAX_CAPACITY = 1 << 40


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
    """Decide which of their two best experts the tokens get. Ties go to the lower token, and among experts to the lower expert index.

    probs_TE: (T, E) router probabilities of any float type, compared as float32.
    policy: one of POLICIES.
    capacity: tokens that an expert takes in all passes together, from 0 to 2**40; ``capacity()`` computes it.
    margin_threshold: float or 0-d tensor; a served token asks for a second expert if its two best probabilities differ by at most this. The
        policies in THRESHOLD_POLICIES need it.
    mask_T: (T,) bool, True = a real token; the others ask for nothing and take no capacity.
    sequence_length: for ``capsel2-causal`` alone: tokens are so many positions of one sequence, then of the next.
    check_values: look for NaN, infinite and negative probabilities. Waits for the device; skipped while compiling.

    Takes no gradient and gives none. Raises UsageError.
    """
    _check(probs_TE, policy, capacity, mask_T)
    _check_settings(len(probs_TE), policy, margin_threshold, sequence_length)
    choices = two_best(probs_TE, mask_T)
    if check_values and not torch.compiler.is_compiling():
        _check_values(choices)
    if policy in ORDERED:
        return admit_ordered(choices, policy, capacity)
    if policy == CAUSAL:
        assert margin_threshold is not None
        assert sequence_length is not None
        return admit_causal(choices, capacity, margin_threshold, sequence_length)
    return admit_selective(choices, policy, capacity, margin_threshold if policy in THRESHOLD_POLICIES else None)


def _check(probs_TE: Tensor, policy: str, capacity: int, mask_T: Tensor | None) -> None:
    if policy not in POLICIES:
        raise UsageError(f"unknown admission policy {policy!r}: use one of {', '.join(POLICIES)}")
    shape = tuple(probs_TE.shape)
    if len(shape) != 2 or shape[1] < 1 or not probs_TE.is_floating_point():
        raise UsageError(f"router probabilities of shape {shape}, {probs_TE.dtype}: must be (tokens, experts), of a float type")
    # 1.25 is a factor: capacity() makes a number of tokens of it.
    if not isinstance(capacity, int) or isinstance(capacity, bool) or not 0 <= capacity <= MAX_CAPACITY:
        raise UsageError(f"capacity {capacity!r}: must be an int, 0 to 2**40 tokens per expert; capacity(factor, ...) computes it")
    if mask_T is not None and (mask_T.shape != probs_TE.shape[:1] or mask_T.dtype != torch.bool):
        raise UsageError(f"mask of shape {tuple(mask_T.shape)}, {mask_T.dtype}: must be bool, one for each of {shape[0]} tokens")


def _check_settings(n_tokens: int, policy: str, threshold: float | Tensor | None, sequence_length: int | None) -> None:
    if policy in THRESHOLD_POLICIES:
        if threshold is None:
            raise UsageError(f"policy {policy} gives second experts by margin: it needs margin_threshold")
        # math.isnan does not compile for a number that the graph takes as an input.
        if not isinstance(threshold, Tensor) and (threshold != threshold or threshold < 0):
            raise UsageError(f"margin_threshold {threshold}: must be a number from 0 up; 0 gives second experts at ties alone")
    if policy == CAUSAL and (sequence_length is None or sequence_length < 1 or n_tokens % sequence_length):
        raise UsageError(f"policy {policy}, {n_tokens} tokens: needs sequence_length, which must divide them; got {sequence_length}")


def _check_values(choices: Choices) -> None:
    # NaN and infinity come out of a maximum, so the two best tell of any. A negative value further down changes nothing.
    # With one expert there is no second value to look at.
    good_T = (choices.rest_T >= 0) & (choices.best_T >= 0) & (choices.best_T < torch.inf)
    if not bool(good_T.all()):
        token = int((~good_T).nonzero()[0, 0])
        best, rest = float(choices.best_T[token]), float(choices.rest_T[token])
        raise UsageError(f"router probabilities of token {token}: the two largest are {best} and {rest}; must be numbers from 0 up")
