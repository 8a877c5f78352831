"""RMSNorm as one differentiable step: activations in, normalised activations out, in the type that the next matrix product takes.

torch's own composes half a dozen elementwise operations on a CPU and keeps an intermediate for each, which makes it several times slower
than LayerNorm, for which there is a kernel. Here what goes back is written down once (the derivative of x / rms(x)).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class _RmsNorm(torch.autograd.Function):
    """y = x * r * w with r = 1 / sqrt(mean(x^2) + eps), in float32 whatever comes in."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_D: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        x_32 = x.float()
        inverse = torch.linalg.vector_norm(x_32, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight_D, inverse)
        return (x_32 * inverse).mul_(weight_D).to(dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight_D, inverse = ctx.saved_tensors
        grad, normed = grads[0].float(), x.float() * inverse
        product = grad * normed
        # Both sums are matrix products: those are parallel and read their input once.
        grad_weight_D = product.flatten(0, -2).sum(0)
        shift = (product @ weight_D.float()).div_(x.shape[-1]).unsqueeze(-1)
        grad_x = (grad * weight_D).sub_(normed.mul_(shift)).mul_(inverse)
        return grad_x.to(x.dtype), grad_weight_D.to(weight_D.dtype), None, None


class RMSNorm(nn.Module):
    """Divide by the root mean square over the last dimension and scale.

    Returns the type that autocast computes in, where that is on, so that several products do not cast one input each for itself.
    """

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        return _RmsNorm.apply(x, self.weight, self.eps, dtype)
