"""What one replay is asked and what it answers: ``Cell`` in, ``Outcome`` out.

In: modes, orders, budgets and thresholds as the user gives them. Out: validated settings and the figures derived from counts. Knows neither
traces nor the native code.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from moetriage.config import DropConfig
from moetriage.errors import AccountingError, UsageError
from moetriage.replay.routes import RouteShape

Mode = Literal["recorded", "simulate", "closed-loop"]
MODES: tuple[Mode, ...] = ("recorded", "simulate", "closed-loop")
#: What a cache can decide when it happens.
ONLINE_EVICTIONS = ("lru", "lfu", "lfuda", "s3fifo", "partition", "random")
#: belady knows what comes.
EVICTIONS = (*ONLINE_EVICTIONS, "belady")


@dataclass(frozen=True, kw_only=True)
class Lossy:
    """Which routings are not computed: those below a threshold that are not resident, or all but the first K slots, or none.

    threshold: F of ``--drop-cold-experts``. n_expert_used: K, in the router's order. in_prefill, raw_weight: as in ``DropConfig``.
    """

    threshold: float | None = None
    n_expert_used: int | None = None
    in_prefill: bool = False
    raw_weight: bool = False

    @property
    def name(self) -> str:
        if self.threshold is not None:
            return "drop-cold-experts"
        return "none" if self.n_expert_used is None else "n-expert-used"

    @property
    def value(self) -> float | None:
        return self.n_expert_used if self.threshold is None else self.threshold

    def validate(self, shape: RouteShape) -> None:
        """Raise UsageError for a value that the trace cannot be replayed with."""
        if self.threshold is not None:
            DropConfig(threshold=self.threshold).validate()
        if self.n_expert_used is not None and not 1 <= self.n_expert_used <= shape.top_k:
            raise UsageError(
                f"--n-expert-used {self.n_expert_used}: must be between 1 and the {shape.top_k} that the trace was recorded with"
            )
        if self.threshold is not None and self.n_expert_used is not None:
            raise UsageError("a cell has one lossy policy: --drop-cold-experts and --n-expert-used are replayed one after the other")


LOSSLESS = Lossy()


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One replay.

    mode: ``recorded`` takes the trace's residency; ``simulate`` that of a cache which loads all that is routed; ``closed-loop`` that of one
    which does not load what is dropped. evict, budget_bytes: the cache's (None in ``recorded``). prefetch: layers read ahead, as if reads
    took no time. seed: of ``random``.
    """

    mode: Mode
    lossy: Lossy = LOSSLESS
    evict: str | None = None
    budget_bytes: int | None = None
    prefetch: int = 0
    seed: int = 0

    def validate(self, shape: RouteShape) -> None:
        """Raise UsageError for a value or a combination that cannot be replayed."""
        self.lossy.validate(shape)
        if self.mode not in MODES:
            raise UsageError(f"--mode {self.mode}: must be one of {', '.join(MODES)}")
        if self.mode == "recorded":
            if (self.evict, self.budget_bytes, self.prefetch) != (None, None, 0):
                raise UsageError("--mode recorded takes the trace's own residency; a cache needs --mode simulate or closed-loop")
            return
        if self.evict not in EVICTIONS:
            raise UsageError(f"--evict {self.evict}: must be one of {', '.join(EVICTIONS)}")
        if self.budget_bytes is None or self.budget_bytes < 0:
            raise UsageError(f"--mode {self.mode} needs the cache's size: give --cache-mb (0 is off)")
        if self.budget_bytes == 0 and self.lossy.threshold is not None:
            raise UsageError(
                "--drop-cold-experts with --cache-mb 0: without a cache every expert is a miss and the drop is a plain weight cut; "
                "give the cache memory, or use --n-expert-used"
            )
        if self.prefetch < 0:
            raise UsageError(f"--prefetch {self.prefetch}: must be 0 (off) or a number of layers")
        if self.prefetch and self.evict == "belady":
            raise UsageError("--prefetch does nothing for --evict belady, which knows what comes; leave one of them out")
        if self.prefetch and self.budget_bytes == 0:
            raise UsageError(f"--prefetch {self.prefetch} with --cache-mb 0: there is no cache to read ahead into; give the cache memory")

    @property
    def baseline(self) -> Cell:
        """The same cache with all that is routed loaded when it is needed: what reads are held against."""
        mode: Mode = "recorded" if self.mode == "recorded" else "simulate"
        return dataclasses.replace(self, mode=mode, lossy=LOSSLESS, prefetch=0)


