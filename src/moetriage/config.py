"""Settings of the engine as frozen dataclasses; validated without a model and without llama.cpp.

Flags and environment meet in ``moetriage.cli`` alone and become one ``StreamConfig``, which is stored with every result.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from moetriage.errors import UsageError

#: Routings this narrow are outside what the drop threshold was measured on (an evidence boundary, not a physical one).
DROP_LOW_TOP_K_WARN = 4
#: The width the reference measurements were taken at; only the warning's text uses it.
DROP_EVIDENCE_TOP_K = 8
MAX_IO_THREADS = 32


@dataclass(frozen=True, kw_only=True)
class DropConfig:
    """Skip a routed expert that is not resident and whose share of the routing is below ``threshold / top_k``.

    threshold: fraction F of the uniform share, 0 < F <= 1. At F <= 1 the top expert can never fall below it.
    in_prefill: also drop during prefill (a cold cache makes almost everything a miss: about four times the mass is lost).
    renorm: scale the survivors so that the routing keeps its original mass.
    raw_weight: compare the raw weight instead of its share of the routing's mass; only differs on unnormalised or scaled gates.
    """

    threshold: float
    in_prefill: bool = False
    renorm: bool = True
    raw_weight: bool = False

    def validate(self) -> None:
        if not (isinstance(self.threshold, (int, float)) and math.isfinite(self.threshold) and 0 < self.threshold <= 1):
            raise UsageError(
                f"--drop-cold-experts {self.threshold}: must be above 0 and at most 1 (a fraction of the uniform share); "
                "leave it out to drop nothing"
            )


@dataclass(frozen=True, kw_only=True)
class StreamConfig:
    """How experts are streamed. The defaults are lossless.

    cache_mb: expert cache in MiB; 0 reads every expert each time it is used, "auto" sizes it from what memory is left.
    cache_ceil_mb: upper bound for "auto", in MiB.
    force_cache: accept a cache below one token's working set (it can not hit, see docs/architecture.md).
    io_threads: read lanes, 1 to 32. Random reads saturate at 2 to 8 on the disks we know.
    odirect: read past the page cache; falls back to buffered reads where the file system cannot, and says so.
    dense_weights: "anon" copies everything that is not an expert into own memory, "mmap" leaves it to the page cache.
    prefetch: read ahead what the previous token used in the next N layers, on idle lanes; 0 is off.
    n_expert_used: override the model's top_k (lossy, deterministic).
    drop: cache-aware expert dropping (lossy, depends on the cache's state); None is off.
    mmap: do not stream at all: plain llama.cpp with the file mapped, as a baseline.
    staged: let each product start as soon as its own experts are read, while those of the next are still on their way.
    in_place: let O_DIRECT land in the expert's own memory (mirrors the file's offset modulo the block) instead of a bounce buffer.
    force_routing: trace whose ids and weights replace the router's, step by step.
    replay_drops: trace whose dropped set is dropped again, whatever the cache holds.
    """

    cache_mb: int | Literal["auto"] = "auto"
    cache_ceil_mb: int | None = None
    force_cache: bool = False
    io_threads: int = 4
    odirect: bool = True
    dense_weights: Literal["anon", "mmap"] = "anon"
    prefetch: int = 0
    n_expert_used: int | None = None
    drop: DropConfig | None = None
    mmap: bool = False
    staged: bool = True
    in_place: bool = True
    force_routing: Path | None = None
    replay_drops: Path | None = None

    def validate(self) -> None:
        """Raise UsageError for a value or a combination that cannot work; pure, needs no model."""
        if self.cache_mb != "auto" and (not isinstance(self.cache_mb, int) or self.cache_mb < 0):
            raise UsageError(f"--cache-mb {self.cache_mb}: must be auto, 0 (off) or a number of MiB")
        if self.cache_ceil_mb is not None and self.cache_ceil_mb < 1:
            raise UsageError(f"--cache-ceil-mb {self.cache_ceil_mb}: must be at least 1 MiB; use --cache-mb 0 to turn the cache off")
        if self.cache_ceil_mb is not None and self.cache_mb != "auto":
            raise UsageError(
                f"--cache-ceil-mb {self.cache_ceil_mb} bounds the automatic size and does nothing beside --cache-mb {self.cache_mb}: "
                "give one of them"
            )
        if not 1 <= self.io_threads <= MAX_IO_THREADS:
            raise UsageError(f"--io-threads {self.io_threads}: must be between 1 and {MAX_IO_THREADS}")
        if self.dense_weights not in ("anon", "mmap"):
            raise UsageError(f"--dense-weights {self.dense_weights}: must be anon or mmap")
        if self.prefetch < 0:
            raise UsageError(f"--prefetch {self.prefetch}: must be 0 (off) or a number of layers")
        if self.n_expert_used is not None and self.n_expert_used < 1:
            raise UsageError(f"--n-expert-used {self.n_expert_used}: must be at least 1")
        self._validate_combinations()
        if self.drop is not None:
            self.drop.validate()

    def _validate_combinations(self) -> None:
        if self.mmap:
            cold = "no expert is ever known to be cold"
            for flag, is_set, reason in (
                ("--drop-cold-experts", self.drop is not None, cold),
                ("--prefetch", self.prefetch > 0, "the kernel decides what is read, and when"),
                ("--replay-drops", self.replay_drops is not None, cold),
            ):
                if is_set:
                    raise UsageError(f"{flag} needs streaming: with --mmap {reason}; leave one of them out")
        if self.cache_mb == 0 and self.drop is not None:
            raise UsageError(
                "--drop-cold-experts with --cache-mb 0: without a cache every expert is a miss and the drop is a plain weight cut; "
                "give the cache memory, or use --n-expert-used"
            )
        if self.cache_mb == 0 and self.prefetch > 0:
            raise UsageError(f"--prefetch {self.prefetch} with --cache-mb 0: there is no cache to read ahead into; give the cache memory")
        if self.replay_drops is not None and self.drop is not None:
            raise UsageError("--replay-drops and --drop-cold-experts both decide what is dropped; give one of them")
        if self.force_routing is not None and self.n_expert_used is not None:
            raise UsageError("--force-routing takes its width from the trace, which --n-expert-used would change; give one of them")

    def as_dict(self) -> dict[str, object]:
        """Return the settings as JSON-ready values, in field order."""
        return {k: str(v) if isinstance(v, Path) else v for k, v in dataclasses.asdict(self).items()}


def dropping_caveats(config: StreamConfig, top_k: int, fixed_layers: tuple[int, ...] = ()) -> list[str]:
    """Say, one line each, what the user of a dropping configuration should know about this model.

    top_k: the routing's width in the model; fixed_layers: layers whose routing cannot be edited.
    """
    drop = config.drop
    if drop is None:
        return []
    flag = f"--drop-cold-experts {drop.threshold}"
    caveats = []
    if fixed_layers:
        layers = ", ".join(map(str, fixed_layers))
        caveats.append(f"{flag}: nothing is dropped in layers {layers}, whose router weights are not applied where they could be changed")
    if config.prefetch > 0:
        caveats.append(
            f"--prefetch {config.prefetch} with {flag}: what was read ahead is resident and no longer dropped, so the prefetch depth "
            "changes the output"
        )
    if top_k <= DROP_LOW_TOP_K_WARN:
        here, evidence = 100 * drop.threshold / top_k, 100 / DROP_EVIDENCE_TOP_K
        caveats.append(
            f"{flag} with top-k {top_k}: the threshold is {here:.1f} % of the routing here, and at most {evidence:.1f} % at the top-k "
            f"{DROP_EVIDENCE_TOP_K} this was measured on; it may discard much more, so check the output on your own task"
        )
    return caveats
