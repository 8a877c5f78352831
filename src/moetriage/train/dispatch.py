"""Bring tokens into their experts' buffers and the results back: gathers in both directions, in both passes.

In: what was granted (a plan, or chosen experts). Out: ``Slots``, the map between tokens and buffer rows, with ``gather`` and ``combine``
that use it. Knows nothing of the router or of what an expert computes.

Each row belongs to at most one token, so the backward of a gather is the gather the other way; PyTorch's own would scatter with
additions, several times as slow on a CPU. ``embedding_bag`` reads, weights and sums K rows in one pass, in float32 inside.

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
    """The map between tokens and buffer rows.

    slot_TK: (T, K) int64, the row of each granted choice. A choice that was not granted points to another row of the same token, or to 0.
    granted_TK: (T, K) bool. token_M: (M,) int64, the token in each row, T where the row is empty.
    """

    slot_TK: Tensor
    granted_TK: Tensor
    token_M: Tensor


def padded_slots(expert_TK: Tensor, slot_TK: Tensor, num_experts: int, room: int) -> Slots:
    """Map a plan's grants to buffers of ``room`` rows per expert, M = num_experts * room; -1 means nothing granted."""
    n_tokens, top_k = expert_TK.shape
    granted_TK = expert_TK >= 0
    rows_TK = torch.where(granted_TK, expert_TK * room + slot_TK, num_experts * room)
    token_TK = torch.arange(n_tokens, device=expert_TK.device)[:, None].expand(n_tokens, top_k)
    # One row more than there are catches what was not granted.
    token_M = rows_TK.new_full((num_experts * room + 1,), n_tokens).scatter_(0, rows_TK.flatten(), token_TK.flatten())
    return Slots(_own_rows(rows_TK, granted_TK), granted_TK, token_M[:-1])


def sorted_slots(expert_TK: Tensor, num_experts: int, *, multiple: int = 1) -> tuple[Slots, Tensor]:
    """Put the granted choices one behind the other by expert; -1 means nothing granted.

    multiple: each expert starts at a multiple of so many rows, with empty rows before it. Also returns (E,) int64: the rows of each expert,
    rounded up to ``multiple``. M = T * K + E * (multiple - 1) whatever the load is, with all empty rows that are left at the end.
    """
    n_tokens, top_k = expert_TK.shape
    granted_TK = expert_TK >= 0
    group_A, order_A = torch.sort(torch.where(granted_TK, expert_TK, num_experts).flatten(), stable=True)
    load_E = torch.zeros(num_experts + 1, dtype=torch.int64, device=order_A.device).scatter_add_(0, group_A, torch.ones_like(group_A))
    rows_E = (load_E + multiple - 1) // multiple * multiple
    n_rows = n_tokens * top_k + num_experts * (multiple - 1)
    skipped_E = (rows_E.cumsum(0) - rows_E) - (load_E.cumsum(0) - load_E)
    row_A = torch.arange(len(order_A), device=order_A.device) + skipped_E[group_A]
    slot_TK = torch.empty_like(order_A).scatter_(0, order_A, row_A).view_as(expert_TK)
    row_A = torch.where(group_A < num_experts, row_A, n_rows)
    token_M = row_A.new_full((n_rows + 1,), n_tokens).scatter_(0, row_A, order_A // top_k)
    return Slots(_own_rows(slot_TK, granted_TK), granted_TK, token_M[:-1]), rows_E[:-1]


def _own_rows(slot_TK: Tensor, granted_TK: Tensor) -> Tensor:
    """Let choices that were not granted point to a granted row of the same token, or to 0: other tokens' values then never reach it."""
    slot_TK = slot_TK.masked_fill(~granted_TK, -1)
    # Without tokens there is nothing to take a maximum of.
    return slot_TK if slot_TK.numel() == 0 else torch.where(granted_TK, slot_TK, slot_TK.amax(dim=1, keepdim=True).clamp(min=0))


def gather(x_TD: Tensor, slots: Slots) -> Tensor:
    """Return (M, D), each row its token's values; zeros in empty rows."""
    return _Gather.apply(x_TD, slots.slot_TK, slots.granted_TK, slots.token_M)


def combine(y_MD: Tensor, gates_TK: Tensor, slots: Slots) -> Tensor:
    """Return (T, D) of y's dtype, each token's granted rows weighted by its gates and summed; exact zeros where nothing was granted."""
    return _Combine.apply(y_MD, gates_TK, slots.slot_TK, slots.granted_TK, slots.token_M)


def weighted_rows(y_MD: Tensor, weight_TK: Tensor, slot_TK: Tensor, granted_TK: Tensor) -> Tensor:
    """Return (T, D), the weighted sum of each token's granted rows; ``weight_TK`` has to be 0 at the others."""
    y_TD = F.embedding_bag(slot_TK, y_MD, per_sample_weights=weight_TK.to(y_MD.dtype), mode="sum")
    # Tokens without a grant point at row 0, and 0 * inf there would not be 0.
    return y_TD.masked_fill_(~granted_TK.any(dim=1, keepdim=True), 0)


def with_zero_row(x_TD: Tensor) -> Tensor:
    """Return (T + 1, D): a row of zeros at the end, which empty rows read."""
    return torch.cat((x_TD, x_TD.new_zeros(1, x_TD.shape[1])))


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, slot_TK: Tensor, granted_TK: Tensor, token_M: Tensor) -> Tensor:
        ctx.save_for_backward(slot_TK, granted_TK)
        return with_zero_row(x_TD).index_select(0, token_M)

    @staticmethod
    def backward(ctx: Any, dx_MD: Tensor) -> tuple[Tensor, None, None, None]:
        slot_TK, granted_TK = ctx.saved_tensors
        return weighted_rows(dx_MD.contiguous(), granted_TK, slot_TK, granted_TK), None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y_MD: Tensor, gates_TK: Tensor, slot_TK: Tensor, granted_TK: Tensor, token_M: Tensor) -> Tensor:
        ctx.save_for_backward(y_MD, gates_TK, slot_TK, granted_TK, token_M)
        return weighted_rows(y_MD.contiguous(), gates_TK, slot_TK, granted_TK)

    @staticmethod
    def backward(ctx: Any, dy_TD: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        y_MD, gates_TK, slot_TK, granted_TK, token_M = ctx.saved_tensors
        dy_MD = with_zero_row(dy_TD).index_select(0, token_M)
        dgate_M = (y_MD * dy_MD).sum(dim=1, dtype=gates_TK.dtype)
        dgates_TK = dgate_M[slot_TK].masked_fill_(~granted_TK, 0)
        rows_TK = torch.where(granted_TK, slot_TK, len(token_M))
        gate_M = dy_MD.new_zeros(len(token_M) + 1).scatter_(0, rows_TK.flatten(), gates_TK.to(dy_MD.dtype).flatten())
        return dy_MD.mul_(gate_M[:-1, None]), dgates_TK, None, None, None
