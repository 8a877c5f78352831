"""Checkpoints: a model and the state of its training in, a folder that is whole or not there out; and back.

A checkpoint is written beside its final name and renamed once all of it is on the disk, and only then are older ones removed. It holds
``model.safetensors``, ``trainer.safetensors``, ``tokenizer.json`` and ``checkpoint.json``, so that exports need nothing else. A run's own
are told by their names; a folder that is called otherwise, such as a copy, is the user's: never removed, and opened only if it is named.
Deliberately unknown here: when to save, and what the settings mean.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from moetriage.errors import UsageError
from moetriage.train.files import damaged, read_object, replace_folder
from moetriage.train.lm import NanoMoE
from moetriage.train.model_config import ModelConfig
from moetriage.train.tokenizer import FILE_NAME as TOKENIZER

FORMAT = 1
_EARLIER = "take an earlier one: without this folder, the run goes on from the one before"
_MODEL, _TRAINER, _ABOUT = "model.safetensors", "trainer.safetensors", "checkpoint.json"
_PREFIX = "checkpoint-"
_STEP = re.compile(rf"{_PREFIX}([0-9]{{8,}})")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """What was saved. ``about``: JSON values of the saver's own. ``tokenizer``: the parsed tokenizer.json."""

    folder: Path
    step: int
    config: ModelConfig
    about: dict[str, Any]
    tokenizer: dict[str, Any]

    def weights(self) -> dict[str, Tensor]:
        """Return the model's parameters and buffers by NanoMoE's names. Raises UsageError if the file is damaged."""
        return _load(self.folder / _MODEL)

    def trainer_state(self) -> dict[str, Tensor]:
        """Return ``Trainer.state_dict`` as it was. Raises UsageError if the file is damaged."""
        return _load(self.folder / _TRAINER)


def save_checkpoint(
    run: Path,
    step: int,
    *,
    config: ModelConfig,
    weights: Mapping[str, Tensor],
    trainer_state: Mapping[str, Tensor],
    tokenizer: bytes,
    about: Mapping[str, Any],
    keep: int = 2,
) -> Path:
    """Write ``checkpoint-STEP`` into ``run`` and return its path; the newest ``keep`` stay.

    Raises UsageError if it cannot be written, for instance because the disk is full; the earlier ones are untouched then.
    """
    folder = run / _name(step)
    partial = run / f".{folder.name}.partial"
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        _save(partial / _MODEL, weights)
        _save(partial / _TRAINER, trainer_state)
        content = {"format": FORMAT, "step": step, "model": config.as_dict(), "about": dict(about)}
        for name, data in ((TOKENIZER, tokenizer), (_ABOUT, (json.dumps(content, indent=1) + "\n").encode())):
            (partial / name).write_bytes(data)
            _to_disk(partial / name)
        _to_disk(partial)
        replace_folder(partial, folder)
        _to_disk(run)
    except (OSError, safetensors.SafetensorError) as error:
        raise UsageError(_cannot_write(run, folder, error)) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    for old in _folders(run)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return folder


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a checkpoint, or the newest one of a run's folder. Raises UsageError, with the path, if there is none or it is damaged."""
    folder = path if (path / _ABOUT).is_file() else newest(path)
    if folder is None:
        raise UsageError(f"{path}: no checkpoint there; name the folder that moetriage train wrote, or one of its {_PREFIX}... folders")
    content = read_object(folder / _ABOUT, hint=_EARLIER)
    _check_regular(folder / TOKENIZER)
    tokenizer = read_object(folder / TOKENIZER, hint=_EARLIER)
    with damaged(folder, hint=_EARLIER):
        if content["format"] != FORMAT:
            raise UsageError(f"in format {content['format']}, this version reads {FORMAT}")
        if type(content["step"]) is not int or content["step"] < 0:
            raise UsageError(f"is damaged (step {content['step']!r} is no number of steps); {_EARLIER}")
        if _is_own(folder) and folder.name != _name(content["step"]):
            raise UsageError(f"holds step {content['step']}, so it is a copy; name it otherwise, and the run goes on from its own")
        if not isinstance(content["about"], dict):
            raise UsageError(f"is damaged (about is no object); {_EARLIER}")
        return Checkpoint(
            folder=folder,
            step=content["step"],
            config=ModelConfig.from_dict(content["model"]),
            about=content["about"],
            tokenizer=tokenizer,
        )


