"""Fixtures of the gates."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from gates.harness import N_TOKENS, Said, resident, say


@pytest.fixture(scope="session")
def reference(tiny: Callable[..., Path]) -> Callable[[str], Said]:
    """Return a function that gives what plain llama.cpp says with a whole tiny model in memory, run once per session."""
    known: dict[str, Said] = {}

    def said(shape: str) -> Said:
        if shape not in known:
            with resident(tiny(shape)) as llm:
                known[shape] = say(llm, N_TOKENS)
        return known[shape]

    return said
