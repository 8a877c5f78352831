"""The type of a matrix product under autocast, for code that casts once what several products take. Tensor in, tensor out."""

from __future__ import annotations

import torch
from torch import Tensor


def to_product_dtype(x: Tensor) -> Tensor:
    """Return x as autocast would give it to a matrix product: x itself where autocast is off."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x
