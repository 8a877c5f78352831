"""What the demo compares and how large everything is: pure arithmetic on a model's layout and a trace's header.

In: a layout, the recorded trace, what the caller wants otherwise. Out: the cells, with the cache and the memory limit they share. Runs
nothing and reads no clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from moetriage.config import DropConfig, StreamConfig
from moetriage.gguf.kv_cache import kv_cache_bytes
from moetriage.gguf.layout import ModelLayout
from moetriage.stream.memory_plan import compute_bytes
from moetriage.trace.schema import TraceMeta
from moetriage.types import MIB

SHAPE = "qwen3-30b-a3b"
#: 3.2 GB. Ten are the most that stay below 4 GB; with more of the recorded 48 layers the hit rate comes closer to the recorded one.
DEFAULT_LAYERS = 8
#: As recorded: 28 tokens of prompt, then 128.
PROMPT_TOKENS = 28
TOKENS = 128
#: The cache of the recording, whose share of all experts the demo's cache has of its own.
RECORDED_CACHE_BYTES = 4000 * MIB
#: What a process takes beside the counted parts: interpreter, libraries, tokenizer, read buffers.
_PROCESS_BYTES = 256 * MIB
#: Largest batch that llama_cpp evaluates at once, which its buffers are sized for.
_BATCH_TOKENS = 512
#: A limit this close to the file's size would not show a model that is larger than memory.
_MAX_LIMIT_FRACTION = 0.9

PLAIN, STREAMED = "plain mmap", "streamed"


@dataclass(frozen=True)
class Cell:
    """One row of the table. ``weight``: its part of the time that is left; mmap reads so much that it needs more."""

    name: str
    config: StreamConfig
    weight: float = 1.0


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Bytes that the cells share. ``limit_bytes``: of the memory cgroup; None for a file that would fit into any useful one."""

    file_bytes: int
    cache_mb: int
    limit_bytes: int | None


def recorded_routing() -> Path:
    """Return the packaged recording of Qwen3-30B-A3B's routing."""
    return Path(str(resources.files("moetriage") / "data" / "qwen-excerpt.route.parquet"))


def plan_sizes(layout: ModelLayout, trace: TraceMeta, *, n_ctx: int) -> Sizes:
    """Return the cache that holds the share of all experts that the recording's held, and the smallest limit in which streaming works."""
    recorded = sum(trace.layer_expert_bytes.values()) * trace.n_expert
    share = min(1.0, RECORDED_CACHE_BYTES / recorded)
    # Rounded up, and at least one token's working set at the trace's width: below it no cache hits.
    cache_bytes = max(round(share * layout.expert_total_bytes), layout.working_set_bytes(trace.n_expert_used))
    cache_mb = -(-cache_bytes // MIB)
    largest_layer = max(layout.expert_bytes(layer) * layout.n_expert for layer in layout.moe_layers)
    buffers = compute_bytes(layout, n_ctx) * min(n_ctx, _BATCH_TOKENS) // _BATCH_TOKENS
    limit = cache_mb * MIB + largest_layer + layout.dense_total_bytes + kv_cache_bytes(layout, n_ctx) + buffers + _PROCESS_BYTES
    file_bytes = sum(layout.sizes)
    return Sizes(file_bytes=file_bytes, cache_mb=cache_mb, limit_bytes=limit if limit <= _MAX_LIMIT_FRACTION * file_bytes else None)


def plan_cells(cache_mb: int, trace: Path) -> tuple[Cell, ...]:
    """Return the four cells: all of them routed as recorded, three with the same cache."""
    dropping = [
        Cell(f"streamed, F={threshold:g}", StreamConfig(cache_mb=cache_mb, force_routing=trace, drop=DropConfig(threshold=threshold)))
        for threshold in (0.75, 1.0)
    ]
    return (
        Cell(PLAIN, StreamConfig(mmap=True, force_routing=trace), weight=1.5),
        Cell(STREAMED, StreamConfig(cache_mb=cache_mb, force_routing=trace)),
        *dropping,
    )
