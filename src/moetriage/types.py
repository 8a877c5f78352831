"""Values that more than one part of moetriage passes around. Plain data; imports nothing of ours.

Shape legend used in names across the project: L layers, E experts, K experts per token (top_k), T tokens, S steps.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

MIB = 1024 * 1024


class Phase(IntEnum):
    """Which part of a generation a step belongs to; the numbers are those of the trace files."""

    PREFILL = 0
    DECODE = 1


@dataclass(frozen=True, kw_only=True)
class CacheStats:
    """State and counters of the expert cache. Counters count distinct experts per layer batch (one lookup each)."""

    budget_bytes: int = 0
    resident_bytes: int = 0
    peak_bytes: int = 0
    hits: int = 0
    misses: int = 0
    evictions: int = 0


@dataclass(frozen=True, kw_only=True)
class DropStats:
    """What dropping did. ``routed`` counts (token, slot) routings in the phases where dropping was armed."""

    threshold: float | None = None
    routed: int = 0
    dropped: int = 0
    weight_dropped_fraction: float = 0.0


@dataclass(frozen=True, kw_only=True)
class PhaseTimes:
    """Where the wall time of decoding went, in seconds; the four parts sum to ``total_seconds``."""

    compute_seconds: float = 0.0
    read_wait_seconds: float = 0.0
    cache_seconds: float = 0.0
    other_seconds: float = 0.0

    @property
    def total_seconds(self) -> float:
        return self.compute_seconds + self.read_wait_seconds + self.cache_seconds + self.other_seconds


@dataclass(frozen=True, kw_only=True)
class PhaseCounts:
    """What the steps of one phase of a run counted, summed; ``tokens`` is the number that was evaluated."""

    tokens: int = 0
    hits: int = 0
    misses: int = 0
    dropped: int = 0
    routed: int = 0
    reads: int = 0
    read_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class TokenMetrics:
    """One evaluated step (a prefill batch or one decoded token): counters are differences over the step."""

    step: int
    phase: Phase
    n_tokens: int
    wall_seconds: float
    compute_seconds: float
    read_wait_seconds: float
    cache_seconds: float
    other_seconds: float
    hits: int
    misses: int
    dropped: int
    routed: int
    evictions: int
    reads: int
    read_bytes: int
    resident_bytes: int


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """Everything a run measured; docs/telemetry.md defines each key of its JSON form."""

    text: str
    token_ids: list[int]
    generated: int
    load_seconds: float
    prefill_seconds: float
    decode_seconds: float
    tok_per_s: float
    read_bytes: int
    reads: int
    cache: CacheStats
    drop: DropStats
    phases: PhaseTimes
    peak_rss_bytes: int
    o_direct: str
    finish_reason: str = "length"
    prefill: PhaseCounts = PhaseCounts()
    decode: PhaseCounts = PhaseCounts()
    config: dict[str, object] = field(default_factory=dict)
