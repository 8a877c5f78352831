"""A recording made up for the tiny model: its own header says how much of it the demo's cache may hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from moetriage.demo.plan import RECORDED_CACHE_BYTES
from moetriage.demo.run import DemoSettings
from moetriage.trace.io import RouteWriter
from moetriage.trace.schema import SCHEMA, TraceMeta

SHAPE = "tiny-qwen3moe"
N_LAYER, N_EXPERT, TOP_K = 4, 16, 4
PROMPT_TOKENS, TOKENS = 10, 24
#: Of all experts, so that the cache evicts all the time.
CACHE_SHARE = 0.4


def write_trace(path: Path) -> Path:
    """Write a trace of random routing in which some experts are more popular, and some weigh next to nothing."""
    rng = np.random.default_rng(5)
    expert_bytes = int(RECORDED_CACHE_BYTES / CACHE_SHARE / (N_LAYER * N_EXPERT))
    meta = TraceMeta(
        model="made up",
        arch="qwen3moe",
        n_layer=N_LAYER,
        n_expert=N_EXPERT,
        n_expert_used=TOP_K,
        layer_expert_bytes=dict.fromkeys(range(N_LAYER), expert_bytes),
    )
    rows: list[tuple[object, ...]] = []
    for phase, steps in ((0, range(PROMPT_TOKENS)), (1, range(PROMPT_TOKENS, PROMPT_TOKENS + TOKENS))):
        # A batch lies layer by layer: the prompt is one batch, every decoded token another.
        batches = [steps] if phase == 0 else [[step] for step in steps]
        for batch in batches:
            for layer in range(N_LAYER):
                for step in batch[-1:] if phase == 0 and layer == N_LAYER - 1 else batch:
                    popularity = rng.random(N_EXPERT) + np.linspace(1, 0, N_EXPERT)
                    weights = np.sort(rng.random(TOP_K).astype(np.float32) ** 2)[::-1]
                    for slot, expert in enumerate(np.argsort(-popularity)[:TOP_K]):
                        rows.append((0, phase, step, layer, slot, expert, weights[slot] / weights.sum(), 1, 0, 0))
    with RouteWriter(path, meta) as writer:
        writer.append({name: np.array(column) for name, column in zip(SCHEMA, zip(*rows, strict=True), strict=True)})
    return path


def tiny_settings(folder: Path, trace: Path, **changes: Any) -> DemoSettings:
    """Return a demo that takes a few seconds. One thread: several wait for each other by spinning, which takes long on busy machines."""
    sizes = {"shape": SHAPE, "layers": N_LAYER, "trace": trace, "prompt_tokens": PROMPT_TOKENS, "tokens": TOKENS, "n_threads": 1}
    return DemoSettings(folders=[folder], **sizes | changes)
