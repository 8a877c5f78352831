"""Experts on rows that lie one behind the other, one expert after the other: the fastest lossless way on a CPU.

In: tokens, gates, slots and the load of each expert. Out: the layer's (T, D) result. One expert's rows, hidden values and gradients stay
in the processor's cache from the gather to the last product, and only real rows are computed; F.grouped_mm, or padding to the largest
load, writes each intermediate of all experts to memory and reads it back. The load is read on the host, so this neither compiles nor
belongs on a GPU.

Legend: T tokens, E experts, K choices, D model width, H expert width, M rows of all experts together, C rows of one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from moetriage.train.dispatch import Slots, weighted_rows
from moetriage.train.experts import Activation, Experts, activate


@dataclass(frozen=True)
class _Shape:
    """What the function needs beside tensors. kept: intermediates are wanted for a backward."""

    activation: Activation
    loads: list[int]
    biased: bool
    kept: bool

    def spans(self) -> Iterator[tuple[int, slice]]:
        """Yield the experts that have rows, and which."""
        start = 0
        for expert, load in enumerate(self.loads):
            if load:
                yield expert, slice(start, start + load)
            start += load


def run(experts: Experts, x_TD: Tensor, gates_TK: Tensor, slots: Slots, load_E: Tensor) -> Tensor:
    """Return (T, D) of x's dtype: gather, experts and combine in one. Weights take x's dtype; the sum over choices is float32 inside."""
    weights = [*experts.inputs(), experts.down_proj]
    if experts.up_bias is not None and experts.down_bias is not None:
        weights += [experts.up_bias, experts.down_bias]
    shape = _Shape(experts.activation, load_E.tolist(), experts.up_bias is not None, torch.is_grad_enabled())
    cast = [weight.to(x_TD.dtype) for weight in weights]
    return _Loop.apply(shape, x_TD, gates_TK, slots.slot_TK, slots.granted_TK, slots.token_M, *cast)


class _Loop(torch.autograd.Function):
    """Saves the values before the activation; the hidden ones are cheaper to compute again, and the outputs are not needed."""

    @staticmethod
    def forward(
        ctx: Any, shape: _Shape, x_TD: Tensor, gates_TK: Tensor, slot_TK: Tensor, granted_TK: Tensor, token_M: Tensor, *weights: Tensor
    ) -> Tensor:
        inputs, down_EHD, up_bias_EH, down_bias_ED = _split(weights, shape.biased)
        n_rows, d_expert = sum(shape.loads), down_EHD.shape[1]
        y_MD = x_TD.new_empty(max(n_rows, 1), x_TD.shape[1])
        pre_MH = [x_TD.new_empty(n_rows, d_expert) for _ in inputs] if shape.kept else []
        for expert, rows in shape.spans():
            x_CD = x_TD.index_select(0, token_M[rows])
            out = [values_MH[rows] for values_MH in pre_MH] if shape.kept else [x_TD.new_empty(len(x_CD), d_expert) for _ in inputs]
            for weight_EDH, pre_CH in zip(inputs, out, strict=True):
                _product(x_CD, weight_EDH[expert], None if up_bias_EH is None else up_bias_EH[expert], pre_CH)
            hidden_CH = activate(out, shape.activation)
            _product(hidden_CH, down_EHD[expert], None if down_bias_ED is None else down_bias_ED[expert], y_MD[rows])
        ctx.shape = shape
        ctx.save_for_backward(x_TD, gates_TK, slot_TK, granted_TK, token_M, *pre_MH, *weights)
        return weighted_rows(y_MD, gates_TK, slot_TK, granted_TK)

    @staticmethod
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor | None, ...]:
        shape: _Shape = ctx.shape
        x_TD, gates_TK, slot_TK, granted_TK, token_M, *rest = ctx.saved_tensors
        n_inputs = 2 if shape.activation == "swiglu" else 1
        pre_MH, weights = rest[:n_inputs], rest[n_inputs:]
        inputs, down_EHD, _, down_bias_ED = _split(weights, shape.biased)
        grads = [torch.zeros_like(weight) if 0 in shape.loads else torch.empty_like(weight) for weight in weights]
        dinputs, ddown_EHD, dup_bias_EH, ddown_bias_ED = _split(grads, shape.biased)
        gate_M = _by_row(gates_TK, slot_TK, granted_TK, len(token_M)).to(x_TD.dtype)
        dx_MD = x_TD.new_empty(max(sum(shape.loads), 1), x_TD.shape[1])
        dgate_M = gates_TK.new_zeros(max(sum(shape.loads), 1))
        for expert, rows in shape.spans():
            x_CD, dy_CD = x_TD.index_select(0, token_M[rows]), dy_TD.index_select(0, token_M[rows])
            pre = [values_MH[rows] for values_MH in pre_MH]
            hidden_CH = activate(pre, shape.activation)
            dhidden_CH = dy_CD @ down_EHD[expert].t()
            dgate_M[rows] = (hidden_CH * dhidden_CH).sum(dim=1, dtype=gates_TK.dtype)
            gate_C1 = gate_M[rows, None]
            torch.mm(hidden_CH.mul_(gate_C1).t(), dy_CD, out=ddown_EHD[expert])
            if ddown_bias_ED is not None and down_bias_ED is not None and dup_bias_EH is not None:
                dgate_M[rows] += (dy_CD @ down_bias_ED[expert]).to(gates_TK.dtype)
                ddown_bias_ED[expert] = gate_M[rows] @ dy_CD
            dpre = _activate_backward(pre, dhidden_CH.mul_(gate_C1), shape.activation)
            for dvalue_CH, dweight_EDH in zip(dpre, dinputs, strict=True):
                torch.mm(x_CD.t(), dvalue_CH, out=dweight_EDH[expert])
            if dup_bias_EH is not None:
                dup_bias_EH[expert] = dpre[0].sum(dim=0)
            torch.mm(dpre[0], inputs[0][expert].t(), out=dx_MD[rows])
            for dvalue_CH, weight_EDH in zip(dpre[1:], inputs[1:], strict=True):
                dx_MD[rows].addmm_(dvalue_CH, weight_EDH[expert].t())
        dx_TD = weighted_rows(dx_MD, granted_TK, slot_TK, granted_TK)
        dgates_TK = dgate_M[slot_TK].masked_fill_(~granted_TK, 0)
        return None, dx_TD, dgates_TK, None, None, None, *grads


def _split(weights: Any, biased: bool) -> tuple[Any, Tensor, Tensor | None, Tensor | None]:
    """Return input matrices, the down matrix, and the two biases or None."""
    if biased:
        return weights[:-3], weights[-3], weights[-2], weights[-1]
    return weights[:-1], weights[-1], None, None


def _product(x_CI: Tensor, weight_IO: Tensor, bias_O: Tensor | None, out_CO: Tensor) -> None:
    if bias_O is None:
        torch.mm(x_CI, weight_IO, out=out_CO)
    else:
        torch.addmm(bias_O, x_CI, weight_IO, out=out_CO)


def _activate_backward(pre: list[Tensor], dhidden_CH: Tensor, activation: Activation) -> list[Tensor]:
    """Return the gradients of ``pre``; may overwrite ``dhidden_CH``."""
    if activation == "gelu":
        return [torch.ops.aten.gelu_backward(dhidden_CH, pre[0])]
    gate_CH, up_CH = pre
    dup_CH = F.silu(gate_CH).mul_(dhidden_CH)
    return [torch.ops.aten.silu_backward(dhidden_CH.mul_(up_CH), gate_CH), dup_CH]


def _by_row(gates_TK: Tensor, slot_TK: Tensor, granted_TK: Tensor, n_rows: int) -> Tensor:
    """Return the gate of each row, (M,); 0 in rows without a token."""
    rows_TK = torch.where(granted_TK, slot_TK, n_rows)
    return gates_TK.new_zeros(n_rows + 1).scatter_(0, rows_TK.flatten(), gates_TK.flatten())[:-1]
