"""Settings of a training run as a frozen dataclass, and the presets that the command line offers. Needs no torch.

In: what a caller, a preset or a run's JSON says. Out: one validated ``TrainConfig`` that ``trainer`` and ``loop`` go by.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from moetriage.errors import UsageError
from moetriage.train import model_config
from moetriage.train.model_config import ModelConfig
from moetriage.train.moe_config import is_number

#: Sizes beyond these are slips; a batch of them would not fit into any memory.
MAX_STEPS, _MAX_BATCH = 10_000_000, 65_536
#: Whole numbers, with the least and the most that each may be.
_WHOLE = {
    "steps": (1, MAX_STEPS),
    "batch": (1, _MAX_BATCH),
    "context": (1, _MAX_BATCH),
    "save_every": (1, MAX_STEPS),
    "seed": (0, 2**32 - 1),
}


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How a model is trained.

    steps: optimizer steps in all; the learning rate ends at 0 with the last one, so a run cannot be prolonged.
    batch, context: sequences of a step and their length in tokens.
    learning_rate: the highest, reached after ``warmup_fraction`` of the steps and falling in a straight line from there: at a given
        number of steps that ends lower than a cosine (Bergsma et al. 2025).
    weight_decay: of matrices, not of norms and biases. betas: of AdamW. clip: highest norm of the gradient, above 0.
    precision: "bf16" computes in 16 bits where autocast holds that to be safe; weights, router and loss stay in 32.
    save_every: steps between checkpoints, each of which also measures a part of the held-out text.
    """

    steps: int
    batch: int
    context: int
    learning_rate: float
    seed: int = 0
    precision: Literal["fp32", "bf16"] = "fp32"
    warmup_fraction: float = 0.02
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0
    save_every: int = 200

    def validate(self) -> None:
        """Raise UsageError for a value that cannot work."""
        for name, (least, most) in _WHOLE.items():
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
                raise UsageError(f"{_flag(name)} {value}: must be a whole number from {least} to {most}")
        if not (is_number(self.learning_rate) and 0 < self.learning_rate <= 1):
            raise UsageError(f"--lr {self.learning_rate}: must be above 0 and at most 1; AdamW wants about 0.002 here")
        if self.precision not in ("fp32", "bf16"):
            raise UsageError(f"--precision {self.precision}: must be fp32 or bf16")
        if not (is_number(self.warmup_fraction) and 0 <= self.warmup_fraction < 1):
            raise UsageError(f"warmup_fraction {self.warmup_fraction}: must be a number from 0 up to below 1")
        if not (is_number(self.weight_decay) and 0 <= self.weight_decay < math.inf):
            raise UsageError(f"weight_decay {self.weight_decay}: must be a finite number from 0 up")
        if len(self.betas) != 2 or not all(is_number(beta) and 0 <= beta < 1 for beta in self.betas):
            raise UsageError(f"betas {self.betas}: must be two numbers from 0 up to below 1")
        if not (is_number(self.clip) and 0 < self.clip < math.inf):
            raise UsageError(f"clip {self.clip}: must be a finite number above 0, as 0 would make every gradient 0")

    def rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        warmup = max(1, round(self.steps * self.warmup_fraction))
        if step < warmup:
            return self.learning_rate * (step + 1) / warmup
        return self.learning_rate * (self.steps - step) / max(1, self.steps - warmup)

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.context

    def as_dict(self) -> dict[str, Any]:
        """Return the settings as JSON-ready values, in field order."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TrainConfig:
        """Return the validated settings that ``as_dict`` gave. Raises UsageError if they are not such."""
        try:
            config = cls(**{**values, "betas": tuple(values["betas"])})
        except (TypeError, KeyError) as error:
            raise UsageError(f"not the settings of a training run: {error}; was it written by another version?") from error
        config.validate()
        return config


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A model and how it is trained. ``model`` takes vocab_size and context."""

    model: Callable[..., ModelConfig]
    train: TrainConfig


#: What ``--preset`` takes.
PRESETS = {
    "bundled": Preset(
        model=model_config.bundled,
        train=TrainConfig(steps=2000, batch=8, context=512, learning_rate=2e-3, precision="bf16", save_every=250),
    ),
    "study": Preset(
        model=model_config.study,
        train=TrainConfig(steps=500, batch=4, context=128, learning_rate=3e-4, save_every=100),
    ),
    "tiny": Preset(
        model=model_config.tiny,
        train=TrainConfig(steps=200, batch=8, context=64, learning_rate=3e-3, save_every=50),
    ),
}
