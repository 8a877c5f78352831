"""Experts on a CPU: a few at a time, from the gather of their rows to their last product.

In: tokens, gates, and who was granted what. Out: the layer's (T, D) result. What a few experts read and compute stays in the processor's
cache; one product over all experts, or F.grouped_mm, writes each intermediate to memory and reads it back, which costs as much as the
products do. Both directions are operators of their own, which torch.compile calls as they are. Row counts are read on the host, so this
is nothing for a GPU.

Legend: T tokens, E experts, of which N at a time, K choices, D model width, H expert width, P parts before the activation (gate and up,
or up alone), I = P * H, M rows of all experts together, C rows of one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from moetriage.train.dispatch import Slots, gate_of_row, sum_rows
from moetriage.train.experts import Experts

#: Most rows that are computed at a time where all experts have the same number. Of 5120, half at a time took least: fewer leave experts
#: alone in a product, which threads share worse than several, more give and take blocks that the C library returns to the system.
CHUNK_ROWS = 2560


def run(experts: Experts, x_TD: Tensor, gates_TK: Tensor, slots: Slots, rows_E: Tensor | None = None) -> Tensor:
    """Return (T, D) of x's dtype: gather, experts and combine in one. Exact zeros where nothing was granted.

    rows_E: rows of each expert, one expert behind the other; None if all have the same number, M / E. Weights take x's dtype; the sum over
    choices is float32 inside.
    """
    inputs = [weight.to(x_TD.dtype) for weight in experts.inputs()]
    if len(inputs) > 1 and x_TD.element_size() == 2:
        # Gate and up as one product: 16-bit ones gain a third, others nothing that is worth a copy of the weights.
        inputs = [torch.cat(inputs, dim=2)]
    weights = [*inputs, experts.down_proj.to(x_TD.dtype)]
    if experts.up_bias is not None and experts.down_bias is not None:
        weights += [experts.up_bias.to(x_TD.dtype)[:, None], experts.down_bias.to(x_TD.dtype)[:, None]]
    tensors = (x_TD, gates_TK, slots.slot_TK, slots.token_M, rows_E)
    keep = torch.is_grad_enabled()
    # The operator's first call imports all of torch's compiler, some seconds that only a compiled layer has to spend.
    if torch.compiler.is_compiling():
        return forward_operator(*tensors, weights, experts.activation, keep)[0]
    return _Loop.apply(experts.activation, keep, *tensors, *weights)


def _forward(
    x_TD: Tensor,
    gates_TK: Tensor,
    slot_TK: Tensor,
    token_M: Tensor,
    rows_E: Tensor | None,
    weights: list[Tensor],
    activation: str,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    """Return (T, D) and, if ``keep``, the values before the activation, (P, M, H).

    Nothing else is kept for the backward: the hidden values are cheaper to compute again, and the outputs are not needed.
    """
    n_rows, d_model = len(token_M), x_TD.shape[1]
    pre_PMH = _new_pre(x_TD, weights, activation, n_rows if keep else 0)
    y_MD = x_TD.new_empty(n_rows + 1, d_model)
    y_MD[-1] = 0
    x_TD, token_M = _readable(x_TD), _readable_tokens(x_TD, token_M)
    for experts, rows in _chunks(rows_E, len(weights[0]), n_rows):
        own = [weight[experts] for weight in weights]
        x_NCD, y_NCD = x_TD.index_select(0, token_M[rows]).view(len(own[0]), -1, d_model), y_MD[rows].view(len(own[0]), -1, d_model)
        _chunk(x_NCD, own, activation, y_NCD, pre_PMH[:, rows].unflatten(1, (len(own[0]), -1)) if keep else None)
    return sum_rows(y_MD, slot_TK, gates_TK), pre_PMH


def _backward(
    dy_TD: Tensor,
    x_TD: Tensor,
    gates_TK: Tensor,
    slot_TK: Tensor,
    token_M: Tensor,
    rows_E: Tensor | None,
    pre_PMH: Tensor,
    weights: list[Tensor],
    activation: str,
) -> list[Tensor]:
    """Return the gradients of x, of the gates and of each weight."""
    n_rows, d_model = len(token_M), x_TD.shape[1]
    gate_M = gate_of_row(gates_TK, slot_TK, n_rows).to(dy_TD.dtype)
    grads, idle = [torch.empty_like(weight) for weight in weights], [] if rows_E is None else (rows_E == 0).nonzero()[:, 0].tolist()
    for grad in grads:
        for expert in idle:
            grad[expert] = 0
    dx_MD, dgate_M = x_TD.new_empty(n_rows + 1, d_model), gates_TK.new_zeros(n_rows + 1)
    dx_MD[-1] = 0
    x_TD, dy_TD, token_M = _readable(x_TD), _readable(dy_TD), _readable_tokens(x_TD, token_M)
    for experts, rows in _chunks(rows_E, len(weights[0]), n_rows):
        own, own_grads = [weight[experts] for weight in weights], [grad[experts] for grad in grads]
        x_NCD, dy_NCD = (values.index_select(0, token_M[rows]).view(len(own[0]), -1, d_model) for values in (x_TD, dy_TD))
        pre_PNCH, gate_NC1 = pre_PMH[:, rows].unflatten(1, x_NCD.shape[:2]), gate_M[rows].view(len(own[0]), -1, 1)
        dx_NCD = dx_MD[rows].view_as(x_NCD)
        dgate_M[rows] = _chunk_backward(x_NCD, dy_NCD, gate_NC1, pre_PNCH, own, activation, own_grads, dx_NCD).flatten()
    return [sum_rows(dx_MD, slot_TK), dgate_M[slot_TK], *grads]


class _Loop(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, activation: str, keep: bool, *tensors: Tensor) -> Tensor:
        x_TD, gates_TK, slot_TK, token_M, rows_E, *weights = tensors
        y_TD, pre_PMH = _forward(x_TD, gates_TK, slot_TK, token_M, rows_E, weights, activation, keep)
        ctx.activation = activation
        ctx.save_for_backward(x_TD, gates_TK, slot_TK, token_M, rows_E, pre_PMH, *weights)
        return y_TD

    @staticmethod
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor | None, ...]:
        x_TD, gates_TK, slot_TK, token_M, rows_E, pre_PMH, *weights = ctx.saved_tensors  # checkpointing allows one look
        dx_TD, dgates_TK, *grads = _backward(dy_TD, x_TD, gates_TK, slot_TK, token_M, rows_E, pre_PMH, weights, ctx.activation)
        return None, None, dx_TD, dgates_TK, None, None, None, *grads


forward_operator = torch.library.custom_op("moetriage::expert_loop", _forward, mutates_args=())
backward_operator = torch.library.custom_op("moetriage::expert_loop_backward", _backward, mutates_args=())


@forward_operator.register_fake
def _(x_TD: Tensor, gates_TK: Any, slot_TK: Any, token_M: Tensor, rows_E: Any, weights: Any, activation: str, keep: bool) -> Any:
    return torch.empty_like(x_TD), _new_pre(x_TD, weights, activation, len(token_M) if keep else 0)


@backward_operator.register_fake
def _(dy_TD: Any, x_TD: Tensor, gates_TK: Tensor, *rest: Any) -> list[Tensor]:
    return [torch.empty_like(like) for like in (x_TD, gates_TK, *rest[-2])]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, weights, activation, _ = inputs
    ctx.activation = activation
    ctx.save_for_backward(*tensors, output[1], *weights)


def _differentiate(ctx: Any, dy_TD: Tensor, _: Tensor) -> tuple[Any, ...]:
    saved = ctx.saved_tensors
    dx_TD, dgates_TK, *grads = backward_operator(dy_TD, *saved[:6], list(saved[6:]), ctx.activation)
    return dx_TD, dgates_TK, None, None, None, grads, None, None


forward_operator.register_autograd(_differentiate, setup_context=_save)


def _chunks(rows_E: Tensor | None, num_experts: int, n_rows: int) -> Iterator[tuple[slice, slice]]:
    """Yield experts that are computed together, and their rows: one at a time, those with rows, unless all have the same number."""
    if rows_E is None:
        room = n_rows // num_experts
        step = -(-num_experts // -(-n_rows // CHUNK_ROWS))
        for start in range(0, num_experts, step):
            stop = min(start + step, num_experts)
            yield slice(start, stop), slice(start * room, stop * room)
        return
    start = 0
    for expert, rows in enumerate(rows_E.tolist()):
        if rows:
            yield slice(expert, expert + 1), slice(start, start + rows)
        start += rows


def _new_pre(x_TD: Tensor, weights: list[Tensor], activation: str, n_rows: int) -> Tensor:
    return x_TD.new_empty(2 if activation == "swiglu" else 1, n_rows, _split(weights, activation)[1].shape[1])


def _readable(x_TD: Tensor) -> Tensor:
    """Return x with at least one row."""
    return x_TD if len(x_TD) else x_TD.new_zeros(1, x_TD.shape[1])


def _readable_tokens(x_TD: Tensor, token_M: Tensor) -> Tensor:
    """Let empty rows read the last token, not zeros in a copy of x: nobody takes what they compute, their gate of 0 ends each gradient."""
    return token_M.clamp(max=max(len(x_TD) - 1, 0))


def _split(weights: list[Tensor], activation: str) -> tuple[list[Tensor], Tensor, list[Tensor]]:
    """Return the matrices that read the input (gate and up may be one), the one that writes the output, and the biases, if any."""
    if activation == "swiglu":
        return weights[:-1], weights[-1], []
    return weights[:1], weights[1], weights[2:]


# The two functions below are functions so that what they allocate is free again, and in the cache, for the next experts.


def _chunk(x_NCD: Tensor, weights: list[Tensor], activation: str, y_NCD: Tensor, pre_PNCH: Tensor | None) -> None:
    """Write some experts' results into ``y_NCD`` and, if they are wanted, the values before the activation into ``pre_PNCH``."""
    inputs, down_NHD, biases = _split(weights, activation)
    keep = pre_PNCH is not None
    if pre_PNCH is None:
        pre_PNCH = _new_pre(x_NCD[0], weights, activation, x_NCD.shape[0] * x_NCD.shape[1]).unflatten(1, x_NCD.shape[:2])
    if biases:
        torch.baddbmm(biases[0], x_NCD, inputs[0], out=pre_PNCH[0])
    elif len(inputs) < len(pre_PNCH):
        # Parts without gaps: silu takes three times as long on rows with gaps, copying costs a seventh of that.
        pre_PNCH.copy_(torch.bmm(x_NCD, inputs[0]).unflatten(2, (2, -1)).permute(2, 0, 1, 3))
    else:
        for weight_NDH, pre_NCH in zip(inputs, pre_PNCH, strict=True):
            torch.bmm(x_NCD, weight_NDH, out=pre_NCH)
    _, hidden_NCH = _hidden(pre_PNCH, activation, keep=keep)
    if biases:
        torch.baddbmm(biases[1], hidden_NCH, down_NHD, out=y_NCD)
    else:
        torch.bmm(hidden_NCH, down_NHD, out=y_NCD)


