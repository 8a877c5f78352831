"""Causal attention with a backward that a CPU runs well: queries, keys and values in, the weighted values out.

torch's fused kernel for CPUs is fast forwards, but its backward in bfloat16 takes eight times as long. So where a gradient in 16 bits is
wanted on a CPU, rows of queries are taken in blocks that see only the keys before them, each block is a few matrix products, and its
probabilities are kept: half the time in all. Everything else goes to torch's.

Legend: B sequences, S positions, N query heads, M key/value heads, G = N / M query heads that share one, H width of a head, R rows of a
block.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

#: Queries of a block: below, products get too small; above, too many masked products are computed (64, 256 and 512 were slower).
BLOCK = 128


def causal_attention(q_BNSH: Tensor, k_BMSH: Tensor, v_BMSH: Tensor) -> Tensor:
    """Return (B, N, S, H): each position's values, weighted by softmax(q k^T / sqrt(H)) over this and earlier positions.

    Query head n uses key head n // (N / M), as in Hugging Face's models.
    """
    sixteen_bits = q_BNSH.dtype == torch.bfloat16 and q_BNSH.device.type == "cpu"
    if sixteen_bits and torch.is_grad_enabled() and not torch.compiler.is_compiling():
        return _Blocks.apply(q_BNSH, k_BMSH, v_BMSH)
    grouped = q_BNSH.shape[1] != k_BMSH.shape[1]
    return F.scaled_dot_product_attention(q_BNSH, k_BMSH, v_BMSH, is_causal=True, enable_gqa=grouped)


class _Blocks(torch.autograd.Function):
    """The query heads of a group lie behind each other as rows of one product, so that shared keys are neither copied nor summed up."""

    @staticmethod
    def forward(ctx: Any, q_BNSH: Tensor, k_BMSH: Tensor, v_BMSH: Tensor) -> Tensor:
        # Keys are fewer than queries, so it is they that are scaled.
        scaled = k_BMSH * k_BMSH.shape[-1] ** -0.5
        q, k, v = _grouped(q_BNSH, k_BMSH.shape[1]), scaled.flatten(0, 1), v_BMSH.flatten(0, 1)
        out, kept = torch.empty_like(q), []
        for start, end in _blocks(q.shape[2]):
            scores = torch.bmm(_rows(q, start, end), k[:, :end].transpose(1, 2))
            _per_head(scores, q.shape[1])[..., start:] += _later_masked(end - start, q)
            probs = scores.softmax(-1)
            out[:, :, start:end] = _per_head(torch.bmm(probs, v[:, :end]), q.shape[1])
            kept.append(probs)
        ctx.save_for_backward(q, k, v, *kept)
        return out.view(q_BNSH.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, *kept = ctx.saved_tensors
        dout = _grouped(grads[0], k.shape[0] // grads[0].shape[0])
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for (start, end), probs in zip(_blocks(q.shape[2]), kept, strict=True):
            dout_rows = _rows(dout, start, end)
            dv[:, :end].baddbmm_(probs.transpose(1, 2), dout_rows)
            dprobs = torch.bmm(dout_rows, v[:, :end].transpose(1, 2))
            dscores = torch.ops.aten._softmax_backward_data(dprobs, probs, -1, probs.dtype)
            dq[:, :, start:end] = _per_head(torch.bmm(dscores, k[:, :end]), q.shape[1])
            dk[:, :end].baddbmm_(dscores.transpose(1, 2), _rows(q, start, end))
        like_kv = (grads[0].shape[0], -1, *k.shape[1:])
        return dq.view(grads[0].shape), dk.mul_(k.shape[-1] ** -0.5).view(like_kv), dv.view(like_kv)


def _blocks(length: int) -> Iterator[tuple[int, int]]:
    return ((start, min(start + BLOCK, length)) for start in range(0, length, BLOCK))


def _grouped(x_BNSH: Tensor, heads: int) -> Tensor:
    """(B, N, S, H) as (B * M, G, S, H)."""
    return x_BNSH.reshape(x_BNSH.shape[0] * heads, -1, *x_BNSH.shape[2:])


def _rows(x: Tensor, start: int, end: int) -> Tensor:
    """Positions of a block, all heads of a group behind each other: (B * M, G * R, H)."""
    return x[:, :, start:end].flatten(1, 2)


def _per_head(rows: Tensor, group: int) -> Tensor:
    """(B * M, G * R, any) as (B * M, G, R, any)."""
    return rows.unflatten(1, (group, -1))


def _later_masked(length: int, like: Tensor) -> Tensor:
    return torch.full((length, length), -torch.inf, dtype=like.dtype, device=like.device).triu(1)
