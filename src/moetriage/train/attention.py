"""Causal self-attention as GPT-2 and Qwen3 have it: hidden states in, hidden states out.

Style "qwen3": a norm on each head's queries and keys, then rotary positions in Hugging Face's half-split order (Su et al. 2021), and
fewer key/value heads than query heads where the settings say so. Style "gpt2": biases and nothing of that; positions come with the
embedding. Knows no cache: this is for training and for scoring whole texts.

Legend: B sequences, S positions, D model width, N query heads, M key/value heads, H width of a head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from moetriage.train.causal_attention import causal_attention
from moetriage.train.model_config import ModelConfig
from moetriage.train.norms import RMSNorm


class Rotary(nn.Module):
    """Cosine and sine of every position's angles. Not saved: they follow from the settings."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width = config.head_width
        frequencies = 1.0 / config.rope_base ** (torch.arange(0, width, 2, dtype=torch.float32) / width)
        angles_SH = torch.outer(torch.arange(config.context, dtype=torch.float32), frequencies).repeat(1, 2)
        # The sign of "rotate half" is in the table, so that rotating is a roll and two products.
        sign_H = torch.cat([-torch.ones(width // 2), torch.ones(width // 2)])
        self.register_buffer("cos_SH", angles_SH.cos(), persistent=False)
        self.register_buffer("signed_sin_SH", angles_SH.sin() * sign_H, persistent=False)

    def forward(self, x_BNSH: Tensor) -> Tensor:
        """Rotate each head by its position's angles; (B, heads, S, H) in and out."""
        length = x_BNSH.shape[-2]
        cos_SH, sin_SH = (table[:length].to(x_BNSH.dtype) for table in (self.cos_SH, self.signed_sin_SH))
        return _Turn.apply(x_BNSH, cos_SH, sin_SH)


class _Turn(torch.autograd.Function):
    """Back goes the gradient turned the other way; autograd would keep and pass over each product on its own."""

    @staticmethod
    def forward(ctx: Any, x_BNSH: Tensor, cos_SH: Tensor, sin_SH: Tensor) -> Tensor:
        ctx.save_for_backward(cos_SH, sin_SH)
        return _turned(x_BNSH, cos_SH, sin_SH)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        cos_SH, sin_SH = ctx.saved_tensors
        return _turned(grads[0], cos_SH, -sin_SH), None, None


def _turned(x_BNSH: Tensor, cos_SH: Tensor, sin_SH: Tensor) -> Tensor:
    return (x_BNSH * cos_SH).addcmul_(x_BNSH.roll(x_BNSH.shape[-1] // 2, dims=-1), sin_SH)


class Attention(nn.Module):
    """One layer's attention; ``forward`` takes and returns (B, S, D)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_width
        qwen3 = config.style == "qwen3"
        widths = [heads * self.head_dim for heads in (config.n_head, config.kv_heads, config.kv_heads)]
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(config.d_model, width, bias=not qwen3) for width in widths)
        self.o_proj = nn.Linear(widths[0], config.d_model, bias=not qwen3)
        self.q_norm, self.k_norm = (RMSNorm(self.head_dim, config.norm_eps) if qwen3 else nn.Identity() for _ in range(2))

    def forward(self, x_BSD: Tensor, rotary: Rotary | None = None) -> Tensor:
        """Attend to this and earlier positions; ``rotary`` turns queries and keys, None leaves them."""
        q_BNSH = self.q_norm(self._heads(self.q_proj(x_BSD)))
        k_BMSH = self.k_norm(self._heads(self.k_proj(x_BSD)))
        v_BMSH = self._heads(self.v_proj(x_BSD))
        if rotary is not None:
            q_BNSH, k_BMSH = rotary(q_BNSH), rotary(k_BMSH)
        return self.o_proj(causal_attention(q_BNSH, k_BMSH, v_BMSH).transpose(1, 2).flatten(2))

    def _heads(self, x_BSD: Tensor) -> Tensor:
        return x_BSD.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
