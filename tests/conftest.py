"""Fixtures that every test may use. Markers and the default selection are in pyproject.toml."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def repo_root() -> Path:
    """Return the root of the checkout that the tests belong to."""
    return Path(__file__).resolve().parent.parent
