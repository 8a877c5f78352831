"""Repeat a step until it changes nothing, in eager mode and inside one compiled graph.

Comes in: a function from a tensor to one of the same shape and type. Goes out: its fixed point. Deliberately unknown here: why it has one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch._higher_order_ops.while_loop import while_loop


def fixpoint(step: Callable[[Tensor], Tensor], start: Tensor) -> Tensor:
    """Return the first x of start, step(start), step(step(start)), ... with step(x) == x. Each round waits for the device once."""
    if not torch.compiler.is_compiling():
        before, after = start, step(start)
        while not torch.equal(before, after):
            before, after = after, step(after)
        return after

    def changes(before: Tensor, after: Tensor) -> Tensor:
        return (before != after).any()

    def again(before: Tensor, after: Tensor) -> tuple[Tensor, Tensor]:
        return after.clone(), step(after)  # the operator wants outputs that share no memory with its inputs

    result: Tensor = while_loop(changes, again, (start.clone(), step(start)))[1]
    return result
