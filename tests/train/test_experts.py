"""The three ways to run experts against feed-forward networks written out, one row at a time."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from moetriage.train import expert_loop
from moetriage.train.dispatch import combine, gather, padded_slots, sorted_slots
from moetriage.train.experts import Experts
from moetriage.train.router import gates_of

KINDS = (("swiglu", False), ("gelu", False), ("gelu", True))
T, E, K, D, H = 40, 5, 3, 8, 16


def some_experts(activation: str, bias: bool, dtype: torch.dtype = torch.float64) -> Experts:
    experts = Experts(E, D, H, activation, bias=bias).to(dtype)
    for parameter in (experts.up_bias, experts.down_bias):
        if parameter is not None:
            torch.nn.init.normal_(parameter)
    return experts


def written_out(experts: Experts, x_D: Tensor, expert: int) -> Tensor:
    up_H = x_D @ experts.up_proj[expert]
    if experts.up_bias is not None:
        up_H = up_H + experts.up_bias[expert]
    hidden_H = F.gelu(up_H) if experts.gate_proj is None else F.silu(x_D @ experts.gate_proj[expert]) * up_H
    y_D = hidden_H @ experts.down_proj[expert]
    return y_D if experts.down_bias is None else y_D + experts.down_bias[expert]


def routing(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, gates and experts; one expert gets nothing, a few choices are not granted, token 4 has none at all."""
    probs_TE = torch.randn(T, E).index_fill(1, torch.tensor([3]), -30.0).softmax(1).to(dtype)
    expert_TK = probs_TE.topk(K).indices.masked_fill(torch.rand(T, K) < 0.2, -1)
    expert_TK[4] = -1
    assert not (expert_TK == 3).any()
    x_TD = torch.randn(T, D, dtype=dtype, requires_grad=True)
    return x_TD, gates_of(probs_TE, expert_TK, renormalise=True).requires_grad_(), expert_TK


def run_loop(experts: Experts, x_TD: Tensor, gates_TK: Tensor, expert_TK: Tensor) -> Tensor:
    slots, rows_E = sorted_slots(expert_TK, E, multiple=8)
    return expert_loop.run(experts, x_TD, gates_TK, slots, rows_E)


def reference(experts: Experts, x_TD: Tensor, gates_TK: Tensor, expert_TK: Tensor) -> Tensor:
    rows = []
    for t in range(T):
        parts = [gates_TK[t, k] * written_out(experts, x_TD[t], e) for k, e in enumerate(expert_TK[t].tolist()) if e >= 0]
        rows.append(torch.stack(parts).sum(0) if parts else torch.zeros_like(x_TD[t]))
    return torch.stack(rows)


@pytest.mark.parametrize(("activation", "bias"), KINDS)
def test_padded_experts_equal_the_networks_written_out(activation: str, bias: bool) -> None:
    experts, x_ECD = some_experts(activation, bias), torch.randn(E, 7, D, dtype=torch.float64)
    wanted = torch.stack([torch.stack([written_out(experts, x_D, e) for x_D in x_ECD[e]]) for e in range(E)])
    assert torch.allclose(experts.padded(x_ECD), wanted)


@pytest.mark.parametrize(("activation", "bias"), KINDS)
def test_the_loop_equals_the_networks_written_out_forward_and_backward(activation: str, bias: bool) -> None:
    experts, (x_TD, gates_TK, expert_TK) = some_experts(activation, bias), routing()
    found, wanted = run_loop(experts, x_TD, gates_TK, expert_TK), reference(experts, x_TD, gates_TK, expert_TK)
    assert torch.allclose(found, wanted)
    assert not found[4].any()
    inputs, dy_TD = (x_TD, gates_TK, *experts.parameters()), torch.randn_like(x_TD)
    for one, other in zip(torch.autograd.grad(found, inputs, dy_TD), torch.autograd.grad(wanted, inputs, dy_TD), strict=True):
        assert torch.allclose(one, other)


@pytest.mark.parametrize("chunk_rows", [1, 20, 1000])
@pytest.mark.parametrize(("activation", "bias"), KINDS)
def test_equal_buffers_in_chunks_equal_the_networks_written_out(
    activation: str, bias: bool, chunk_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expert_loop, "CHUNK_ROWS", chunk_rows)  # one expert at a time, two and a last one, all
    experts, (x_TD, gates_TK, expert_TK) = some_experts(activation, bias), routing()
    room = 10
    slots, load_E = sorted_slots(expert_TK, E)
    place_TK = slots.slot_TK - (load_E.cumsum(0) - load_E)[expert_TK]
    expert_TK = expert_TK.masked_fill(place_TK >= room, -1)
    assert (expert_TK[:, 0] < 0).sum() > (slots.slot_TK[:, 0] == len(slots.token_M)).sum()
    found = expert_loop.run(experts, x_TD, gates_TK, padded_slots(expert_TK, place_TK, E, room))
    wanted = reference(experts, x_TD, gates_TK, expert_TK)
    assert torch.allclose(found, wanted)
    inputs, dy_TD = (x_TD, gates_TK, *experts.parameters()), torch.randn_like(x_TD)
    for one, other in zip(torch.autograd.grad(found, inputs, dy_TD), torch.autograd.grad(wanted, inputs, dy_TD), strict=True):
        assert torch.allclose(one, other)


