"""RMSNorm as one differentiable step: activations in, normalised activations out, in the type that the next matrix product takes.

torch's own composes half a dozen elementwise operations on a CPU and keeps an intermediate for each, which makes it several times slower
than LayerNorm, for which there is a kernel. Here what goes back is written down once (the derivative of x / rms(x)), and all passes over
activations are in their own type: 16-bit rounding of a row's common factor is no more than that of each value in it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from moetriage.train.product_dtype import to_product_dtype


class _RmsNorm(torch.autograd.Function):
    """y = x * r * w with r = 1 / sqrt(mean(x^2) + eps)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True).to(torch.promote_types(x.dtype, torch.float32))
        inverse = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_().to(x.dtype)
        ctx.save_for_backward(x, weight_D, inverse)
        return (x * inverse).mul_(weight_D.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight_D, inverse = ctx.saved_tensors
        grad, normed, weight = grads[0], x * inverse, weight_D.to(x.dtype)
        product = grad * normed
        grad_weight_D = product.flatten(0, -2).sum(0)
        shift = (product @ weight).div_(-x.shape[-1]).unsqueeze(-1)
        grad_x = torch.mul(grad, weight, out=product).addcmul_(normed, shift).mul_(inverse)
        return grad_x, grad_weight_D.to(weight_D.dtype), None


class RMSNorm(nn.Module):
    """Divide by the root mean square over the last dimension and scale.

    Computes in, and returns, the type that autocast has for products, where that is on: several products of one input then do not cast it
    each for itself.
    """

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return _RmsNorm.apply(to_product_dtype(x), self.weight, self.eps)