def newest(run: Path) -> Path | None:
    """Return the checkpoint of a run that has most steps, None if it has none."""
    return next(reversed(_folders(run)), None)


def load_model(checkpoint: Checkpoint) -> NanoMoE:
    """Return the model that was saved.

    Raises UsageError if the weights do not fit its settings, before anything of that size is built, or hold NaN or inf.
    """
    found = checkpoint.weights()
    with torch.device("meta"):
        planned = NanoMoE(checkpoint.config)
    _check_weights(planned, found, checkpoint.folder)
    model = NanoMoE(checkpoint.config)
    model.load_state_dict(found)
    return model


def _check_weights(model: nn.Module, found: Mapping[str, Tensor], folder: Path) -> None:
    own = model.state_dict()
    for name in sorted(own.keys() | found.keys()):
        there, here = (tuple(tensors[name].shape) if name in tensors else None for tensors in (found, own))
        if there != here:
            raise UsageError(
                f"{folder}: a checkpoint of another shape: {name} is {there or 'missing'} there and {here or 'missing'} in this "
                "model; use the settings it was trained with"
            )
        if found[name].dtype != own[name].dtype:
            raise UsageError(f"{folder}: {name} is stored as {found[name].dtype}, and this version reads {own[name].dtype}; {_EARLIER}")
        if not bool(found[name].isfinite().all()):
            raise UsageError(f"{folder}: {name} holds NaN or inf: the training diverged; {_EARLIER}")


def _folders(run: Path) -> list[Path]:
    """Return the whole checkpoints of a run, that of the fewest steps first."""
    own = (path for path in run.glob(f"{_PREFIX}*") if _is_own(path) and (path / _ABOUT).is_file())
    return sorted(own, key=lambda path: int(path.name.removeprefix(_PREFIX)))


def _name(step: int) -> str:
    return f"{_PREFIX}{step:08d}"


def _is_own(folder: Path) -> bool:
    """Say whether a run gives a folder this name."""
    found = _STEP.fullmatch(folder.name)
    return found is not None and folder.name == _name(int(found[1]))


def _save(path: Path, tensors: Mapping[str, Tensor]) -> None:
    safetensors.torch.save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, path)
    _to_disk(path)


def _load(path: Path) -> dict[str, Tensor]:
    _check_regular(path)
    try:
        tensors: dict[str, Tensor] = safetensors.torch.load_file(path)
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror or error}") from error
    except Exception as error:  # besides its own error the package passes on what torch raises for types and sizes
        raise UsageError(f"{path}: the checkpoint is damaged ({str(error).splitlines()[0]}); {_EARLIER}") from error
    return tensors


def _check_regular(path: Path) -> None:
    """Raise UsageError for what is there and no file: a pipe would be waited for without end. A missing one is its reader's to name."""
    if path.exists() and not path.is_file():
        raise UsageError(f"{path}: the checkpoint is damaged (no regular file); {_EARLIER}")


def _to_disk(path: Path) -> None:
    """Wait until a file or folder is on the disk: a name that survives a crash must not outlive its content."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _cannot_write(run: Path, folder: Path, error: Exception) -> str:
    reason = (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
    before = None
    with contextlib.suppress(OSError):
        before = newest(run)
    then = f"{before.name} is whole: go on from there with --resume" if before is not None else "there is no earlier one"
    return f"{folder}: cannot be written: {reason}; {then}"
