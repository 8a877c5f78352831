"""A run that takes a second: a small model, and data of which it can learn something."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from moetriage.train.corpus import Corpus, Document
from moetriage.train.data import Data, open_data
from moetriage.train.data_build import build
from moetriage.train.model_config import ModelConfig, tiny
from moetriage.train.run_folder import RunFolder
from moetriage.train.train_config import TrainConfig

VOCAB = 300


def make_data(folder: Path, *, word: str = "value") -> Data:
    """160 kB of lines that follow a simple rule."""
    texts = ["".join(f"{word} {line} of file {number} is {line * number}\n" for line in range(100)) for number in range(70)]
    build(Corpus(documents=[Document(f"{number}.txt", text) for number, text in enumerate(texts)]), folder, vocab_size=VOCAB)
    return open_data(folder)


def small_model(**changes: Any) -> ModelConfig:
    config = tiny(vocab_size=VOCAB, context=32)
    moe = dataclasses.replace(config.moe, **changes.pop("moe", {}))
    return dataclasses.replace(config, moe=moe, **changes)


def train_config(**changes: Any) -> TrainConfig:
    values: dict[str, Any] = {"steps": 6, "batch": 4, "context": 32, "learning_rate": 3e-3, "save_every": 2, "seed": 5}
    return TrainConfig(**(values | changes))


def begin(path: Path, data: Data, *, model: ModelConfig | None = None, **changes: Any) -> RunFolder:
    return RunFolder.begin(path, model or small_model(), train_config(**changes), {"data": data.digest, "threads": 1})


def losses(run: RunFolder) -> list[tuple[int, float]]:
    return [(row["step"], row["loss"]) for row in run.rows() if "loss" in row]
