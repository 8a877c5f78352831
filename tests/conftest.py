"""Fixtures that every test may use. Markers and the default selection are in pyproject.toml."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Counts do not depend on how busy the machine is; hypothesis' limits on time would.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")
# A shell that starts the tests in the background has them ignore Ctrl-C, and the commands that they start as well.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def repo_root() -> Path:
    """Return the root of the checkout that the tests belong to."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that gives the path of a small random-weight model of a shape, written once per session and options.

    ``tiny("tiny-qwen3moe", split=2)``: options are those of ``write_model``; of a split model the first shard is returned. Tests must not
    change the files: copy them first.
    """
    from moetriage.gguf.synth import write_model

    folder = tmp_path_factory.mktemp("models")
    made: dict[str, Path] = {}

    def make(shape: str, **options: int | str) -> Path:
        name = "-".join([shape, *(f"{key}={value}" for key, value in sorted(options.items()))])
        if name not in made:
            made[name] = write_model(folder / f"{name}.gguf", shape, **options)[0]  # type: ignore[arg-type]
        return made[name]

    return make
