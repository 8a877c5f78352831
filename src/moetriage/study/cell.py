"""One run of the study: train a condition's model from one seed, then measure it on held-out text.

In: the setting, a cell, the threshold. Out: one JSON-ready dict, which ``summary`` reads. The same arguments give the same numbers on the
same machine with the same number of threads. Knows no files but the data's.

Legend: B sequences, S positions, T = B * S tokens, E experts. A visit is one token at one MoE layer.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from moetriage.errors import UsageError
from moetriage.study.environment import environment
from moetriage.study.measures import Counts, Curves, margins
from moetriage.study.optimizer import new_optimizer
from moetriage.study.setting import Setting, repeatable
from moetriage.study.spec import Cell, Condition
from moetriage.train.lm import NanoMoE
from moetriage.train.optimum import optimum
from moetriage.train.policies import ONLINE
from moetriage.train.router import Routing
from moetriage.train.threshold import MarginMedian, median_margin
from moetriage.train.trainer import clip_gradients

Row = dict[str, Any]
#: Without drops it gives each token its two best experts and needs no threshold.
_BOTH_EXPERTS = Condition(policy="fixed-top2", capacity_factor=1.25)


def calibrate(setting: Setting) -> float:
    """Return the median margin of the calibration batches at the first seed's initialisation, with every token at its two best experts.

    The batches follow those that this seed trains on, so no step of it sees them.
    """
    spec = setting.spec
    with repeatable(setting.resources), torch.no_grad():
        model = setting.new_model(Cell(condition=_BOTH_EXPERTS, seed=spec.seeds[0]), threshold=0.0)
        batches = setting.training(spec.seeds[0])
        found = []
        for number in range(spec.calibration_batches):
            with setting.autocast():
                found.append(margins(model(*setting.batch(batches, spec.steps + number), drop_free=True)))
    return float(median_margin(torch.cat(found)))


def run_cell(setting: Setting, cell: Cell, threshold: float, on_step: Callable[[], None] = lambda: None) -> Row:
    """Train and measure one cell and return its result. on_step: called after each optimizer step. Raises UsageError if it diverges."""
    began = time.perf_counter()
    try:
        with repeatable(setting.resources):
            model = setting.new_model(cell, threshold)
            curves, seconds = _train(setting, cell, model, threshold, on_step)
            final = evaluate(setting, model, threshold)
    except UsageError as error:
        raise UsageError(f"cell {cell.name}: {error}") from error
    return {
        "condition": cell.condition.name,
        "seed": cell.seed,
        "environment": environment(setting.resources),
        "training": curves.as_dict(),
        "final": final,
        "step_seconds_median": statistics.median(seconds),
        "wall_seconds": time.perf_counter() - began,
    }


def _train(setting: Setting, cell: Cell, model: NanoMoE, threshold: float, on_step: Callable[[], None]) -> tuple[Curves, list[float]]:
    spec = setting.spec
    optimizer, schedule = new_optimizer(spec, model)
    following = MarginMedian(device=setting.resources.device) if cell.condition.policy == ONLINE else None
    curves, seconds = Curves(_fixed(model, threshold)), list[float]()
    batches = setting.training(cell.seed)
    model.train()
    for step in range(spec.steps):
        batch = setting.batch(batches, step)
        began = time.perf_counter()
        with setting.autocast():
            output = model(*batch)
        total = output.loss + sum(output.losses.values())
        optimizer.zero_grad(set_to_none=True)
        total.backward()
        clip_gradients(model, spec.clip_norm)
        optimizer.step()
        schedule.step()
        if following is not None:
            following.update(margins(output))
            set_threshold(model, following.value)
        loss = float(output.loss.detach())  # waits for the device, so that what is timed is done
        seconds.append(time.perf_counter() - began)
        curves.add(output, loss)
        if (step + 1) % spec.record_every == 0 or step + 1 == spec.steps:
            curves.record(step + 1, threshold if following is None else float(following.value))
        on_step()
    return curves, seconds


def evaluate(setting: Setting, model: NanoMoE, threshold: float) -> Row:
    """Measure a trained model on the held-out batches, with its policy's own drops and without any."""
    model.eval()
    batches, counts = setting.heldout(), Counts(_fixed(model, threshold))
    losses: dict[bool, list[float]] = {False: [], True: []}
    for number in range(setting.spec.heldout_batches):
        batch = setting.batch(batches, number)
        for drop_free in (False, True):
            with torch.no_grad(), setting.autocast(), probabilities(model) as probs:
                output = model(*batch, drop_free=drop_free)
            losses[drop_free].append(float(output.loss))
            if not drop_free:
                counts.add(output, [len(p) - optimum(p, plan.capacity) for p, plan in zip(probs, output.plans, strict=True)])
    return counts.as_dict() | {"loss": statistics.fmean(losses[False]), "loss_drop_free": statistics.fmean(losses[True])}


def set_threshold(model: NanoMoE, threshold: Tensor) -> None:
    """Let all layers compare margins with ``threshold`` (0-d) from now on."""
    for layer in model.moe_layers:
        assert layer.threshold is not None
        layer.threshold.copy_(threshold)


def _fixed(model: NanoMoE, threshold: float) -> float | None:
    """Return the threshold that visits are counted by: None where the layers have their own and count by that."""
    return threshold if model.moe_layers[0].threshold is None else None


@contextlib.contextmanager
def probabilities(model: NanoMoE) -> Iterator[list[Tensor]]:
    """Collect what each layer's router says, layer by layer, of the call inside."""
    found: list[Tensor] = []

    def keep(_router: nn.Module, _inputs: Any, routing: Routing) -> None:
        found.append(routing.probs_TE)

    hooks = [layer.router.register_forward_hook(keep) for layer in model.moe_layers]
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
