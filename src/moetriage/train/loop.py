"""A training run from its first step or its newest checkpoint to its last: data and settings in, checkpoints and a curve of losses out.

What a step does is ``trainer``'s business, what lies where ``run_folder``'s and ``checkpoint``'s. A run that is killed goes on from its
newest checkpoint to the very losses that it would have had. Knows no terminal: callers are told of each step and asked whether to stop.
"""

from __future__ import annotations

import contextlib
import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moetriage import __version__
from moetriage.errors import UsageError
from moetriage.train.checkpoint import load_model, newest, open_checkpoint, save_checkpoint
from moetriage.train.data import Batches, Data
from moetriage.train.evaluate import bits_per_byte
from moetriage.train.files import damaged, sole_writer
from moetriage.train.lm import NanoMoE
from moetriage.train.metrics import combine
from moetriage.train.model_config import ModelConfig
from moetriage.train.moe_config import is_number
from moetriage.train.run_folder import RunFolder
from moetriage.train.train_config import MAX_STEPS, TrainConfig
from moetriage.train.trainer import StepResult, Trainer

#: Held-out tokens that are scored at each checkpoint: enough to see the curve, a few seconds' work.
_SAMPLE_TOKENS = 16_384
#: Steps whose time is not measured, and those whose is.
_WARM_STEPS, _TIMED_STEPS = 3, 5
#: Part of the time asked for that goes into steps; the rest is left for checkpoints and held-out text.
_STEP_SHARE = 0.95
_EARLIER = "without this folder, the run goes on from the one before"


@dataclass(frozen=True, kw_only=True)
class Progress:
    """What a caller is told after each step. ``tokens_per_second`` is that of this call's steps."""

    step: int
    steps: int
    loss: float
    tokens_per_second: float


@dataclass(frozen=True, kw_only=True)
class FitResult:
    """How a call of ``fit`` ended. ``finished``: all steps are done; if not, it was asked to stop and the run can go on."""

    model: NanoMoE
    step: int
    finished: bool
    seconds: float


def fit(
    run: RunFolder,
    data: Data,
    *,
    on_step: Callable[[Progress], None] = lambda _progress: None,
    stop: Callable[[], bool] = lambda: False,
    clock: Callable[[], float] = time.monotonic,
) -> FitResult:
    """Train up to the run's last step, from its newest checkpoint if it has one.

    on_step: called after each step. stop: asked after each step; if it says so, a checkpoint is saved and the call ends. ``seconds`` of the
    result, and of the losses' lines, count all calls.
    Raises UsageError for data that are not the run's, a diverging loss, and a checkpoint that cannot be written or read, and
    a folder that another process trains in.
    """
    check_data(run, data)
    with sole_writer(run.path), _old_objects_left_alone():
        return _fit(run, data, on_step, stop, clock)


def _fit(
    run: RunFolder, data: Data, on_step: Callable[[Progress], None], stop: Callable[[], bool], clock: Callable[[], float]
) -> FitResult:
    trainer, before = _restored(run)
    batches = batches_of(run.train, data)
    tokens = run.train.tokens_per_step
    first, start = trainer.steps_done, clock()
    run.cut(first)
    saved = first

    def elapsed() -> float:
        return before + clock() - start

    try:
        while trainer.steps_done < run.train.steps:
            result = trainer.step(*_tensors(batches, trainer.steps_done))
            done = trainer.steps_done
            run.write(_row(done, result, done * tokens, elapsed()))
            rate = (done - first) * tokens / max(clock() - start, 1e-9)
            on_step(Progress(step=done, steps=run.train.steps, loss=result.loss, tokens_per_second=rate))
            stopped = stop()
            if stopped or done % run.train.save_every == 0 or done == run.train.steps:
                if not stopped:
                    run.write({"step": done, "heldout_bits_per_byte": _sampled(trainer.model, run.train, data)})
                _save(run, trainer, data, elapsed())
                saved = done
            if stopped:
                break
    finally:
        run.close()
    assert saved == trainer.steps_done
    finished = trainer.steps_done == run.train.steps
    return FitResult(model=trainer.model, step=trainer.steps_done, finished=finished, seconds=elapsed())


@contextlib.contextmanager
def _old_objects_left_alone() -> Iterator[None]:
    """Keep Python from searching what torch's modules hold, half a million objects, for garbage again and again: 3 % of a step."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def about_run(data: Data, threads: int | None = None) -> dict[str, Any]:
    """Return what losses depend on beside the settings, for ``RunFolder.begin``. threads: None is torch's number."""
    return {
        "data": data.digest,
        "threads": threads or torch.get_num_threads(),
        "moetriage": __version__,
        "torch": str(torch.__version__),
    }


