"""Every admission policy says what the brute-force oracle says: on random, tied, masked and degenerate cases."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from train import oracle

from moetriage.errors import UsageError
from moetriage.train.admission import POLICIES, THRESHOLD_POLICIES, Plan, admit

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
MANY = settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.too_slow])


@dataclass(frozen=True)
class Case:
    """A batch of ``sequences`` x ``length`` tokens. ``levels``: distinct scores, so that 1 makes all equal; ``masked``: share left out."""

    num_experts: int
    sequences: int
    length: int
    capacity: int
    levels: int
    masked: float
    threshold: float
    dtype: torch.dtype
    seed: int

    def tensors(self) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        n_tokens = self.sequences * self.length
        score_TE = torch.randint(1, self.levels + 1, (n_tokens, self.num_experts), generator=generator) / self.levels
        # Some experts are asked more than others, as in a real router.
        bias_E = torch.randint(0, 3, (self.num_experts,), generator=generator) if self.levels > 1 else torch.zeros(self.num_experts)
        probs_TE = ((score_TE + bias_E) / 3).to(self.dtype)
        return probs_TE, torch.rand(n_tokens, generator=generator) >= self.masked


CASES = st.builds(
    Case,
    num_experts=st.integers(1, 9),
    sequences=st.integers(0, 5),
    length=st.integers(1, 12),
    capacity=st.one_of(st.integers(0, 8), st.integers(9, 80)),
    levels=st.sampled_from((1, 2, 5, 1000)),
    masked=st.sampled_from((0.0, 0.3, 0.9, 1.0)),
    threshold=st.sampled_from((0.0, 0.04, 0.2, float("inf"))),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**32 - 1),
)


def plan_of(case: Case, policy: str) -> Plan:
    probs_TE, mask_T = case.tensors()
    return admit(probs_TE, policy, capacity=case.capacity, margin_threshold=case.threshold, mask_T=mask_T, sequence_length=case.length)


def expected(case: Case, policy: str) -> dict[str, list[object]]:
    probs_TE, mask_T = case.tensors()
    rows, mask = probs_TE.float().tolist(), mask_T.tolist()
    tokens, buffers = oracle.admit(rows, case.num_experts, policy, case.capacity, case.threshold, mask, case.length)
    experts, slots, passes = [[-1, -1] for _ in rows], [[-1, -1] for _ in rows], [[0, 0] for _ in rows]
    for token in tokens:
        slots[token.index], passes[token.index] = token.slots, token.passes
        experts[token.index] = [token.experts[k] if token.slots[k] >= 0 else -1 for k in (0, 1)]
    return {
        "expert_TK": experts,
        "slot_TK": slots,
        "pass_TK": passes,
        "requested": buffers.requested,
        "accepted": buffers.accepted,
    }


def assert_equals_oracle(case: Case) -> None:
    for policy in POLICIES:
        plan = plan_of(case, policy)
        found = {name: getattr(plan, name).tolist() for name in ("expert_TK", "slot_TK", "pass_TK", "requested", "accepted")}
        assert found == expected(case, policy), policy


def case(**changes: object) -> Case:
    usual = {"num_experts": 4, "sequences": 3, "length": 7, "capacity": 6, "levels": 5, "masked": 0.0, "threshold": 0.1}
    return Case(**{**usual, "dtype": torch.float32, "seed": 1, **changes})  # type: ignore[arg-type]


@MANY
@given(CASES)
@example(case(num_experts=1))
@example(case(sequences=0))
@example(case(sequences=1, length=2))  # fewer tokens than experts
@example(case(capacity=0))
@example(case(capacity=22))  # more room than tokens
@example(case(masked=1.0))
@example(case(levels=1))
@example(case(levels=1, num_experts=1, capacity=0, masked=1.0))
@example(case(dtype=torch.bfloat16, levels=1000))
@example(case(dtype=torch.float16, levels=1000))
def test_every_policy_equals_the_oracle(case: Case) -> None:
    assert_equals_oracle(case)


@pytest.mark.slow
@settings(MANY, max_examples=4000)
@given(CASES)
def test_every_policy_equals_the_oracle_thousands_of_times(case: Case) -> None:
    assert_equals_oracle(case)


@pytest.mark.parametrize("num_experts", [3, 40, 300])
def test_larger_batches_equal_the_oracle(num_experts: int) -> None:
    # 40 and 300 experts need wider sort keys than 3.
    assert_equals_oracle(
        case(num_experts=num_experts, sequences=6, length=50, capacity=1 + 375 // num_experts, levels=1000, threshold=0.01)
    )


@pytest.mark.parametrize("policy", POLICIES)
def test_slots_are_dense_below_capacity_and_counts_are_those_of_the_plan(policy: str) -> None:
    many = case(num_experts=8, sequences=16, length=128, capacity=320, levels=1000, masked=0.1, threshold=0.05)
    plan, (_, mask_T) = plan_of(many, policy), many.tensors()
    for expert in range(8):
        slots = plan.slot_TK[plan.expert_TK == expert].sort().values
        assert torch.equal(slots, torch.arange(len(slots)))
        assert len(slots) <= plan.capacity
    assert plan.accepted.tolist() == [int((plan.pass_TK == number).sum()) for number in (1, 2, 3)]
    assert int(plan.requested[0]) == int(mask_T.sum())
    assert torch.equal(plan.expert_TK >= 0, plan.slot_TK >= 0)
    assert torch.equal(plan.covered_T, (plan.pass_TK > 0).any(1))
    assert not plan.covered_T[~mask_T].any()
    assert 0 < int(plan.covered_T.sum()) < int(mask_T.sum())  # or the batch above tests nothing
    assert torch.equal(plan.margin_T.isinf(), ~mask_T)


def test_equal_scores_go_to_the_lower_experts_and_the_lower_tokens() -> None:
    plan = admit(torch.full((5, 4), 0.25), capacity=2, margin_threshold=0.0)
    assert plan.expert_TK.tolist() == [[0, -1], [0, -1], [-1, 1], [-1, 1], [-1, -1]]
    assert plan.slot_TK.tolist() == [[0, -1], [1, -1], [-1, 0], [-1, 1], [-1, -1]]
    assert plan.pass_TK.tolist() == [[1, 0], [1, 0], [0, 2], [0, 2], [0, 0]]
    assert (plan.requested.tolist(), plan.accepted.tolist()) == ([5, 3, 2], [2, 2, 0])


def test_rescue_comes_before_a_better_scored_second_choice() -> None:
    # Expert 0 takes tokens 0 and 1; only token 2 is refused. Token 0 wants expert 1 more than token 2 does.
    probs_TE = torch.tensor([[0.51, 0.49, 0.0], [0.6, 0.1, 0.3], [0.5, 0.3, 0.2], [0.1, 0.9, 0.0]])
    rescued = admit(probs_TE, "capsel2", capacity=2, margin_threshold=0.5)
    by_score = admit(probs_TE, "fixed-top2", capacity=2)
    assert rescued.expert_TK.tolist() == [[0, -1], [0, 2], [-1, 1], [1, -1]]
    assert by_score.expert_TK.tolist() == [[0, 1], [0, 2], [-1, -1], [1, -1]]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_routing_is_that_of_the_values_in_float32(policy: str, dtype: torch.dtype) -> None:
    probs_TE = torch.randn(600, 8).softmax(1).to(dtype)
    assert len(probs_TE.unique()) < 4800 or dtype == torch.float64  # 16-bit scores tie
    settings_of = {"capacity": 80, "margin_threshold": 0.03, "sequence_length": 60}
    narrow, wide = admit(probs_TE, policy, **settings_of), admit(probs_TE.float(), policy, **settings_of)
    assert torch.equal(narrow.slot_TK, wide.slot_TK)
    assert torch.equal(narrow.margin_T, wide.margin_T)
    assert narrow.margin_T.dtype == torch.float32


def test_what_is_equal_in_float32_is_a_tie_in_float64_too() -> None:
    probs_TE = torch.tensor([[0.3, 0.3 + 1e-12, 0.3 + 2e-12]], dtype=torch.float64)
    assert admit(probs_TE, "top2", capacity=1).expert_TK.tolist() == [[0, 1]]


def test_a_threshold_may_be_a_tensor_and_online_is_capsel2_with_the_one_it_is_given() -> None:
    probs_TE = torch.randn(300, 8).softmax(1)
    for policy in ("capsel2", "capsel2-online"):
        plan = admit(probs_TE, policy, capacity=50, margin_threshold=torch.tensor(0.05))
        assert torch.equal(plan.slot_TK, admit(probs_TE, "capsel2", capacity=50, margin_threshold=0.05).slot_TK)
    assert int(plan.accepted[2]) > 0


def test_a_plan_takes_no_gradient_and_two_calls_give_the_same_one() -> None:
    probs_TE = torch.randn(100, 8).softmax(1).requires_grad_()
    first, second = (admit(probs_TE, capacity=12, margin_threshold=0.1) for _ in range(2))
    assert not first.margin_T.requires_grad
    assert torch.equal(first.slot_TK, second.slot_TK)


def test_padding_may_hold_anything() -> None:
    probs_TE, mask_T = torch.randn(40, 4).softmax(1), torch.arange(40) < 30
    padded_TE = probs_TE.masked_fill(~mask_T[:, None], torch.nan)
    for policy in POLICIES:
        plan = admit(padded_TE, policy, capacity=9, margin_threshold=0.2, mask_T=mask_T, sequence_length=40)
        alone = admit(probs_TE[:30], policy, capacity=9, margin_threshold=0.2, sequence_length=30)
        assert not plan.covered_T[30:].any()
        if policy != "capsel2-causal":  # there a sequence's length sets the pace
            assert torch.equal(plan.slot_TK[:30], alone.slot_TK), policy


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -0.5])
def test_values_that_are_no_probabilities_are_refused_with_the_token(bad: float) -> None:
    probs_TE = torch.full((6, 3), 0.3)
    probs_TE[4, 1:] = bad
    with pytest.raises(UsageError, match="of token 4: "):
        admit(probs_TE, "top1", capacity=2)


PROBS = torch.full((6, 3), 1 / 3)


@pytest.mark.parametrize(
    ("probs_TE", "policy", "changes", "message"),
    [
        (PROBS, "capsel", {}, "unknown admission policy 'capsel': use one of top1, top2, .*augment"),
        (PROBS[0], "top1", {}, r"shape \(3,\)"),
        (PROBS[:, :0], "top1", {}, r"shape \(6, 0\)"),
        (PROBS.int(), "top1", {}, "int32: must be"),
        (PROBS, "top1", {"capacity": -1}, "capacity -1: must be an int"),
        (PROBS, "top1", {"capacity": 1.25}, "capacity 1.25: must be an int, 0 to 2..40 tokens per expert; capacity.factor, "),
        (PROBS, "top1", {"capacity": torch.tensor(2.5)}, "capacity tensor.2.5.*: must be an int"),
        (PROBS, "capsel2-causal", {"capacity": 2**62}, "capacity 4611686018427387904: must be an int, 0 to 2..40"),
        (PROBS, "capsel2", {"margin_threshold": -0.1}, "margin_threshold -0.1: must be a number from 0 up"),
        (PROBS, "top1", {"mask_T": torch.ones(5, dtype=torch.bool)}, "one for each of 6 tokens"),
        (PROBS, "top1", {"mask_T": torch.ones(6)}, "must be bool"),
        (PROBS, "capsel2", {"margin_threshold": float("nan")}, "margin_threshold nan"),
        (PROBS, "capsel2-causal", {"margin_threshold": 0.1}, "got None"),
        (PROBS, "capsel2-causal", {"margin_threshold": 0.1, "sequence_length": 4}, "6 tokens: .* must divide them; got 4"),
        (PROBS, "capsel2-causal", {"margin_threshold": 0.1, "sequence_length": 0}, "got 0"),
        *((PROBS, policy, {"sequence_length": 3}, "needs margin_threshold") for policy in sorted(THRESHOLD_POLICIES)),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(probs_TE: Tensor, policy: str, changes: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        admit(probs_TE, policy, **{"capacity": 2, **changes})  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