@dataclass(frozen=True, kw_only=True)
class Tally:
    """Counts of a phase.

    tokens; routed and dropped in routings; hits, misses and skipped in distinct experts per layer batch (skipped: routed to, but dropped
    by all that did, so not looked up); bytes; cells (token x layer); weight as the router gave it. ahead: experts read ahead.
    """

    tokens: int = 0
    cells: int = 0
    routed: int = 0
    dropped: int = 0
    hits: int = 0
    misses: int = 0
    skipped: int = 0
    read_bytes: int = 0
    skipped_bytes: int = 0
    ahead: int = 0
    ahead_hits: int = 0
    ahead_bytes: int = 0
    weight: float = 0.0
    weight_dropped: float = 0.0

    def __add__(self, other: Tally) -> Tally:
        return Tally(**{field.name: getattr(self, field.name) + getattr(other, field.name) for field in dataclasses.fields(Tally)})

    @property
    def hit_fraction(self) -> float:
        """Hits over all distinct experts that were routed to, dropped or not: dropping alone does not raise it."""
        return _ratio(self.hits, self.hits + self.misses + self.skipped)

    @property
    def dropped_fraction(self) -> float:
        return _ratio(self.dropped, self.routed)

    @property
    def weight_dropped_fraction(self) -> float:
        return _ratio(self.weight_dropped, self.weight)

    @property
    def read_bytes_per_token(self) -> float:
        return _ratio(self.read_bytes, self.tokens)

    @property
    def experts_per_routing(self) -> float:
        """Experts that a token keeps in a layer, on average."""
        return _ratio(self.routed - self.dropped, self.cells)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a cell found. ``baseline`` is None where the cell is its own. layer_hits, layer_dropped: decode, per MoE layer.

    schedule: for belady, the order that was best (``engine`` says why there are several).
    """

    cell: Cell
    prefill: Tally
    decode: Tally
    evictions: int = 0
    peak_bytes: int = 0
    layer_hits: tuple[int, ...] = ()
    layer_dropped: tuple[int, ...] = ()
    schedule: str | None = None
    baseline: Outcome | None = None

    def phase(self, name: str) -> Tally:
        """Return the counts of ``prefill``, ``decode`` or ``all``."""
        if name == "all":
            return self.prefill + self.decode
        tally: Tally = getattr(self, name)
        return tally

    def reads_avoided_fraction(self, phase: str) -> float:
        """Share of the bytes that the same cache reads without a lossy policy and without reading ahead; below 0 if more is read."""
        mine = self.phase(phase)
        if self.cell.mode == "recorded":
            return _ratio(mine.skipped_bytes, mine.read_bytes + mine.skipped_bytes)
        reads = mine.read_bytes if self.baseline is None else self.baseline.phase(phase).read_bytes
        return _ratio(reads - mine.read_bytes, reads)

    def check(self) -> None:
        """Raise AccountingError if the counts contradict each other."""
        for name in ("prefill", "decode"):
            tally = self.phase(name)
            counted = tally.hits + tally.misses + tally.dropped
            if name == "decode" and counted != tally.routed:
                raise AccountingError(f"replay: hits + misses + drops of {name} are {counted}, not the {tally.routed} routings")
            if not 0 <= tally.dropped <= tally.routed or counted > tally.routed:
                raise AccountingError(f"replay: {name} counts {counted} lookups and drops for {tally.routed} routings")
            if (tally.misses + tally.ahead > 0) != (tally.read_bytes > 0):
                raise AccountingError(f"replay: {tally.misses} misses of {name} cannot have read {tally.read_bytes} bytes")


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
