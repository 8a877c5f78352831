"""What depends on later tokens and what does not; and that causal admission holds its second experts back."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moetriage.train.admission import POLICIES, admit

#: In these a token is heard by position, its second choice after all first ones; a first choice alone depends on no later token.
BY_POSITION = ("top1", "capsel2-causal")


def skewed(n_tokens: int, num_experts: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits_TE = torch.randn(n_tokens, num_experts, generator=generator) + torch.randn(num_experts, generator=generator)
    return logits_TE.softmax(1)


def earlier_that_change(policy: str, *, sequences: int, length: int, cut: int, seed: int, num_experts: int = 8) -> int:
    """Return how many tokens before position ``cut`` are admitted otherwise when all from there on, in every sequence, are others."""
    n_tokens = sequences * length
    before_TE, after_TE = skewed(n_tokens, num_experts, seed), skewed(n_tokens, num_experts, seed + 1)
    early_T = torch.arange(n_tokens) % length < cut
    changed_TE = torch.where(early_T[:, None], before_TE, after_TE)
    places = -(-5 * n_tokens // (4 * num_experts))
    plans = [admit(x, policy, capacity=places, margin_threshold=0.1, sequence_length=length) for x in (before_TE, changed_TE)]
    assert not torch.equal(plans[0].pass_TK[~early_T], plans[1].pass_TK[~early_T])
    return int((plans[0].pass_TK != plans[1].pass_TK)[early_T].any(1).sum())


@settings(deadline=None, max_examples=40)
@given(sequences=st.integers(1, 5), length=st.integers(12, 60), share=st.floats(0.1, 0.9), seed=st.integers(0, 10**6))
def test_causal_admission_depends_on_no_later_token(sequences: int, length: int, share: float, seed: int) -> None:
    cut = max(1, int(share * length))
    assert earlier_that_change("capsel2-causal", sequences=sequences, length=length, cut=cut, seed=seed) == 0


@pytest.mark.parametrize("policy", sorted(set(POLICIES) - set(BY_POSITION)))
def test_the_other_policies_do_depend_on_later_tokens(policy: str) -> None:
    assert earlier_that_change(policy, sequences=4, length=128, cut=96, seed=3) > 0


def test_top1_by_position_is_causal_in_one_sequence_and_not_across_the_batch() -> None:
    assert earlier_that_change("top1", sequences=1, length=512, cut=384, seed=3) == 0
    assert earlier_that_change("top1", sequences=4, length=128, cut=96, seed=3) > 0


def test_a_second_expert_is_given_only_within_the_accrued_share() -> None:
    # Every token prefers expert 0 or 1 in turns and is uncertain of expert 2, which nobody prefers; 8 places accrue one each two positions.
    first_T = torch.arange(16) % 2
    probs_TE = torch.zeros(16, 3).scatter(1, first_T[:, None], 0.5)
    probs_TE[:, 2] = 0.49
    plan = admit(probs_TE, "capsel2-causal", capacity=8, margin_threshold=0.1, sequence_length=16)
    assert plan.expert_TK[:, 1].tolist() == [-1] * 16  # by position p, p + 1 tokens named it: always more than (p + 1) / 2
    plan = admit(probs_TE, "capsel2-causal", capacity=16, margin_threshold=0.1, sequence_length=16)
    assert plan.expert_TK[:, 1].tolist() == [2] * 16


def test_a_refused_token_is_rescued_beyond_the_accrued_share() -> None:
    probs_TE = torch.tensor([0.6, 0.3, 0.1]).repeat(4, 1)
    plan = admit(probs_TE, "capsel2-causal", capacity=2, margin_threshold=0.0, sequence_length=4)
    assert plan.expert_TK.tolist() == [[0, -1], [0, -1], [-1, 1], [-1, 1]]
    assert plan.pass_TK.tolist() == [[1, 0], [1, 0], [0, 2], [0, 2]]
