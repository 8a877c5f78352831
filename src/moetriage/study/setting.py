"""What all cells of a study share: the spec, the data, the device, and how numbers are made to repeat.

In: a spec and a folder of data. Out: batches, new models, a context in which torch is repeatable. Trains nothing and measures nothing.

Legend: B sequences, S positions.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moetriage.errors import UsageError
from moetriage.study.spec import Cell, StudySpec
from moetriage.train import trainer
from moetriage.train.data import Batches, Data, open_data
from moetriage.train.lm import NanoMoE
from moetriage.train.shards import TokenStream

MAX_JOBS = 64
#: Held-out batches are the same for every seed.
_HELDOUT_SEED = 0


@dataclass(frozen=True, kw_only=True)
class Resources:
    """What a run may use. threads: of each job; None: the processors, divided by the jobs. device: cpu, cuda or cuda:N."""

    jobs: int = 1
    threads: int | None = None
    device: str = "cpu"

    def validate(self) -> None:
        """Raise UsageError for a number out of range or a device that is not there."""
        for flag, value in (("--jobs", self.jobs), ("--threads", self.threads)):
            if value is not None and not 1 <= value <= MAX_JOBS:
                raise UsageError(f"{flag} {value}: must be between 1 and {MAX_JOBS}")
        kind, _, number = self.device.partition(":")
        if kind not in ("cpu", "cuda") or (number and not (number.isdecimal() and len(number) < 5)) or (kind == "cpu" and number):
            raise UsageError(f"--device {self.device}: must be cpu, cuda or cuda:N")
        if kind == "cuda" and int(number or 0) >= torch.cuda.device_count():
            raise UsageError(f"--device {self.device}: PyTorch sees {torch.cuda.device_count()} CUDA devices here; use cpu")

    @property
    def threads_of_a_job(self) -> int:
        """Return how many threads a job computes on."""
        return self.threads or max(1, len(os.sched_getaffinity(0)) // self.jobs)

    @property
    def device_type(self) -> str:
        return self.device.partition(":")[0]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A spec, where its data lies, and what a run may use."""

    spec: StudySpec
    folder: Path
    resources: Resources

    @cached_property
    def data(self) -> Data:
        return open_data(self.folder)

    def check(self) -> None:
        """Raise UsageError for data that do not fit, are too few or were changed."""
        self.data.verify()
        training = self.training(self.spec.seeds[0])
        training.validate()
        wanted = (self.spec.steps + self.spec.calibration_batches) * self.spec.batch_size
        if training.per_epoch < wanted:
            raise UsageError(
                f"corpus too small: its first shard gives {training.per_epoch} sequences of {self.spec.context} tokens and training and "
                f"calibration need {wanted} different ones; build data from more text"
            )
        heldout = self.heldout()
        needed = self.spec.heldout_batches * self.spec.batch_size
        if heldout.per_epoch < needed:
            raise UsageError(
                f"corpus too small: its held-out part gives {heldout.per_epoch} sequences of {self.spec.context} tokens and the study "
                f"needs {needed}; build data from more text"
            )

    def training(self, seed: int) -> Batches:
        """Return a seed's batches, all of the first shard."""
        shard = TokenStream(self.data.folder, self.data.manifest["train"]["shards"][:1])
        return Batches(stream=shard, batch=self.spec.batch_size, context=self.spec.context, seed=seed)

    def heldout(self) -> Batches:
        """Return the batches that every run is measured on."""
        return Batches(stream=self.data.heldout, batch=self.spec.batch_size, context=self.spec.context, seed=_HELDOUT_SEED)

    def batch(self, batches: Batches, step: int) -> tuple[Tensor, Tensor]:
        """Return (tokens_BS, targets_BS) on the device."""
        tokens_BS, targets_BS = (torch.from_numpy(ids).to(self.resources.device) for ids in batches.at(step))
        return tokens_BS, targets_BS

    def autocast(self) -> Any:
        """Return the context that computes in the spec's precision."""
        return trainer.precision(self.spec.precision, self.resources.device_type)

    def new_model(self, cell: Cell, threshold: float) -> NanoMoE:
        """Return the cell's model as its seed initialises it: with the same weights for all conditions."""
        torch.manual_seed(cell.seed)
        model = NanoMoE(self.spec.model(cell.condition, vocab_size=self.data.vocab_size, threshold=threshold))
        model.to(self.resources.device)
        return model


@contextlib.contextmanager
def repeatable(resources: Resources) -> Iterator[None]:
    """Make what is computed inside depend on seeds and the number of threads alone, on CUDA too; torch's switches are put back."""
    on_cuda = resources.device_type == "cuda"
    if on_cuda:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS is repeatable with a workspace of fixed size only
    math_attention = nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH) if on_cuda else contextlib.nullcontext()
    with trainer.repeatable(resources.threads_of_a_job), math_attention:
        yield
