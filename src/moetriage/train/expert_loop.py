"""Experts on rows that lie one behind the other, one expert after the other: the fastest lossless way on a CPU.

In: tokens, gates and the experts granted. Out: the layer's (T, D) result. One expert's rows, hidden values and gradients stay in the
processor's cache from the gather to the last product; F.grouped_mm, or padding to the largest load, writes each intermediate of all experts
to memory and reads it back. The load is read on the host, so this neither compiles nor belongs on a GPU.

Legend: T tokens, E experts, K choices, D model width, H expert width, I = 2 H (gate and up side by side) or H, M rows of all experts
together, C rows of one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from moetriage.train.dispatch import ROW_MULTIPLE, sorted_slots, weighted_rows, with_zero_row
from moetriage.train.experts import Activation, Experts


@dataclass(frozen=True)
class _Shape:
    """What the function needs beside tensors. rows: per expert. keep: values before the activation are wanted for a backward."""

    activation: Activation
    rows: list[int]
    keep: bool

    def spans(self) -> Iterator[tuple[int, slice]]:
        """Yield the experts that have rows, and which."""
        start = 0
        for expert, n_rows in enumerate(self.rows):
            if n_rows:
                yield expert, slice(start, start + n_rows)
            start += n_rows


def run(experts: Experts, x_TD: Tensor, gates_TK: Tensor, expert_TK: Tensor) -> Tensor:
    """Return (T, D) of x's dtype: gather, experts and combine in one; -1 in ``expert_TK`` is nothing.

    Weights take x's dtype; the sum over choices is float32 inside.
    """
    slots, rows_E = sorted_slots(expert_TK, experts.num_experts, multiple=ROW_MULTIPLE)
    # Gate and up as one product: 16-bit ones of this size gain a third.
    weights = [torch.cat([weight.to(x_TD.dtype) for weight in experts.inputs()], dim=2), experts.down_proj.to(x_TD.dtype)]
    if experts.up_bias is not None and experts.down_bias is not None:
        weights += [experts.up_bias.to(x_TD.dtype), experts.down_bias.to(x_TD.dtype)]
    shape = _Shape(experts.activation, rows_E.tolist(), torch.is_grad_enabled())
    return _Loop.apply(shape, x_TD, gates_TK, slots.slot_TK, slots.granted_TK, slots.token_M, *weights)


class _Loop(torch.autograd.Function):
    """Keeps the values before the activation; the hidden ones are cheaper to compute again, and the outputs are not needed."""

    @staticmethod
    def forward(
        ctx: Any, shape: _Shape, x_TD: Tensor, gates_TK: Tensor, slot_TK: Tensor, granted_TK: Tensor, token_M: Tensor, *weights: Tensor
    ) -> Tensor:
        x_TD = with_zero_row(x_TD)
        n_rows = max(sum(shape.rows), 1)
        y_MD = x_TD.new_empty(n_rows, x_TD.shape[1])
        n_parts = weights[0].shape[2] // weights[1].shape[1]
        pre = [x_TD.new_empty(n_rows, weights[1].shape[1]) for _ in range(n_parts)] if shape.keep else []
        for expert, rows in shape.spans():
            own = [weight[expert] for weight in weights]
            _expert(x_TD.index_select(0, token_M[rows]), own, shape.activation, y_MD[rows], [part_MH[rows] for part_MH in pre])
        ctx.shape = shape
        ctx.n_parts = n_parts
        ctx.save_for_backward(x_TD, gates_TK, slot_TK, granted_TK, token_M, *pre, *weights)
        return weighted_rows(y_MD, gates_TK, slot_TK, granted_TK)

    @staticmethod
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor | None, ...]:
        shape: _Shape = ctx.shape
        x_TD, gates_TK, slot_TK, granted_TK, token_M, *rest = ctx.saved_tensors
        pre, weights = rest[: ctx.n_parts], rest[ctx.n_parts :]
        dy_TD = with_zero_row(dy_TD)
        grads = [torch.zeros_like(weight) if 0 in shape.rows else torch.empty_like(weight) for weight in weights]
        gate_M = _gate_of_row(gates_TK, slot_TK, granted_TK, len(token_M)).to(dy_TD.dtype)
        dx_MD = x_TD.new_empty(max(sum(shape.rows), 1), x_TD.shape[1])
        dgate_M = gates_TK.new_zeros(len(dx_MD))
        for expert, rows in shape.spans():
            x_CD, dy_CD = x_TD.index_select(0, token_M[rows]), dy_TD.index_select(0, token_M[rows])
            own, downs = [weight[expert] for weight in weights], [grad[expert] for grad in grads]
            parts = [part_MH[rows] for part_MH in pre]
            dgate_M[rows] = _expert_backward(x_CD, dy_CD, gate_M[rows, None], parts, own, shape.activation, downs, dx_MD[rows])
        dgates_TK = dgate_M[slot_TK].masked_fill_(~granted_TK, 0)
        return None, weighted_rows(dx_MD, granted_TK, slot_TK, granted_TK), dgates_TK, None, None, None, *grads


# The two functions below are functions so that what they allocate is free again, and in the cache, for the next expert.


def _expert(x_CD: Tensor, weights: list[Tensor], activation: Activation, y_CD: Tensor, pre: list[Tensor]) -> None:
    """Write one expert's result into ``y_CD`` and, unless it is empty, the values before the activation into ``pre``."""
    in_DI, down_HD, *biases = weights
    pre_CI = torch.addmm(biases[0], x_CD, in_DI) if biases else x_CD @ in_DI
    # Halves without gaps: silu takes three times as long on rows with gaps, copying costs a seventh of that.
    parts = list(pre_CI.split(down_HD.shape[0], dim=1))
    for kept_CH, part_CH in zip(pre, parts, strict=False):
        kept_CH.copy_(part_CH)
    hidden_CH = _hidden(pre or [part_CH.contiguous() for part_CH in parts], activation)[-1]
    if biases:
        torch.addmm(biases[1], hidden_CH, down_HD, out=y_CD)
    else:
        torch.mm(hidden_CH, down_HD, out=y_CD)


