"""The recording that the package brings, and a part of it for what is slow."""

from __future__ import annotations

from pathlib import Path

import pytest

import moetriage
from moetriage.replay.routes import RouteFile, RouteTable, table_of
from moetriage.trace.reader import read_trace


@pytest.fixture(scope="session")
def excerpt_path() -> Path:
    """Qwen3-30B-A3B, top-6 of 128 experts in 48 layers: 28 tokens of a prompt, 128 decoded."""
    return Path(moetriage.__file__).parent / "data" / "qwen-excerpt.route.parquet"


@pytest.fixture(scope="session")
def qwen(excerpt_path: Path) -> RouteTable:
    return RouteFile(excerpt_path).load()


@pytest.fixture(scope="session")
def short_qwen(excerpt_path: Path, qwen: RouteTable) -> RouteTable:
    """Its prompt and first 6 decoded tokens."""
    frame = read_trace(excerpt_path).frame
    return table_of(frame.filter(frame["step"] < 34), qwen.shape)
