"""The benchmark of admission runs from end to end on sizes so small that its numbers mean nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from moetriage.train.admission import POLICIES


@pytest.mark.slow
def test_bench_admission_compares_equal_plans_and_ends_with_json(repo_root: Path) -> None:
    sizes = ["--tokens", "256", "--experts", "4", "--rounds", "2", "--cpu-time"]
    command = [sys.executable, repo_root / "benchmarks" / "bench_admission.py", *sizes]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert [row["policy"] for row in found["measured"]] == list(POLICIES)
    assert [row["policy"] for row in found["measured"] if row["loop"] is None] == ["capsel2-causal", "augment"]
    assert [row["policy"] for row in found["measured"] if row["one_hot"] is not None] == ["top2"]
    assert found["clock"] == "process_time"
