"""The folder of a training run: its settings, its curve of losses and its checkpoints. Knows nothing of models; trains nothing.

``run.json`` is written once, when the run begins; ``loss.jsonl`` gets a line a step, and what lies beyond the checkpoint that a run goes on
from is cut off, so that every step is there once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from moetriage.errors import UsageError
from moetriage.train.model_config import ModelConfig
from moetriage.train.train_config import TrainConfig

FORMAT = 1
_ABOUT, _LOSSES = "run.json", "loss.jsonl"


def check_new(path: Path) -> None:
    """Raise UsageError if a new run cannot have this folder because there is something in it."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
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
        check_new(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            (path / _ABOUT).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
        except OSError as error:
            raise UsageError(f"{path}: cannot be written: {error.strerror or error}") from error
        return run

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """Open the folder of a run that began earlier. Raises UsageError if there is none or its settings cannot be read."""
        file = path / _ABOUT
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
            if content["format"] != FORMAT:
                raise UsageError(f"{file}: in format {content['format']}, this version reads {FORMAT}")
            return cls(path, ModelConfig.from_dict(content["model"]), TrainConfig.from_dict(content["train"]), content["about"])
        except FileNotFoundError as error:
            raise UsageError(f"{path}: no training run there ({_ABOUT} is missing)") from error
        except OSError as error:
            raise UsageError(f"{file}: cannot be read: {error.strerror or error}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{file}: is damaged ({error})") from error

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
        """Yield the lines of the losses; one that a kill cut short ends them."""
        path = self.path / _LOSSES
        if not path.exists():
            return
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                yield json.loads(line)
            except ValueError:
                return

    def cut(self, step: int) -> None:
        """Remove the lines of steps after ``step``."""
        kept = "".join(json.dumps(row) + "\n" for row in self.rows() if row["step"] <= step)
        temporary = self.path / f".{_LOSSES}.partial"
        try:
            temporary.write_text(kept, encoding="utf-8")
            temporary.replace(self.path / _LOSSES)
        except OSError as error:
            temporary.unlink(missing_ok=True)
            raise UsageError(f"{self.path / _LOSSES}: cannot be written: {error.strerror or error}") from error

    def close(self) -> None:
        """Close the losses; ``write`` opens them again."""
        if self._losses is not None:
            self._losses.close()
            self._losses = None
