"""The benchmarks run from end to end on models so small that their numbers mean nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.mark.slow
def test_bench_stream_runs_every_cell_that_a_tiny_model_can_and_ends_with_json(repo_root: Path, tiny: Callable[..., Path]) -> None:
    # Recorded routing and settings need more experts than a tiny model has.
    model = tiny("tiny-qwen3moe")
    cells = ["resident", "big", "memory", "--big", model, "--small", model]
    sizes = ["--prompt-tokens", "20", "--tokens", "8", "--memory-tokens", "12", "--cache-mb", "3", "--limit-mb", "0"]
    done = subprocess.run(
        [sys.executable, repo_root / "benchmarks" / "bench_stream.py", *cells, *sizes, "--threads", "1", "--rounds", "2", "--retries", "0"],
        capture_output=True,
        text=True,
        timeout=110,
        check=True,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    titles = [table["title"] for table in found["tables"]]
    assert titles == [
        "Everything in memory",
        "A model larger than memory: decoding",
        "A model larger than memory: first token",
        "Memory over 12 tokens",
    ]
    assert all(f"## {title}" in done.stdout for title in titles)
    rows = {row[0]: row for row in found["tables"][1]["rows"]}
    assert list(rows) == ["plain mmap", "streamed", "streamed, not staged", "F=0.75", "F=1.0", "K=5"]
    assert rows["F=1.0"][8] != rows["streamed"][8]  # something was dropped
