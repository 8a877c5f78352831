"""Tests of moetriage.train: need the ``train`` extra and are not collected where it is missing. One thread, so that results repeat."""

from __future__ import annotations

import importlib.util

import pytest

collect_ignore_glob = [] if importlib.util.find_spec("torch") else ["test_*.py"]


@pytest.fixture(autouse=True)
def _one_thread_and_a_fixed_seed() -> None:
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