def measure_step_seconds(
    model: ModelConfig,
    train: TrainConfig,
    data: Data,
    clock: Callable[[], float] = time.monotonic,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> float:
    """Return the median time of a step, by taking a few with a model that is thrown away. progress: called with steps done and in all."""
    trainer, batches = _new_trainer(model, train), batches_of(train, data)
    times = []
    for step in range(_WARM_STEPS + _TIMED_STEPS):
        start = clock()
        trainer.step(*_tensors(batches, step))
        times.append(clock() - start)
        progress(len(times), _WARM_STEPS + _TIMED_STEPS)
    return statistics.median(times[_WARM_STEPS:])


def steps_within(minutes: float, step_seconds: float) -> int:
    """Return how many steps fit into ``minutes``, with a rest for saving and measuring; at least 1. Raises UsageError for too many."""
    steps = max(1, int(minutes * 60 * _STEP_SHARE / step_seconds))
    if steps > MAX_STEPS:
        most = MAX_STEPS * step_seconds / 60 / _STEP_SHARE
        raise UsageError(
            f"--minutes {minutes:.10g}: at {step_seconds:.3g} s a step these are {steps} steps, and a run has at most {MAX_STEPS}; "
            f"give about {most:.3g} at most"
        )
    return steps


def check_data(run: RunFolder, data: Data) -> None:
    """Raise UsageError if a run was begun on other data, or the data are too few for it."""
    if run.about["data"] != data.digest:
        raise UsageError(f"{data.folder}: not the data that {run.path} was begun with (digest {data.digest}, not {run.about['data']})")
    batches_of(run.train, data)


def _new_trainer(model: ModelConfig, train: TrainConfig) -> Trainer:
    torch.manual_seed(train.seed)
    return Trainer(NanoMoE(model), train)


def _restored(run: RunFolder) -> tuple[Trainer, float]:
    """Return the trainer as of the newest checkpoint, and the seconds that it took until then."""
    if newest(run.path) is None:
        return _new_trainer(run.model, run.train), 0.0
    checkpoint = open_checkpoint(run.path)
    with damaged(checkpoint.folder, hint=_EARLIER):
        if checkpoint.config != run.model or not 0 <= checkpoint.step <= run.train.steps:
            raise UsageError(f"step {checkpoint.step} of another run: its settings, or {run.train.steps} steps, are not this run's")
        seconds = checkpoint.about["seconds"]
        if not (is_number(seconds) and 0 <= seconds < math.inf):
            raise UsageError(f"is damaged (seconds {seconds!r} is no time that training took); {_EARLIER}")
        trainer = Trainer(load_model(checkpoint), run.train)
        trainer.load_state_dict(checkpoint.trainer_state(), checkpoint.step)
        return trainer, float(seconds)


def _save(run: RunFolder, trainer: Trainer, data: Data, seconds: float) -> None:
    save_checkpoint(
        run.path,
        trainer.steps_done,
        config=run.model,
        weights=trainer.model.state_dict(),
        trainer_state=trainer.state_dict(),
        tokenizer=data.tokenizer_path.read_bytes(),
        about={"seconds": seconds, "train": run.train.as_dict(), "run": run.about},
    )


def batches_of(train: TrainConfig, data: Data) -> Batches:
    """Return the batches of a run. Raises UsageError if the data are too few for one."""
    batches = Batches(stream=data.train, batch=train.batch, context=train.context, seed=train.seed)
    batches.validate()
    return batches


def _tensors(batches: Batches, step: int) -> tuple[Tensor, Tensor]:
    tokens_BS, targets_BS = (torch.from_numpy(ids) for ids in batches.at(step))
    return tokens_BS, targets_BS


def _sampled(model: NanoMoE, train: TrainConfig, data: Data) -> float:
    """Return the bits per byte of the start of the held-out text, as many bytes as its tokens have on average."""
    count = min(len(data.heldout), _SAMPLE_TOKENS)
    n_bytes = float(data.manifest["heldout"]["bytes"]) * count / len(data.heldout)
    return bits_per_byte(model, data.heldout.read(0, count), n_bytes, batch=train.batch, compute=train.precision)


def _row(step: int, result: StepResult, tokens: int, seconds: float) -> dict[str, Any]:
    stats = combine(result.stats)
    row = {"step": step, "tokens": tokens, "loss": result.loss, **result.losses, "grad_norm": result.grad_norm}
    row |= {"learning_rate": result.learning_rate, "seconds": round(seconds, 3)}
    return row | {"uncovered": int(stats.uncovered) / max(int(stats.tokens), 1)}
