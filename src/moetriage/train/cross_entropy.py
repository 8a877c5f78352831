"""Output projection and cross entropy in one step, in chunks: hidden states and the projection's weight in, the mean loss out.

The logits of a batch are the largest tensor of a small model (8,192 tokens by 4,096 words are 134 MB in float32, three times over with
the softmax and its gradient), and on a CPU the time goes into moving them. A chunk's logits stay in the processor's cache, and since the
loss is where differentiation starts, their gradient is taken at once: nothing of that size is kept. The products run in the type of the
hidden states, the softmax in float32.

Legend: T tokens, D model width, V words of the vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

#: Tokens whose logits are held in float32 at a time: 2 MiB at 4,096 words, a core's cache.
CHUNK = 128
#: Tokens whose gradient is held at a time. Products with the weight are taken of all of them: a gradient of the weight is as large as they.
GROUP = 2048
#: Targets below zero do not count.
IGNORE = -1


class _LinearCrossEntropy(torch.autograd.Function):
    """Of a softmax's gradient, p - 1[target], the products with p are taken before p is divided by its sum: rows are scaled where they are
    D wide and not V. The target's own part is a row of the weight."""

    @staticmethod
    def forward(ctx: Any, keep: bool, hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor) -> Tensor:
        weight = weight_VD.to(hidden_TD.dtype)
        counted_T = targets_T >= 0
        share_T = counted_T / counted_T.sum().clamp(min=1)
        targets_T = targets_T.clamp(min=0)
        grad_hidden_TD = torch.empty_like(hidden_TD) if keep else hidden_TD[:0]
        grad_weight_VD = torch.zeros_like(weight_VD if keep else weight_VD[:0], dtype=torch.promote_types(weight_VD.dtype, torch.float32))
        nats_T = torch.empty_like(share_T)
        for start in range(0, len(targets_T), GROUP):
            group = slice(start, start + GROUP)
            nats_T[group], sum_T, exp_TV = _exponentials(hidden_TD[group], weight, targets_T[group], kept=keep)
            if keep:
                scale_T1 = (share_T[group] / sum_T).unsqueeze(1)
                torch.mm(exp_TV, weight, out=grad_hidden_TD[group]).mul_(scale_T1.to(weight.dtype))
                grad_weight_VD += exp_TV.T @ (hidden_TD[group] * scale_T1).to(weight.dtype)
        if keep:
            own_TD = share_T.unsqueeze(1)
            grad_hidden_TD -= (weight[targets_T] * own_TD).to(weight.dtype)
            grad_weight_VD.index_add_(0, targets_T, hidden_TD.to(grad_weight_VD.dtype) * own_TD, alpha=-1)
        ctx.save_for_backward(grad_hidden_TD, grad_weight_VD.to(weight_VD.dtype))
        return (nats_T * share_T).sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, Tensor, Tensor, None]:
        grad_hidden_TD, grad_weight_VD = ctx.saved_tensors
        return None, grad_hidden_TD * grads[0].to(grad_hidden_TD.dtype), grad_weight_VD * grads[0].to(grad_weight_VD.dtype), None


def linear_cross_entropy(hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor) -> Tensor:
    """Return the mean of -log softmax(hidden @ weight^T)[target] over the targets that are not below zero, in float32; 0 if there is none.

    hidden_TD: (T, D), any floating type, in which the products are computed. weight_VD: (V, D). targets_T: (T,) int64.
    The gradient reaches hidden states and weight; there is no second one.
    """
    # Inside, where a gradient is needed looks the same with grad mode off.
    loss: Tensor = _LinearCrossEntropy.apply(torch.is_grad_enabled(), hidden_TD, weight_VD, targets_T)
    return loss


def _exponentials(hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor, *, kept: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return each token's loss, the sum of its exp(logit - highest), and, if ``kept``, these themselves in the hidden states' type."""
    exp_TV = hidden_TD.new_empty(len(targets_T) if kept else 0, weight_VD.shape[0])
    nats, sums = [], []
    for start in range(0, len(targets_T), CHUNK):
        chunk = slice(start, start + CHUNK)
        logits_TV = hidden_TD[chunk] @ weight_VD.T
        # Plain passes: the fused softmax of a CPU takes longer than all of them.
        shifted_TV = logits_TV.to(torch.promote_types(logits_TV.dtype, torch.float32)) - logits_TV.amax(1, keepdim=True)
        picked_T = shifted_TV.gather(1, targets_T[chunk].unsqueeze(1)).squeeze(1)
        sums.append(shifted_TV.exp_().sum(1))
        nats.append(sums[-1].log() - picked_T)
        if kept:
            exp_TV[chunk] = shifted_TV
    return torch.cat(nats), torch.cat(sums), exp_TV
