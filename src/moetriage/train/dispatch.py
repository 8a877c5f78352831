"""Bring tokens into their experts' buffers and the results back: gathers in both directions, in both passes.

In: what was granted (a plan, or chosen experts). Out: ``Slots``, the map between tokens and buffer rows, with ``gather`` and ``combine``
that use it. Knows nothing of the router or of what an expert computes.

Each row belongs to at most one token, so the backward of a gather is the gather the other way; PyTorch's own would scatter with additions,
several times as slow on a CPU. ``embedding_bag`` reads, weights and sums K rows in one pass, in float32 inside.

Legend: T tokens, E experts, K choices, D width, M rows of all buffers together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

#: What the rows of an expert are rounded up to on a CPU. oneDNN compiles a kernel for each shape, in about 0.5 ms, and keeps the last
#: thousand: with loads as they come, most 16-bit products would compile one (84 ms instead of 11 for two products of 32 experts).
ROW_MULTIPLE = 64


@dataclass(frozen=True)
class Slots:
    """The map between tokens and buffer rows; one past the end means none in both directions, and a row of zeros lies there.

    slot_TK: (T, K) int64, the row of each granted choice, M where nothing was granted. token_M: (M,) int64, the token in each row, T where
    it is empty.
    """

    slot_TK: Tensor
    token_M: Tensor


def padded_slots(expert_TK: Tensor, slot_TK: Tensor, num_experts: int, room: int) -> Slots:
    """Map a plan's grants to buffers of ``room`` rows per expert, M = num_experts * room; -1 means nothing granted."""
    n_rows = num_experts * room
    return _slots(torch.where(expert_TK >= 0, expert_TK * room + slot_TK, n_rows), n_rows)


def sorted_slots(expert_TK: Tensor, num_experts: int, *, multiple: int = 1) -> tuple[Slots, Tensor]:
    """Put the granted choices one behind the other by expert, in order of tokens; -1 means nothing granted.

    multiple: each expert starts at a multiple of so many rows, with empty rows before it. Also returns (E,) int64: the rows of each expert,
    rounded up to ``multiple``. M = T * K + E * (multiple - 1) whatever the load is, with all empty rows that are left at the end.
    """
    n_rows = expert_TK.numel() + num_experts * (multiple - 1)
    group_A, order_A = torch.sort(torch.where(expert_TK >= 0, expert_TK, num_experts).flatten(), stable=True)
    load_E = torch.zeros(num_experts + 1, dtype=torch.int64, device=order_A.device).scatter_add_(0, group_A, torch.ones_like(group_A))
    rows_E = (load_E + multiple - 1) // multiple * multiple
    skipped_E = (rows_E.cumsum(0) - rows_E) - (load_E.cumsum(0) - load_E)
    row_A = torch.arange(len(order_A), device=order_A.device) + skipped_E[group_A]
    slot_TK = torch.empty_like(order_A).scatter_(0, order_A, torch.where(group_A < num_experts, row_A, n_rows))
    return _slots(slot_TK.view_as(expert_TK), n_rows), rows_E[:-1]


def _slots(slot_TK: Tensor, n_rows: int) -> Slots:
    n_tokens, top_k = slot_TK.shape
    token_TK = torch.arange(n_tokens, device=slot_TK.device)[:, None].expand(n_tokens, top_k)
    token_M = slot_TK.new_full((n_rows + 1,), n_tokens).scatter_(0, slot_TK.flatten(), token_TK.flatten())
    return Slots(slot_TK, token_M[:-1])


def gather(x_TD: Tensor, slots: Slots) -> Tensor:
    """Return (M, D), each row its token's values; zeros in empty rows."""
    return _Gather.apply(x_TD, slots.slot_TK, slots.token_M)


def combine(y_MD: Tensor, gates_TK: Tensor, slots: Slots) -> Tensor:
    """Return (T, D) of y's dtype, each token's granted rows weighted by its gates and summed; exact zeros where nothing was granted."""
    return _Combine.apply(y_MD, gates_TK, slots.slot_TK, slots.token_M)


def with_zero_row(x_TD: Tensor) -> Tensor:
    """Return x with one row of zeros more at its end."""
    return torch.cat((x_TD, x_TD.new_zeros(1, *x_TD.shape[1:])))


def sum_rows(y_ND: Tensor, slot_TK: Tensor, weight_TK: Tensor | None = None) -> Tensor:
    """Return (T, D), the weighted sum of each token's K rows; row M of ``y_ND`` must be zeros."""
    return F.embedding_bag(slot_TK, y_ND, per_sample_weights=None if weight_TK is None else weight_TK.to(y_ND.dtype), mode="sum")


def gate_of_row(gates_TK: Tensor, slot_TK: Tensor, n_rows: int) -> Tensor:
    """Return (M,), the gate of the choice in each row, 0 in empty ones."""
    return gates_TK.new_zeros(n_rows + 1).scatter_(0, slot_TK.flatten(), gates_TK.flatten())[:-1]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, slot_TK: Tensor, token_M: Tensor) -> Tensor:
        ctx.save_for_backward(slot_TK)
        return with_zero_row(x_TD).index_select(0, token_M)

    @staticmethod
    def backward(ctx: Any, dx_MD: Tensor) -> tuple[Tensor, None, None]:
        (slot_TK,) = ctx.saved_tensors
        return sum_rows(with_zero_row(dx_MD), slot_TK), None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_MD: Tensor, gates_TK: Tensor, slot_TK: Tensor, token_M: Tensor) -> Tensor:
        ctx.save_for_backward(y_MD, gates_TK, slot_TK, token_M)
        return sum_rows(with_zero_row(y_MD), slot_TK, gates_TK)

    @staticmethod
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor, Tensor, None, None]:
        y_MD, gates_TK, slot_TK, token_M = ctx.saved_tensors
        dy_MD = with_zero_row(dy_TD).index_select(0, token_M)
        dgate_M = with_zero_row((y_MD * dy_MD).sum(dim=1, dtype=gates_TK.dtype))
        gate_M = gate_of_row(gates_TK, slot_TK, len(token_M)).to(dy_MD.dtype)
        return dy_MD.mul_(gate_M[:, None]), dgate_M[slot_TK], None, None
