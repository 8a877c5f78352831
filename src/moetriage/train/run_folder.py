"""The folder of a training run: its settings, its curve of losses and its checkpoints. Knows nothing of models; trains nothing.

``run.json`` is written once, when the run begins; ``loss.jsonl`` gets a line a step, and what lies beyond the checkpoint that a run goes on
from is cut off, so that every step is there once.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moetriage.errors import UsageError
from moetriage.train.files import damaged, read_object, sole_writer, write_whole
from moetriage.train.model_config import ModelConfig
from moetriage.train.train_config import TrainConfig

FORMAT = 1
MAX_THREADS = 1024
_ABOUT, _LOSSES = "run.json", "loss.jsonl"
_BEGIN_AGAIN = "begin a new run in another folder"


def check_new(path: Path) -> None:
    """Raise UsageError if a new run cannot have this folder because there is something in it."""
    # Hidden files of ours are what a run left that was killed while it began.
    if path.exists() and (not path.is_dir() or any(not found.name.startswith(f".{_ABOUT}.") for found in path.iterdir())):
        again = "go on with --resume, or name" if (path / _ABOUT).exists() else "name"
        raise UsageError(f"{path}: exists already; {again} another folder")


class RunFolder:
    """Where a run writes. ``model``, ``train``, ``about``: its settings; ``about["data"]`` is the digest of what it learns from."""

    def __init__(self, path: Path, model: ModelConfig, train: TrainConfig, about: dict[str, Any]) -> None:
        self.path, self.model, self.train, self.about = path, model, train, about
        self._losses: Any = None

    @classmethod
    def begin(cls, path: Path, model: ModelConfig, train: TrainConfig, about: dict[str, Any]) -> RunFolder:
        """Make the folder of a new run. Raises UsageError if it is there and not empty, or cannot be written."""
        run = cls(path, model, train, about)
        content = {"format": FORMAT, "model": model.as_dict(), "train": train.as_dict(), "about": about}
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"{path}: cannot be written: {error.strerror or error}") from error
        with sole_writer(path):
            check_new(path)  # another run may have begun there in between
            write_whole(path / _ABOUT, json.dumps(content, indent=1) + "\n")
        return run

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """Open the folder of a run that began earlier. Raises UsageError if there is none or its settings cannot be read."""
        file = path / _ABOUT
        if not file.is_file():
            raise UsageError(f"{path}: no training run there ({_ABOUT} is missing)")
        content = read_object(file, hint=_BEGIN_AGAIN)
        with damaged(file, hint=_BEGIN_AGAIN):
            if content["format"] != FORMAT:
                raise UsageError(f"in format {content['format']}, this version reads {FORMAT}")
            about = content["about"]
            if not isinstance(about["data"], str) or type(about["threads"]) is not int or not 1 <= about["threads"] <= MAX_THREADS:
                raise ValueError(f"data {about['data']!r}, threads {about['threads']!r}")
            return cls(path, ModelConfig.from_dict(content["model"]), TrainConfig.from_dict(content["train"]), about)

    def write(self, row: dict[str, Any]) -> None:
        """Append a line to the losses; it is in the file when this returns. Raises UsageError if it cannot be written."""
        try:
            if self._losses is None:
                self._losses = (self.path / _LOSSES).open("a", encoding="utf-8")
            self._losses.write(json.dumps(row) + "\n")
            self._losses.flush()
        except OSError as error:
            raise UsageError(f"{self.path / _LOSSES}: cannot be written: {error.strerror or error}; free space and --resume") from error

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield the lines of the losses; one that a kill cut short, or that holds what is no finite number, ends them."""
        path = self.path / _LOSSES
        try:
            lines = path.read_bytes().splitlines()
        except FileNotFoundError:
            return
        except OSError as error:
            raise UsageError(f"{path}: cannot be read: {error.strerror or error}") from error
        for line in lines:
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                return
            if not isinstance(row, dict) or type(row.get("step")) is not int:
                return
            if any(isinstance(value, float) and not math.isfinite(value) for value in row.values()):
                return
            yield row

    def cut(self, step: int) -> None:
        """Remove the lines of steps after ``step``."""
        kept = "".join(json.dumps(row) + "\n" for row in self.rows() if row["step"] <= step)
        write_whole(self.path / _LOSSES, kept)

    def close(self) -> None:
        """Close the losses; ``write`` opens them again."""
        losses, self._losses = self._losses, None
        if losses is not None:
            # A line that could not be written is tried again here; its error has been raised.
            with contextlib.suppress(OSError):
                losses.close()