def _expert_backward(
    x_CD: Tensor,
    dy_CD: Tensor,
    gate_C1: Tensor,
    pre: list[Tensor],
    weights: list[Tensor],
    activation: Activation,
    grads: list[Tensor],
    dx_CD: Tensor,
) -> Tensor:
    """Write one expert's gradients into ``grads`` and ``dx_CD``; returns that of the gates, (C,)."""
    in_DI, down_HD, *biases = weights
    silu_CH, hidden_CH = _hidden(pre, activation)
    # Without the gate: this is what the gate's own gradient needs.
    dhidden_CH = dy_CD @ down_HD.t()
    dgate_C = (hidden_CH * dhidden_CH).sum(dim=1, dtype=torch.promote_types(dy_CD.dtype, torch.float32))
    torch.mm(hidden_CH.mul_(gate_C1).t(), dy_CD, out=grads[1])
    dhidden_CH.mul_(gate_C1)
    if activation == "gelu":
        dpre_CI = torch.ops.aten.gelu_backward(dhidden_CH, pre[0])
    else:
        dpart_CH = torch.ops.aten.silu_backward(dhidden_CH * pre[1], pre[0])
        dpre_CI = torch.cat((dpart_CH, silu_CH.mul_(dhidden_CH)), dim=1)
    torch.mm(x_CD.t(), dpre_CI, out=grads[0])
    torch.mm(dpre_CI, in_DI.t(), out=dx_CD)
    if biases:
        dgate_C += (dy_CD @ biases[1]).to(dgate_C.dtype)
        torch.sum(dpre_CI, dim=0, out=grads[2])
        torch.mv(dy_CD.t(), gate_C1[:, 0], out=grads[3])
    return dgate_C


def _hidden(pre: list[Tensor], activation: Activation) -> tuple[Tensor, Tensor]:
    """Return silu of the gate (for gelu the values themselves) and the hidden values; both may be overwritten unless gelu."""
    if activation == "gelu":
        return pre[0], F.gelu(pre[0])
    silu_CH = F.silu(pre[0])
    return silu_CH, silu_CH * pre[1]


def _gate_of_row(gates_TK: Tensor, slot_TK: Tensor, granted_TK: Tensor, n_rows: int) -> Tensor:
    """Return the gate of each row, (M,); 0 in rows without a token."""
    rows_TK = torch.where(granted_TK, slot_TK, n_rows)
    return gates_TK.new_zeros(n_rows + 1).scatter_(0, rows_TK.flatten(), gates_TK.flatten())[:-1]
