"""The optimum is one, no policy exceeds it, and augmenting rescue lies between it and plain rescue."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moetriage.errors import UsageError
from moetriage.train.admission import POLICIES, admit
from moetriage.train.optimum import optimum


def best_by_trying(pairs: list[tuple[int, int]], capacity: int) -> int:
    """Try every assignment of each token to its first choice, its second, or none."""
    best = 0
    for picks in itertools.product((0, 1, None), repeat=len(pairs)):
        taken = [pair[pick] for pair, pick in zip(pairs, picks, strict=True) if pick is not None]
        if all(taken.count(expert) <= capacity for expert in set(taken)):
            best = max(best, len(taken))
    return best


def probs_of(pairs: list[tuple[int, int]], num_experts: int) -> Tensor:
    probs_TE = torch.zeros(len(pairs), num_experts)
    for token, (first, second) in enumerate(pairs):
        probs_TE[token, second] = 0.3
        probs_TE[token, first] = 0.6
    return probs_TE


PAIRS = st.lists(st.permutations(range(4)).map(lambda order: (order[0], order[1])), max_size=7)


@settings(deadline=None, max_examples=60)
@given(PAIRS, st.integers(0, 3))
def test_the_optimum_is_what_trying_everything_finds(pairs: list[tuple[int, int]], capacity: int) -> None:
    assert optimum(probs_of(pairs, 4), capacity) == best_by_trying(pairs, capacity)


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 9), st.integers(0, 60), st.integers(0, 12), st.integers(0, 10**6))
def test_no_policy_serves_more_tokens_than_the_optimum(num_experts: int, n_tokens: int, capacity: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    probs_TE = (torch.randn(n_tokens, num_experts, generator=generator) + torch.randn(num_experts, generator=generator)).softmax(1)
    mask_T = torch.rand(n_tokens, generator=generator) > 0.1
    most = optimum(probs_TE, capacity, mask_T)
    served = {}
    for policy in POLICIES:
        plan = admit(probs_TE, policy, capacity=capacity, margin_threshold=0.1, mask_T=mask_T, sequence_length=max(1, n_tokens))
        served[policy] = int(plan.covered_T.sum())
    assert max(served.values()) <= most
    assert served["primary+rescue"] == served["capsel2"] <= served["augment"]


def test_augmenting_moves_a_token_to_make_room_and_reaches_the_optimum() -> None:
    # Token 2 wants expert 0, then 1: both are full. Token 1 can move from 0 to 2, token 0 could too but is surer.
    pairs_TE = torch.tensor([[0.8, 0.0, 0.1], [0.7, 0.0, 0.2], [0.6, 0.3, 0.0], [0.0, 0.9, 0.1], [0.1, 0.8, 0.0]])
    plain = admit(pairs_TE, "primary+rescue", capacity=2)
    moved = admit(pairs_TE, "augment", capacity=2, margin_threshold=0.0)
    assert plain.expert_TK.tolist() == [[0, -1], [0, -1], [-1, -1], [1, -1], [1, -1]]
    assert moved.expert_TK.tolist() == [[0, -1], [-1, 2], [0, -1], [1, -1], [1, -1]]
    assert moved.slot_TK.tolist() == [[0, -1], [-1, 0], [1, -1], [0, -1], [1, -1]]
    assert moved.pass_TK.tolist() == [[1, 0], [0, 1], [2, 0], [1, 0], [1, 0]]
    assert (moved.requested.tolist(), moved.accepted.tolist()) == ([5, 1, 0], [4, 1, 0])
    assert int(moved.covered_T.sum()) == optimum(pairs_TE, 2) == 5


def test_the_optimum_refuses_a_negative_capacity() -> None:
    with pytest.raises(UsageError, match="capacity -1"):
        optimum(torch.full((2, 2), 0.5), -1)
