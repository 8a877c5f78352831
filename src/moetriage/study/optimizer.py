"""The optimizer that all conditions share: spec and model in, AdamW and its schedule out."""

from __future__ import annotations

import math

from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from moetriage.study.spec import StudySpec
from moetriage.train.trainer import adamw


def new_optimizer(spec: StudySpec, model: nn.Module) -> tuple[AdamW, LambdaLR]:
    """Return the AdamW of ``moetriage train`` and the schedule to step with it."""
    adam = adamw(model, learning_rate=spec.learning_rate, betas=spec.betas, weight_decay=spec.weight_decay)
    return adam, LambdaLR(adam, lambda step: rate_factor(spec, step))


def rate_factor(spec: StudySpec, step: int) -> float:
    """Return the share of the learning rate for a step, counted from 0."""
    if step < spec.warmup_steps:
        return (step + 1) / spec.warmup_steps
    progress = (step - spec.warmup_steps) / max(1, spec.steps - 1 - spec.warmup_steps)
    return spec.final_lr_fraction + (1 - spec.final_lr_fraction) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
