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

#: Tokens whose logits are held at a time: 8 MiB in float32 at 4,096 words.
CHUNK = 512
#: Targets below zero do not count.
IGNORE = -1


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor) -> Tensor:
        needs_grad = any(ctx.needs_input_grad)
        weight = weight_VD.to(hidden_TD.dtype)
        count = (targets_T >= 0).sum().clamp(min=1)
        total = torch.zeros((), dtype=torch.float32, device=hidden_TD.device)
        grad_hidden_TD = torch.empty_like(hidden_TD) if needs_grad else None
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=torch.float32) if needs_grad else None
        for start in range(0, len(targets_T), CHUNK):
            rows, targets = hidden_TD[start : start + CHUNK], targets_T[start : start + CHUNK]
            probs_TV, nats_T = _softmax(rows @ weight.T, targets)
            total += nats_T.sum()
            if grad_hidden_TD is not None and grad_weight_VD is not None:
                grad_TV = _grad_of_logits(probs_TV, targets, count).to(weight.dtype)
                torch.mm(grad_TV, weight, out=grad_hidden_TD[start : start + CHUNK])
                grad_weight_VD += grad_TV.T @ rows
        if needs_grad:
            ctx.save_for_backward(grad_hidden_TD, grad_weight_VD)
            ctx.weight_dtype = weight_VD.dtype
        return total / count

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        grad_hidden_TD, grad_weight_VD = ctx.saved_tensors
        return grad_hidden_TD * grads[0].to(grad_hidden_TD.dtype), (grad_weight_VD * grads[0]).to(ctx.weight_dtype), None


def linear_cross_entropy(hidden_TD: Tensor, weight_VD: Tensor, targets_T: Tensor) -> Tensor:
    """Return the mean of -log softmax(hidden @ weight^T)[target] over the targets that are not below zero, in float32; 0 if there is none.

    hidden_TD: (T, D), any floating type, in which the products are computed. weight_VD: (V, D). targets_T: (T,) int64.
    The gradient reaches hidden states and weight; there is no second one.
    """
    loss: Tensor = _LinearCrossEntropy.apply(hidden_TD, weight_VD, targets_T)
    return loss


def _softmax(logits_TV: Tensor, targets_T: Tensor) -> tuple[Tensor, Tensor]:
    """Return the probabilities (float32) and each token's loss in nats, 0 where the target does not count."""
    logits_TV = logits_TV.float()
    log_total_T = logits_TV.logsumexp(-1)
    picked_T = logits_TV.gather(1, targets_T.clamp(min=0).unsqueeze(1)).squeeze(1)
    nats_T = (log_total_T - picked_T).masked_fill(targets_T < 0, 0.0)
    return logits_TV.sub_(log_total_T.unsqueeze(1)).exp_(), nats_T


def _grad_of_logits(probs_TV: Tensor, targets_T: Tensor, count: Tensor) -> Tensor:
    """Turn the probabilities, in place, into the gradient of the mean loss by the logits."""
    scale_T = (targets_T >= 0).to(probs_TV.dtype) / count
    probs_TV.scatter_add_(1, targets_T.clamp(min=0).unsqueeze(1), probs_TV.new_full((len(targets_T), 1), -1.0))
    return probs_TV.mul_(scale_T.unsqueeze(1))
