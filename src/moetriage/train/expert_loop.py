"""Experts on rows that lie one behind the other, one expert after the other: the fastest lossless way on a CPU.

In: tokens, gates and the experts granted. Out: the layer's (T, D) result. One expert's rows, hidden values and gradients stay in the
processor's cache from the gather to the last product; padding to the largest load writes each intermediate of all experts to memory and
reads it back. So does F.grouped_mm, which moreover compiles for bfloat16 alone. Both directions are operators of their own, which
torch.compile calls as they are. The load is read on the host, so this is nothing for a GPU.

Legend: T tokens, E experts, K choices, D model width, H expert width, P parts before the activation (gate and up, or up alone), I = P * H,
M rows of all experts together, C rows of one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from moetriage.train.dispatch import ROW_MULTIPLE, sorted_slots, weighted_rows, with_zero_row
from moetriage.train.experts import Experts


def run(experts: Experts, x_TD: Tensor, gates_TK: Tensor, expert_TK: Tensor) -> Tensor:
    """Return (T, D) of x's dtype: gather, experts and combine in one; -1 in ``expert_TK`` is nothing.

    Weights take x's dtype; the sum over choices is float32 inside.
    """
    slots, rows_E = sorted_slots(expert_TK, experts.num_experts, multiple=ROW_MULTIPLE)
    # Gate and up as one product: 16-bit ones of this size gain a third.
    weights = [torch.cat([weight.to(x_TD.dtype) for weight in experts.inputs()], dim=2), experts.down_proj.to(x_TD.dtype)]
    if experts.up_bias is not None and experts.down_bias is not None:
        weights += [experts.up_bias.to(x_TD.dtype), experts.down_bias.to(x_TD.dtype)]
    tensors = (x_TD, gates_TK, slots.slot_TK, slots.granted_TK, slots.token_M, rows_E)
    keep = torch.is_grad_enabled()
    # The operator's first call imports all of torch's compiler, some seconds that only a compiled layer has to spend.
    if torch.compiler.is_compiling():
        y_TD, _ = forward_operator(*tensors, weights, experts.activation, keep)
        return y_TD
    return _Loop.apply(experts.activation, keep, *tensors, *weights)


def _forward(
    x_TD: Tensor,
    gates_TK: Tensor,
    slot_TK: Tensor,
    granted_TK: Tensor,
    token_M: Tensor,
    rows_E: Tensor,
    weights: list[Tensor],
    activation: str,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    """Return (T, D) and, if ``keep``, the values before the activation, (P, M, H).

    Nothing else is kept for the backward: the hidden values are cheaper to compute again, and the outputs are not needed.
    """
    x_TD = with_zero_row(x_TD)
    y_MD, pre_PMH = x_TD.new_empty(len(token_M), x_TD.shape[1]), _new_pre(x_TD, weights, len(token_M) if keep else 0)
    for expert, rows in _spans(rows_E):
        pre_PCH = pre_PMH[:, rows] if keep else None
        _expert(x_TD.index_select(0, token_M[rows]), [weight[expert] for weight in weights], activation, y_MD[rows], pre_PCH)
    return weighted_rows(y_MD, gates_TK, slot_TK, granted_TK), pre_PMH


def _backward(
    dy_TD: Tensor,
    x_TD: Tensor,
    gates_TK: Tensor,
    slot_TK: Tensor,
    granted_TK: Tensor,
    token_M: Tensor,
    rows_E: Tensor,
    pre_PMH: Tensor,
    weights: list[Tensor],
    activation: str,
) -> list[Tensor]:
    """Return the gradients of x, of the gates and of each weight."""
    x_TD, dy_TD = with_zero_row(x_TD), with_zero_row(dy_TD)
    grads = [torch.zeros_like(weight) for weight in weights]
    gate_M = _gate_of_row(gates_TK, slot_TK, granted_TK, len(token_M)).to(dy_TD.dtype)
    dx_MD, dgate_M = x_TD.new_empty(len(token_M), x_TD.shape[1]), gates_TK.new_zeros(len(token_M))
    for expert, rows in _spans(rows_E):
        x_CD, dy_CD = x_TD.index_select(0, token_M[rows]), dy_TD.index_select(0, token_M[rows])
        own, own_grads = [weight[expert] for weight in weights], [grad[expert] for grad in grads]
        dgate_M[rows] = _expert_backward(x_CD, dy_CD, gate_M[rows, None], pre_PMH[:, rows], own, activation, own_grads, dx_MD[rows])
    return [weighted_rows(dx_MD, granted_TK, slot_TK, granted_TK), dgate_M[slot_TK].masked_fill_(~granted_TK, 0), *grads]


class _Loop(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, activation: str, keep: bool, *tensors: Tensor) -> Tensor:
        y_TD, pre_PMH = _forward(*tensors[:6], list(tensors[6:]), activation, keep)
        ctx.activation = activation
        ctx.save_for_backward(*tensors[:6], pre_PMH, *tensors[6:])
        return y_TD

    @staticmethod
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # checkpointing allows one look
        dx_TD, dgates_TK, *grads = _backward(dy_TD, *saved[:7], list(saved[7:]), ctx.activation)
        return None, None, dx_TD, dgates_TK, None, None, None, None, *grads


forward_operator = torch.library.custom_op("moetriage::expert_loop", _forward, mutates_args=())
backward_operator = torch.library.custom_op("moetriage::expert_loop_backward", _backward, mutates_args=())


@forward_operator.register_fake
def _(
    x_TD: Tensor, gates_TK: Any, slot_TK: Any, granted_TK: Any, token_M: Tensor, rows_E: Any, weights: Any, activation: str, keep: bool
) -> Any:
    return torch.empty_like(x_TD), _new_pre(x_TD, weights, len(token_M) if keep else 0)


@backward_operator.register_fake
def _(dy_TD: Any, x_TD: Tensor, gates_TK: Tensor, *rest: Any) -> list[Tensor]:
    return [torch.empty_like(like) for like in (x_TD, gates_TK, *rest[-2])]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, weights, activation, _ = inputs
    ctx.activation = activation
    ctx.save_for_backward(*tensors, output[1], *weights)


def _differentiate(ctx: Any, dy_TD: Tensor, _: Tensor) -> tuple[Any, ...]:
    saved = ctx.saved_tensors
    dx_TD, dgates_TK, *grads = backward_operator(dy_TD, *saved[:7], list(saved[7:]), ctx.activation)
    return dx_TD, dgates_TK, None, None, None, None, grads, None, None


forward_operator.register_autograd(_differentiate, setup_context=_save)


def _spans(rows_E: Tensor) -> Iterator[tuple[int, slice]]:
    """Yield the experts that have rows, and which."""
    start = 0
    for expert, n_rows in enumerate(rows_E.tolist()):
        if n_rows:
            yield expert, slice(start, start + n_rows)
        start += n_rows


def _new_pre(x_TD: Tensor, weights: list[Tensor], n_rows: int) -> Tensor:
    d_expert = weights[1].shape[1]
    return x_TD.new_empty(weights[0].shape[2] // d_expert, n_rows, d_expert)


# The two functions below are functions so that what they allocate is free again, and in the cache, for the next expert.


def _expert(x_CD: Tensor, weights: list[Tensor], activation: str, y_CD: Tensor, pre_PCH: Tensor | None) -> None:
    """Write one expert's result into ``y_CD`` and the values before the activation into ``pre_PCH``."""
    in_DI, down_HD, *biases = weights
    pre_CI = torch.addmm(biases[0], x_CD, in_DI) if biases else x_CD @ in_DI
    # Parts without gaps: silu takes three times as long on rows with gaps, copying costs a seventh of that.
    parts_CPH = pre_CI.view(len(x_CD), -1, down_HD.shape[0])
    parts_PCH = parts_CPH.transpose(0, 1).contiguous() if pre_PCH is None else pre_PCH.copy_(parts_CPH.transpose(0, 1))
    _, hidden_CH = _hidden(parts_PCH, activation)
    if biases:
        torch.addmm(biases[1], hidden_CH, down_HD, out=y_CD)
    else:
        torch.mm(hidden_CH, down_HD, out=y_CD)


