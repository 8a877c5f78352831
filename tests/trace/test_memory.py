"""Traces of any length are written and read in the same memory; measured in a process of its own, where nothing else adds to it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

#: Rows that take 93 MB as a frame, and 216 MB with the wider integers they are parsed into.
N_STEPS, N_LAYERS, TOP_K = 7_500, 50, 8

COMMON = """
import resource, sys
import numpy as np
from moetriage.trace.io import RouteWriter, scan_batches
from moetriage.trace.schema import SCHEMA, TraceMeta

path, n_steps, n_layers, top_k = sys.argv[1], *map(int, sys.argv[2:])

def peak_bytes():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
"""

WRITE = """
layers = {i: 9 for i in range(n_layers)}
meta = TraceMeta(model="m", arch="a", n_layer=n_layers, n_expert=16, n_expert_used=top_k, layer_expert_bytes=layers)
per = 50
n_rows = per * n_layers * top_k
fixed = {name: np.zeros(n_rows, np.int64) for name in SCHEMA} | {
    "phase": np.ones(n_rows, np.int64),
    "layer": np.tile(np.repeat(np.arange(n_layers), top_k), per),
    "slot": np.tile(np.arange(top_k), per * n_layers),
    "expert": np.tile(np.arange(top_k), per * n_layers),
}
rng = np.random.default_rng(0)

def write(to, last):
    with RouteWriter(to, meta) as writer:
        for step in range(0, last, per):
            steps = np.repeat(np.arange(step, step + per), n_layers * top_k)
            writer.append(fixed | {"step": steps, "weight": rng.random(n_rows, np.float32)})

write("first-" + path, 1_400)  # fills the buffers and joins more than one part
start = peak_bytes()
write(path, n_steps)
print(peak_bytes() - start)
"""

READ = """
frames = scan_batches(path, rows=50_000)
n_read = len(next(frames)) + len(next(frames))
start = peak_bytes()
n_read += sum(len(frame) for frame in frames)
print(peak_bytes() - start, n_read)
"""


def run(script: str, folder: Path, name: str) -> list[int]:
    sizes = [str(N_STEPS), str(N_LAYERS), str(TOP_K)]
    done = subprocess.run([sys.executable, "-c", COMMON + script, name, *sizes], cwd=folder, capture_output=True, text=True, check=True)
    return [int(word) for word in done.stdout.split()]


@pytest.mark.parametrize("name", ["t.csv", "t.parquet"])
def test_memory_does_not_grow_with_the_trace(name: str, tmp_path: Path) -> None:
    (grown_writing,) = run(WRITE, tmp_path, name)
    grown_reading, n_read = run(READ, tmp_path, name)
    assert n_read == N_STEPS * N_LAYERS * TOP_K
    assert grown_writing < 70e6
    assert grown_reading < 70e6
