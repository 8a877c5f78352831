"""One optimizer step, and the state that steps change: a model and batches in, losses and counts out. Knows no files and no clock.

Everything that a step leaves behind is in ``state_dict`` (the optimizer's moments, a running median, torch's generator) or in the model's
own, so a run that is loaded again goes on as if it had not ended.

Legend: B sequences, S positions, E experts.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moetriage.errors import UsageError
from moetriage.train.lm import LMOutput, NanoMoE
from moetriage.train.losses import loss_free_bias_update
from moetriage.train.metrics import RoutingStats
from moetriage.train.policies import ONLINE
from moetriage.train.threshold import MarginMedian
from moetriage.train.train_config import TrainConfig

_RNG = "rng"
_MEDIAN = "median"
#: What AdamW keeps of each parameter.
_MOMENTS = ("step", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What a step was. ``loss`` is the cross entropy in nats a token, ``losses`` the auxiliary ones; ``stats`` has an entry a layer."""

    loss: float
    losses: dict[str, float]
    grad_norm: float
    learning_rate: float
    stats: tuple[RoutingStats, ...]


class Trainer:
    """Holds a model, its optimizer and how many steps were taken (``steps_done``)."""

    def __init__(self, model: NanoMoE, config: TrainConfig) -> None:
        """Raises UsageError if the settings are wrong or the context is longer than the model's."""
        config.validate()
        if config.context > model.config.context:
            raise UsageError(f"--context {config.context}: the model's own is {model.config.context}")
        self.model = model.train()
        self.config = config
        self.steps_done = 0
        self._optimizer = adamw(model, learning_rate=config.learning_rate, betas=config.betas, weight_decay=config.weight_decay)
        self._median = MarginMedian() if model.config.moe.policy == ONLINE else None

    def step(self, tokens_BS: Tensor, targets_BS: Tensor) -> StepResult:
        """Learn from one batch. Raises UsageError if the loss is not finite; the weights are those of before then."""
        with precision(self.config.precision, tokens_BS.device.type):
            out = self.model(tokens_BS, targets_BS)
        assert out.loss is not None
        auxiliary = list(out.losses.values())
        loss, *others = torch.stack([out.loss.detach(), *(value.detach() for value in auxiliary)]).tolist()
        torch.stack([out.loss, *auxiliary]).sum().backward()
        grad_norm = clip_gradients(self.model, self.config.clip)
        for what, value in (("loss", loss), ("gradient's norm", grad_norm)):
            if not math.isfinite(value):
                raise UsageError(
                    f"step {self.steps_done + 1}: the {what} is {value}: training diverged; begin again with an --lr below "
                    f"{self.config.learning_rate}"
                )
        rate = self.config.rate(self.steps_done)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._follow(out)
        self.steps_done += 1
        losses = dict(zip(out.losses, others, strict=True))
        return StepResult(loss=loss, losses=losses, grad_norm=grad_norm, learning_rate=rate, stats=out.stats)

    def state_dict(self) -> dict[str, Tensor]:
        """Return all state that is not the model's, by names that fit into one file of tensors."""
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        state = {
            f"optimizer.{names[parameter]}|{key}": value
            for parameter, values in self._optimizer.state.items()
            for key, value in values.items()
        }
        if self._median is not None:
            state |= {f"{_MEDIAN}.{key}": value for key, value in self._median.state_dict().items()}
        return state | {_RNG: torch.get_rng_state()}

    def load_state_dict(self, state: dict[str, Tensor], steps_done: int) -> None:
        """Go on from a saved state after ``steps_done`` steps. Raises UsageError for one of another model, and one that is damaged."""
        parameters = dict(self.model.named_parameters())
        self._check_state(state, parameters)
        self._optimizer.state.clear()
        for name, value in state.items():
            if name.startswith("optimizer."):
                parameter, _, key = name.removeprefix("optimizer.").partition("|")
                self._optimizer.state[parameters[parameter]][key] = value
        if self._median is not None:
            prefix = f"{_MEDIAN}."
            self._median.load_state_dict({key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)})
        torch.set_rng_state(state[_RNG])
        self.steps_done = steps_done

    def _check_state(self, state: dict[str, Tensor], parameters: dict[str, nn.Parameter]) -> None:
        """Raise UsageError unless every parameter has its moments, of its shape and finite: a step without them would be another step."""
        wanted: dict[str, Tensor] = {_RNG: torch.get_rng_state()}
        for name, parameter in parameters.items():
            step = torch.zeros((), dtype=torch.float32)
            wanted |= {f"optimizer.{name}|{key}": like for key, like in zip(_MOMENTS, (step, parameter, parameter), strict=True)}
        if self._median is not None:
            wanted |= {f"{_MEDIAN}.{key}": value for key, value in self._median.state_dict().items()}
        for name in sorted(wanted.keys() | state.keys()):
            there, here = ((tuple(of[name].shape), of[name].dtype) if name in of else "missing" for of in (state, wanted))
            if there != here:
                raise UsageError(f"the state of training does not fit the model: {name} is {there} there and {here} here")
            if not bool(state[name].isfinite().all()):
                raise UsageError(f"the state of training is damaged: {name} holds NaN or inf")
        try:
            torch.Generator().set_state(state[_RNG])
        except RuntimeError as error:
            raise UsageError(f"the state of training is damaged: {_RNG} is none of torch's generator ({error})") from error

    @torch.no_grad()
    def _follow(self, out: LMOutput) -> None:
        """Move what follows training without a gradient: selection biases, and the threshold of capsel2-online (one for all layers)."""
        rate = self.model.config.moe.loss_free_bias_rate
        for layer, stats in zip(self.model.moe_layers, out.stats, strict=True):
            if rate:
                layer.router.add_bias(loss_free_bias_update(stats.expert_load_E, rate))
        if self._median is not None:
            self._median.update(torch.cat([plan.margin_T for plan in out.plans if plan is not None]))
            for layer in self.model.moe_layers:
                assert layer.threshold is not None
                layer.threshold.copy_(self._median.value)


def precision(name: str, device_type: str = "cpu") -> contextlib.AbstractContextManager[None]:
    """Return the context in which a model computes in "bf16" (autocast) or "fp32" (as it is)."""
    context: contextlib.AbstractContextManager[None] = torch.autocast(device_type, dtype=torch.bfloat16, enabled=name == "bf16")
    return context


@contextlib.contextmanager
def repeatable(threads: int | None = None) -> Iterator[None]:
    """Let what is computed inside depend on seeds and the number of threads alone; torch's switches are put back."""
    before, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.set_num_threads(threads or before)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # a tenth of a step, for memory that is written before it is read
    try:
        yield
    finally:
        torch.set_num_threads(before)
        torch.use_deterministic_algorithms(deterministic)
        torch.utils.deterministic.fill_uninitialized_memory = filled


def adamw(model: nn.Module, *, learning_rate: float, betas: tuple[float, float], weight_decay: float) -> torch.optim.AdamW:
    """Return AdamW for ``model``: weights and embeddings decay, norms and biases do not, those that are stacked by expert included."""
    decayed: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        (others if "norm" in name or name.endswith("bias") else decayed).append(parameter)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    # One kernel for all parameters: a tenth of a second for the study's 62 million on one core, and half a second without.
    return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, fused=True)


def clip_gradients(model: nn.Module, max_norm: float) -> float:
    """Scale the gradients down to ``max_norm`` and return their norm; torch's own call multiplies all of them even where it is by 1."""
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    norm = nn.utils.get_total_norm([parameter.grad for parameter in parameters])
    if norm > max_norm:
        nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return float(norm)