def _expert_backward(
    x_CD: Tensor,
    dy_CD: Tensor,
    gate_C1: Tensor,
    pre_PCH: Tensor,
    weights: list[Tensor],
    activation: str,
    grads: list[Tensor],
    dx_CD: Tensor,
) -> Tensor:
    """Write one expert's gradients into ``grads`` and ``dx_CD``; returns that of the gates, (C,)."""
    in_DI, down_HD, *biases = weights
    silu_CH, hidden_CH = _hidden(pre_PCH, activation)
    # Without the gate: this is what the gate's own gradient needs.
    dhidden_CH = dy_CD @ down_HD.t()
    dgate_C = (hidden_CH * dhidden_CH).sum(dim=1, dtype=torch.promote_types(dy_CD.dtype, torch.float32))
    torch.mm(hidden_CH.mul_(gate_C1).t(), dy_CD, out=grads[1])
    dhidden_CH.mul_(gate_C1)
    if activation == "gelu":
        dpre_CI = torch.ops.aten.gelu_backward(dhidden_CH, pre_PCH[0])
    else:
        dpart_CH = torch.ops.aten.silu_backward(dhidden_CH * pre_PCH[1], pre_PCH[0])
        dpre_CI = torch.cat((dpart_CH, silu_CH.mul_(dhidden_CH)), dim=1)
    torch.mm(x_CD.t(), dpre_CI, out=grads[0])
    torch.mm(dpre_CI, in_DI.t(), out=dx_CD)
    if biases:
        dgate_C += (dy_CD @ biases[1]).to(dgate_C.dtype)
        torch.sum(dpre_CI, dim=0, out=grads[2])
        torch.mv(dy_CD.t(), gate_C1[:, 0], out=grads[3])
    return dgate_C


def _hidden(pre_PCH: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """Return silu of the gate (for gelu the values themselves) and the hidden values; both may be overwritten unless gelu."""
    if activation == "gelu":
        return pre_PCH[0], F.gelu(pre_PCH[0])
    silu_CH = F.silu(pre_PCH[0])
    return silu_CH, silu_CH * pre_PCH[1]


def _gate_of_row(gates_TK: Tensor, slot_TK: Tensor, granted_TK: Tensor, n_rows: int) -> Tensor:
    """Return the gate of each row, (M,); 0 in rows without a token."""
    rows_TK = torch.where(granted_TK, slot_TK, n_rows)
    return gates_TK.new_zeros(n_rows + 1).scatter_(0, rows_TK.flatten(), gates_TK.flatten())[:-1]
