"""The router computes in float32, breaks ties by index, names what is not finite, and its gates say what was granted."""

from __future__ import annotations

import pytest
import torch

from moetriage.errors import UsageError
from moetriage.train.losses import loss_free_bias_update
from moetriage.train.router import Router, best, gates_of


def test_bfloat16_input_is_routed_in_float32() -> None:
    router = Router(16, 8)
    x_TD = torch.randn(64, 16).bfloat16()
    routing = router(x_TD)
    assert routing.logits_TE.dtype == routing.probs_TE.dtype == torch.float32
    assert torch.allclose(routing.logits_TE, x_TD.float() @ router.weight.t(), atol=1e-6)


def test_autocast_does_not_round_the_router() -> None:
    router, x_TD = Router(16, 8), torch.randn(64, 16)
    with torch.autocast("cpu", torch.bfloat16):
        routing = router(x_TD)
    assert torch.equal(routing.probs_TE, router(x_TD).probs_TE)


def test_a_router_in_bfloat16_still_gives_float32_scores() -> None:
    assert Router(16, 8).bfloat16()(torch.randn(4, 16).bfloat16()).probs_TE.dtype == torch.float32


@pytest.mark.parametrize("top_k", [1, 3, 8])
def test_best_equals_a_stable_sort_with_ties(top_k: int) -> None:
    scores_TE = torch.randint(0, 4, (500, 8)).float()
    wanted = torch.sort(scores_TE, dim=1, descending=True, stable=True).indices[:, :top_k]
    assert torch.equal(best(scores_TE, top_k), wanted)


def test_the_selection_bias_changes_who_is_chosen_and_no_gate() -> None:
    router = Router(16, 4, selection_bias=True)
    probs_TE = router(torch.randn(32, 16)).probs_TE
    before = router.choose(probs_TE, 2)
    router.add_bias(torch.tensor([0.0, 0.0, 0.0, 1.0]))
    after = router.choose(probs_TE, 2)
    assert (after[:, 0] == 3).all()
    assert not torch.equal(before, after)
    assert torch.equal(gates_of(probs_TE, after, renormalise=False), probs_TE.gather(1, after))


def test_the_bias_follows_the_load_until_it_is_even() -> None:
    router = Router(8, 4, selection_bias=True)
    probs_TE = (torch.randn(400, 4) * 0.1 + torch.tensor([0.5, 0.2, 0.0, -0.2])).softmax(1)
    assert torch.bincount(router.choose(probs_TE, 1)[:, 0], minlength=4).max() > 350
    for _ in range(400):
        router.add_bias(loss_free_bias_update(torch.bincount(router.choose(probs_TE, 1)[:, 0], minlength=4), 0.001))
    assert torch.bincount(router.choose(probs_TE, 1)[:, 0], minlength=4).max() < 130


def test_a_router_without_a_selection_bias_refuses_an_update() -> None:
    with pytest.raises(UsageError, match="loss_free_bias_rate"):
        Router(8, 4).add_bias(torch.zeros(4))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_is_not_finite_is_an_error_that_says_where(value: float) -> None:
    router, x_TD = Router(4, 3, layer=5), torch.randn(12, 4)
    x_TD[7, 2] = value
    with pytest.raises(UsageError, match=r"layer 5, token 7 \(sequence 1, position 1\).*1 of 12 tokens"):
        router(x_TD, 6)


def test_a_weight_that_is_not_finite_names_the_first_token() -> None:
    router = Router(4, 3, layer=2)
    torch.nn.init.constant_(router.weight, float("nan"))
    with pytest.raises(UsageError, match=r"layer 2, token 0: the router's logit is nan, 12 of 12"):
        router(torch.randn(12, 4))


def test_large_finite_logits_are_no_error() -> None:
    router = Router(1, 2)
    with torch.no_grad():
        router.weight.copy_(torch.tensor([[1.0], [0.5]]))
    x_TD = torch.full((8, 1), 3e38)  # the sum of all logits overflows, no logit does
    assert torch.isfinite(router(x_TD).probs_TE).all()


def test_the_check_can_be_turned_off() -> None:
    router = Router(4, 3, check_finite=False)
    assert router(torch.full((2, 4), float("nan"))).probs_TE.isnan().all()


def test_gates_are_the_probabilities_of_what_was_granted() -> None:
    probs_TE, expert_TK = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.6, 0.3]]), torch.tensor([[0, -1], [1, 2]])
    assert torch.equal(gates_of(probs_TE, expert_TK, renormalise=False), torch.tensor([[0.5, 0.0], [0.6, 0.3]]))


def test_renormalised_gates_sum_to_one_over_the_granted_experts_alone() -> None:
    probs_TE, expert_TK = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.6, 0.3], [0.5, 0.3, 0.2]]), torch.tensor([[0, -1], [1, 2], [-1, -1]])
    wanted = torch.tensor([[1.0, 0.0], [0.6 / 0.9, 0.3 / 0.9], [0.0, 0.0]])
    assert torch.allclose(gates_of(probs_TE, expert_TK, renormalise=True), wanted)


def test_a_token_without_experts_sends_no_gradient_even_renormalised() -> None:
    probs_TE = torch.rand(3, 4, requires_grad=True)
    gates_of(probs_TE, torch.tensor([[0, 1], [-1, -1], [2, -1]]), renormalise=True)[:, 0].sum().backward()
    assert torch.isfinite(probs_TE.grad).all()
    assert not probs_TE.grad[1].any()
    assert probs_TE.grad[0].any()