@pytest.mark.parametrize(("activation", "bias"), KINDS)
def test_grouped_experts_equal_the_loop_forward_and_backward(activation: str, bias: bool) -> None:
    experts, (x_TD, gates_TK, expert_TK) = some_experts(activation, bias, torch.float32), routing(torch.float32)
    slots, load_E = sorted_slots(expert_TK, E)
    found, wanted = (
        combine(experts.grouped(gather(x_TD, slots), load_E), gates_TK, slots),
        run_loop(experts, x_TD, gates_TK, expert_TK),
    )
    assert torch.allclose(found, wanted, atol=1e-5)
    inputs, dy_TD = (x_TD, gates_TK, *experts.parameters()), torch.randn_like(x_TD)
    for one, other in zip(torch.autograd.grad(found, inputs, dy_TD), torch.autograd.grad(wanted, inputs, dy_TD), strict=True):
        assert torch.allclose(one, other, atol=1e-5)


@pytest.mark.parametrize(("activation", "bias"), KINDS)
def test_the_loop_in_bfloat16_is_as_near_as_bfloat16_is(activation: str, bias: bool) -> None:
    experts, (x_TD, gates_TK, expert_TK) = some_experts(activation, bias, torch.float32), routing(torch.float32)
    exact = reference(experts, x_TD, gates_TK, expert_TK)
    found = run_loop(experts, x_TD.bfloat16(), gates_TK, expert_TK)
    assert found.dtype == torch.bfloat16
    assert (found - exact).norm() < 0.01 * exact.norm()
    inputs, dy_TD = (x_TD, gates_TK, *experts.parameters()), torch.randn_like(x_TD)
    found_grads = torch.autograd.grad(found, inputs, dy_TD.bfloat16())
    for one, other in zip(found_grads, torch.autograd.grad(exact, inputs, dy_TD), strict=True):
        assert one.dtype == torch.float32
        assert (one - other).norm() < 0.02 * other.norm()


def test_gradcheck_of_the_loop() -> None:
    experts, (x_TD, gates_TK, expert_TK) = some_experts("swiglu", False), routing()

    def branch(x_TD: Tensor, gates_TK: Tensor) -> Tensor:
        return run_loop(experts, x_TD, gates_TK * (expert_TK >= 0), expert_TK)

    assert torch.autograd.gradcheck(branch, (x_TD, gates_TK), fast_mode=True)


@pytest.mark.slow
def test_the_loop_keeps_its_rules_as_an_operator() -> None:
    experts, (x_TD, gates_TK, expert_TK) = some_experts("gelu", True), routing()
    slots, rows_E = sorted_slots(expert_TK, E, multiple=8)
    where = (slots.slot_TK, slots.token_M, rows_E)
    weights = [experts.up_proj, experts.down_proj, experts.up_bias[:, None], experts.down_bias[:, None]]
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(expert_loop.forward_operator, (x_TD, gates_TK, *where, weights, "gelu", True), test_utils=checks)


def test_a_forward_without_gradients_keeps_nothing() -> None:
    experts, (x_TD, gates_TK, expert_TK) = some_experts("swiglu", False), routing()
    wanted = run_loop(experts, x_TD, gates_TK, expert_TK)
    with torch.no_grad():
        assert torch.equal(run_loop(experts, x_TD, gates_TK, expert_TK), wanted)
    assert wanted.requires_grad


@pytest.mark.parametrize("n_tokens", [0, 3])
def test_experts_without_any_row_are_defined(n_tokens: int) -> None:
    experts = some_experts("swiglu", False)
    x_TD, gates_TK = torch.randn(n_tokens, D, dtype=torch.float64, requires_grad=True), torch.zeros(n_tokens, K, dtype=torch.float64)
    y_TD = run_loop(experts, x_TD, gates_TK, torch.full((n_tokens, K), -1))
    assert y_TD.shape == (n_tokens, D)
    y_TD.sum().backward()
    assert not y_TD.any()
    assert not experts.up_proj.grad.any()


def test_initial_weights_have_the_bound_of_a_linear_layer() -> None:
    experts = Experts(4, 64, 256, "gelu", bias=True)
    assert experts.up_proj.abs().max() <= 1 / 8
    assert experts.up_proj.std().item() == pytest.approx(1 / 8 / 3**0.5, rel=0.02)
    assert experts.down_proj.std().item() == pytest.approx(1 / 16 / 3**0.5, rel=0.02)
    assert not experts.up_bias.any()
