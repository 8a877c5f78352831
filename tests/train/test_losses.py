"""Auxiliary losses against their formulas written out, on masked tokens and at their bounds."""

from __future__ import annotations

import pytest
import torch

from moetriage.train.losses import load_balancing_loss, loss_free_bias_update, z_loss


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("top_k", [1, 3])
def test_load_balancing_equals_the_formula_written_out(top_k: int, masked: bool) -> None:
    probs_TE = torch.randn(40, 5).softmax(1).double()
    expert_TK = probs_TE.topk(top_k).indices
    mask_T = torch.rand(40) > 0.4 if masked else None
    real = [t for t in range(40) if mask_T is None or mask_T[t]]
    wanted = 0.0
    for expert in range(5):
        chosen = sum(int(expert in expert_TK[t]) for t in real) / (len(real) * top_k)
        wanted += 5 * chosen * float(torch.stack([probs_TE[t, expert] for t in real]).mean())
    assert load_balancing_loss(probs_TE, expert_TK, mask_T).item() == pytest.approx(wanted)


def test_load_balancing_is_one_when_even_and_the_number_of_experts_when_one_takes_all() -> None:
    even = torch.full((8, 4), 0.25)
    assert load_balancing_loss(even, torch.arange(8)[:, None] % 4).item() == pytest.approx(1)
    one = torch.zeros(8, 4).index_fill(1, torch.tensor([2]), 1.0)
    assert load_balancing_loss(one, torch.full((8, 1), 2)).item() == pytest.approx(4)


def test_load_balancing_lowers_the_probability_of_the_busy_expert() -> None:
    logits_TE = torch.randn(64, 4).add(torch.tensor([2.0, 0, 0, 0])).requires_grad_()
    probs_TE = logits_TE.softmax(1)
    load_balancing_loss(probs_TE, probs_TE.argmax(1, keepdim=True)).backward()
    assert logits_TE.grad.sum(0).argmax() == 0


@pytest.mark.parametrize("masked", [False, True])
def test_z_loss_equals_the_formula_written_out(masked: bool) -> None:
    logits_TE = torch.randn(40, 5).double() * 3
    mask_T = torch.rand(40) > 0.4 if masked else None
    rows = logits_TE if mask_T is None else logits_TE[mask_T]
    assert z_loss(logits_TE, mask_T).item() == pytest.approx(rows.exp().sum(1).log().square().mean().item())


def test_without_a_real_token_both_losses_are_zero() -> None:
    logits_TE, nobody = torch.randn(6, 3), torch.zeros(6, dtype=torch.bool)
    assert load_balancing_loss(logits_TE.softmax(1), torch.zeros(6, 1, dtype=torch.int64), nobody) == 0
    assert z_loss(logits_TE, nobody) == 0
    assert z_loss(logits_TE[:0]) == 0


def test_autocast_does_not_round_the_losses() -> None:
    logits_TE = torch.randn(300, 7)
    expert_TK = logits_TE.topk(2).indices
    wanted = load_balancing_loss(logits_TE.softmax(1), expert_TK), z_loss(logits_TE)
    with torch.autocast("cpu", torch.bfloat16):
        assert (load_balancing_loss(logits_TE.softmax(1), expert_TK), z_loss(logits_TE)) == wanted


def test_the_bias_update_has_the_sign_of_the_missing_load() -> None:
    assert torch.equal(loss_free_bias_update(torch.tensor([10, 0, 5, 5]), 0.5), torch.tensor([-0.5, 0.5, 0.0, 0.0]))
