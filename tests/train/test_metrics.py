"""Counts of what routing did: against a count by hand, and summed."""

from __future__ import annotations

import pytest
import torch

from moetriage.errors import UsageError
from moetriage.train.admission import admit
from moetriage.train.metrics import combine, stats_of_choices, stats_of_plan


def test_counts_of_a_plan_equal_a_count_by_hand() -> None:
    probs_TE = torch.tensor([[0.6, 0.3, 0.1], [0.5, 0.4, 0.1], [0.7, 0.2, 0.1], [0.4, 0.35, 0.25], [0.9, 0.05, 0.05]])
    mask_T = torch.tensor([True, True, True, True, False])
    plan = admit(probs_TE, "capsel2", capacity=1, margin_threshold=0.1, mask_T=mask_T)
    stats = stats_of_plan(plan, 3, torch.tensor(0.1))
    # Token 2 gets expert 0, the others ask expert 1, where token 1 wins; nobody reaches expert 2, and 1 and 3 are within the threshold.
    assert (int(stats.tokens), int(stats.uncovered), int(stats.uncertain)) == (4, 2, 2)
    assert stats.requested.tolist() == [4, 3, 0]
    assert stats.accepted.tolist() == [1, 1, 0]
    assert stats.expert_load_E.tolist() == [1, 1, 0]


def test_without_a_threshold_nobody_is_uncertain() -> None:
    plan = admit(torch.full((4, 2), 0.5), "top2", capacity=2)
    assert int(stats_of_plan(plan, 2, None).uncertain) == 0


def test_masked_tokens_are_certain_even_of_an_infinite_threshold() -> None:
    plan = admit(
        torch.full((4, 2), 0.5), "capsel2", capacity=2, margin_threshold=torch.inf, mask_T=torch.tensor([True, True, False, False])
    )
    assert int(stats_of_plan(plan, 2, torch.tensor(torch.inf)).uncertain) == 2


def test_counts_of_dropless_choices_leave_masked_tokens_out() -> None:
    stats = stats_of_choices(torch.tensor([[0, 1, 2], [-1, -1, -1], [2, 1, 3]]), 4)
    assert (int(stats.tokens), int(stats.uncovered), int(stats.uncertain)) == (2, 0, 0)
    assert stats.requested.tolist() == stats.accepted.tolist() == [2, 0, 4]
    assert stats.expert_load_E.tolist() == [1, 2, 2, 1]


def test_combining_adds_every_count() -> None:
    one, two = stats_of_choices(torch.tensor([[0, 1]]), 3), stats_of_choices(torch.tensor([[2, 1], [0, 2]]), 3)
    both = combine([one, two])
    assert int(both.tokens) == 3
    assert both.requested.tolist() == [3, 0, 3]
    assert both.expert_load_E.tolist() == [2, 2, 2]


def test_combining_nothing_is_refused() -> None:
    with pytest.raises(UsageError, match="no routing statistics"):
        combine([])
