"""Gather and combine against indexing written out, forward and backward, with empty rows and tokens without a grant."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from moetriage.train.dispatch import Slots, combine, gather, padded_slots, sorted_slots

T, E, D = 30, 4, 6


def some_grants(top_k: int) -> Tensor:
    """Distinct experts per token; about a third of the choices, and all of tokens 3 and 4, are not granted."""
    expert_TK = torch.rand(T, E).topk(top_k).indices.masked_fill(torch.rand(T, top_k) < 0.3, -1)
    expert_TK[3:5] = -1
    return expert_TK


def padded(expert_TK: Tensor) -> Slots:
    """A plan's slots: a running number per expert."""
    slot_TK, load = torch.full_like(expert_TK, -1), [0] * E
    for t, k in (expert_TK >= 0).nonzero().tolist():
        slot_TK[t, k] = load[expert_TK[t, k]]
        load[expert_TK[t, k]] += 1
    return padded_slots(expert_TK, slot_TK, E, max(load) + 2)


def layouts(top_k: int) -> list[tuple[str, Tensor, Slots]]:
    expert_TK = some_grants(top_k)
    found = [("padded", expert_TK, padded(expert_TK))] if top_k == 2 else []
    return [*found, ("sorted", expert_TK, sorted_slots(expert_TK, E)[0]), ("rounded", expert_TK, sorted_slots(expert_TK, E, multiple=8)[0])]


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_rows_and_tokens_point_at_each_other(top_k: int) -> None:
    for name, expert_TK, slots in layouts(top_k):
        granted_TK = slots.slot_TK < len(slots.token_M)
        assert torch.equal(granted_TK, expert_TK >= 0), name
        assert torch.equal(slots.token_M[slots.slot_TK[granted_TK]], granted_TK.nonzero()[:, 0]), name
        assert int((slots.token_M < T).sum()) == int(granted_TK.sum()), name


def test_sorted_rows_lie_by_expert_in_order_of_tokens() -> None:
    expert_TK = some_grants(2)
    slots, load_E = sorted_slots(expert_TK, E)
    assert load_E.tolist() == [int((expert_TK == e).sum()) for e in range(E)]
    for e, (start, load) in enumerate(zip(load_E.cumsum(0) - load_E, load_E, strict=True)):
        wanted = (expert_TK == e).any(1).nonzero()[:, 0]
        assert torch.equal(slots.token_M[start : start + load], wanted)


def test_rounded_rows_start_at_multiples() -> None:
    expert_TK = some_grants(2)
    slots, rows_E = sorted_slots(expert_TK, E, multiple=8)
    assert (rows_E % 8 == 0).all()
    for e, start in enumerate(rows_E.cumsum(0) - rows_E):
        rows = slots.slot_TK[expert_TK == e]
        assert torch.equal(rows.sort().values, torch.arange(int(start), int(start) + len(rows)))


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_gather_and_combine_equal_indexing_forward_and_backward(top_k: int) -> None:
    for name, expert_TK, slots in layouts(top_k):
        x_TD = torch.randn(T, D, dtype=torch.float64, requires_grad=True)
        gates_TK = torch.rand(T, top_k, dtype=torch.float64).masked_fill(expert_TK < 0, 0).requires_grad_()
        weight_E = torch.randn(E, dtype=torch.float64)
        expert_M = torch.zeros(len(slots.token_M), dtype=torch.int64)
        expert_M[slots.slot_TK[expert_TK >= 0]] = expert_TK[expert_TK >= 0]
        y_TD = combine(gather(x_TD, slots) * weight_E[expert_M, None], gates_TK, slots)
        wanted = x_TD * (gates_TK * weight_E[expert_TK] * (expert_TK >= 0)).sum(1, keepdim=True)
        assert torch.allclose(y_TD, wanted), name
        dy_TD = torch.randn_like(x_TD)
        found_grads = torch.autograd.grad(y_TD, (x_TD, gates_TK), dy_TD)
        for found, want in zip(found_grads, torch.autograd.grad(wanted, (x_TD, gates_TK), dy_TD), strict=True):
            assert torch.allclose(found, want), name


def test_gradcheck_of_gather_and_combine() -> None:
    expert_TK = some_grants(2)
    slots = padded(expert_TK)
    gates_TK = torch.rand(T, 2, dtype=torch.float64).masked_fill(expert_TK < 0, 0).requires_grad_()

    def branch(x_TD: Tensor, gates_TK: Tensor) -> Tensor:
        return combine(gather(x_TD, slots).tanh(), gates_TK * (expert_TK >= 0), slots)

    assert torch.autograd.gradcheck(branch, (torch.randn(T, 2, dtype=torch.float64, requires_grad=True), gates_TK))


def test_empty_rows_are_zero_and_tokens_without_a_grant_get_exact_zero() -> None:
    expert_TK = some_grants(2)
    slots = padded(expert_TK)
    rows_MD = gather(torch.randn(T, D), slots)
    assert not rows_MD[slots.token_M == T].any()
    y_TD = combine(torch.randn(len(slots.token_M), D), torch.rand(T, 2), slots)
    assert not y_TD[3:5].any()
    assert y_TD[(expert_TK >= 0).any(1)].all()


def test_an_infinite_row_reaches_no_token_but_its_own() -> None:
    slots = padded(some_grants(2))
    for row in (0, int((slots.token_M < T).nonzero()[-1, 0])):
        y_MD = torch.randn(len(slots.token_M), D)
        y_MD[row] = torch.inf
        y_TD = combine(y_MD, torch.rand(T, 2), slots)
        assert (~torch.isfinite(y_TD).all(1)).nonzero()[:, 0].tolist() == [int(slots.token_M[row])]


def test_sums_over_choices_are_rounded_once() -> None:
    expert_TK = torch.arange(E).expand(T, E)
    slots, _ = sorted_slots(expert_TK, E)
    y_MD, gates_TK = torch.randn(T * E, D).bfloat16(), torch.rand(T, E).bfloat16()
    exact = (y_MD.double()[slots.slot_TK] * gates_TK.double()[..., None]).sum(1)
    error = (combine(y_MD, gates_TK, slots).double() - exact).abs()
    assert (error <= exact.abs() * 2**-8 * 1.001 + 1e-6).all()  # half a unit in the last place, and float32's own error


def test_no_tokens_and_no_grants_are_defined() -> None:
    slots, load_E = sorted_slots(torch.full((5, 2), -1), E)
    assert not load_E.any()
    assert not combine(gather(torch.randn(5, D), slots), torch.zeros(5, 2), slots).any()
    nothing = padded_slots(torch.empty(0, 2, dtype=torch.int64), torch.empty(0, 2, dtype=torch.int64), E, 1)
    x_TD = torch.randn(0, D, requires_grad=True)
    y_TD = combine(gather(x_TD, nothing), torch.zeros(0, 2), nothing)
    assert y_TD.shape == (0, D)
    y_TD.sum().backward()
