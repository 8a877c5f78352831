"""Which admission policies there are, which of them need what, and how many tokens an expert takes. Names and numbers; needs no torch.

In: nothing, or a capacity factor. Out: names, which settings, options and messages are made of, and a capacity. Deliberately unknown here:
how a policy admits. docs/capacity.md defines every one.
"""

from __future__ import annotations

from fractions import Fraction

from moetriage.errors import UsageError

#: Instead of a policy: every token reaches all its top_k experts; no capacity, no plan.
DROPLESS = "dropless"
#: These hear every first choice, then every second one. What the two are ordered by: a field of ``passes.Choices``, or None for the
#: position. No second entry: no second choices.
ORDERED: dict[str, tuple[str | None, ...]] = {
    "top1": (None,),
    "top2": (None, None),
    "bpr-top1": ("best_T",),
    "bpr-top2": ("best_T", "best_T"),
    "fixed-top2": ("best_T", "rest_T"),
}
#: Policies that grant a token one expert alone.
ONE_EXPERT_POLICIES = tuple(policy for policy, orders in ORDERED.items() if len(orders) == 1)
#: Always two experts a token where no capacity is in the way.
TWO_EXPERT_POLICIES = tuple(policy for policy, orders in ORDERED.items() if len(orders) == 2)
#: Its threshold follows training.
ONLINE = "capsel2-online"
#: It needs the length of the sequences.
CAUSAL = "capsel2-causal"
POLICIES = (*ORDERED, "capsel2", "primary+rescue", "primary+optional", ONLINE, CAUSAL, "augment")
#: These have an optional pass, so they need a margin threshold.
THRESHOLD_POLICIES = frozenset({"capsel2", "primary+optional", ONLINE, CAUSAL, "augment"})
#: Above this a capacity factor is a slip, refused before anything of that size is allocated.
MAX_CAPACITY_FACTOR = 1024


def capacity(factor: float | str | Fraction, n_tokens: int, n_experts: int) -> int:
    """Return ceil(factor * n_tokens / n_experts), exactly: 1.1 is eleven tenths, not the float next to it.

    factor: above 0, at most 1024; a float counts as the decimal that it is written as. n_tokens: unmasked tokens. Raises UsageError.
    """
    try:
        # Of a text like 1e999999999 the exact value would take all memory; as a float it is infinite or 0.
        exact = Fraction(str(factor)) if "/" in str(factor) or 0 < float(factor) <= MAX_CAPACITY_FACTOR else Fraction(0)
    except (ValueError, TypeError, OverflowError, ZeroDivisionError):
        exact = Fraction(0)  # nan, inf, a word: refused below like any other
    if not 0 < exact <= MAX_CAPACITY_FACTOR:
        raise UsageError(f"capacity factor {factor!r}: must be a number above 0 and at most {MAX_CAPACITY_FACTOR}; 1.25 is usual")
    if isinstance(n_tokens, float) or isinstance(n_experts, float) or n_experts < 1 or n_tokens < 0:
        raise UsageError(f"capacity of {n_experts} experts for {n_tokens} tokens: needs whole numbers, of at least 1 expert and 0 tokens")
    return -(-exact.numerator * n_tokens // (exact.denominator * n_experts))