def _chunk_backward(
    x_NCD: Tensor,
    dy_NCD: Tensor,
    gate_NC1: Tensor,
    pre_PNCH: Tensor,
    weights: list[Tensor],
    activation: str,
    grads: list[Tensor],
    dx_NCD: Tensor,
) -> Tensor:
    """Write some experts' gradients into ``grads`` and ``dx_NCD``; returns that of the gates, (N, C)."""
    inputs, down_NHD, biases = _split(weights, activation)
    dinputs, ddown_NHD, dbiases = _split(grads, activation)
    silu_NCH, hidden_NCH = _hidden(pre_PNCH, activation, keep=True)
    # Without the gate: this is what the gate's own gradient needs.
    dhidden_NCH = torch.bmm(dy_NCD, down_NHD.transpose(1, 2))
    dgate_NC = (hidden_NCH * dhidden_NCH).sum(dim=2, dtype=torch.promote_types(dy_NCD.dtype, torch.float32))
    torch.bmm(hidden_NCH.mul_(gate_NC1).transpose(1, 2), dy_NCD, out=ddown_NHD)
    dhidden_NCH.mul_(gate_NC1)
    if activation == "gelu":
        dpre = [torch.ops.aten.gelu_backward(dhidden_NCH, pre_PNCH[0])]
    else:
        dpre = [torch.ops.aten.silu_backward(dhidden_NCH * pre_PNCH[1], pre_PNCH[0]), silu_NCH.mul_(dhidden_NCH)]
    if len(inputs) < len(dpre):
        dpre = [torch.cat(dpre, dim=2)]
    for dpre_NCI, dinput_NDI in zip(dpre, dinputs, strict=True):
        torch.bmm(x_NCD.transpose(1, 2), dpre_NCI, out=dinput_NDI)
    torch.bmm(dpre[0], inputs[0].transpose(1, 2), out=dx_NCD)
    for dpre_NCI, input_NDI in zip(dpre[1:], inputs[1:], strict=True):
        dx_NCD.baddbmm_(dpre_NCI, input_NDI.transpose(1, 2))
    if biases:
        dgate_NC += torch.bmm(dy_NCD, biases[1].transpose(1, 2))[..., 0]
        torch.sum(dpre[0], dim=1, keepdim=True, out=dbiases[0])
        torch.bmm(gate_NC1.transpose(1, 2), dy_NCD, out=dbiases[1])
    return dgate_NC


def _hidden(pre_PNCH: Tensor, activation: str, *, keep: bool) -> tuple[Tensor, Tensor]:
    """Return silu of the gate (for gelu the values themselves) and the hidden values; unless ``keep``, in the place of what comes in."""
    if activation == "gelu":
        return pre_PNCH[0], F.gelu(pre_PNCH[0]) if keep else torch.ops.aten.gelu_(pre_PNCH[0])
    silu_NCH = F.silu(pre_PNCH[0], inplace=not keep)
    return silu_NCH, silu_NCH * pre_PNCH[1] if keep else silu_NCH.mul_(pre_PNCH[1])
