"""The options of ``moetriage replay``, and what they become: cells, a sweep's grid, a machine.

In: values as typer parsed them. Out: validated settings. A flag that would do nothing is refused here, because only here is it
known that it was given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from moetriage.errors import UsageError
from moetriage.types import MIB

if TYPE_CHECKING:
    from moetriage.replay.advice import Machine
    from moetriage.replay.cells import Cell, Lossy
    from moetriage.replay.routes import RouteFile, RouteShape
    from moetriage.replay.sweep import Grid

_CACHE = "The cache"
_LOSSY = "Lossy: fewer experts"
_ACTIONS = "Sweep, bound, picture, advice"

#: Far above any cache; beyond it a size is a slip of the keyboard.
MAX_BYTES = 2**53

Number = TypeVar("Number", int, float)


@dataclass(frozen=True, kw_only=True)
class CellOptions:
    """What is replayed."""

    mode: Annotated[
        str | None,
        typer.Option(
            metavar="recorded|simulate|closed-loop",
            help="Whose residency: the recorded run's (default), that of a simulated cache that loads all that is routed, or that of one "
            "which does not load what is dropped, as the engine does.",
        ),
    ] = None
    cache_mb: Annotated[
        list[str] | None,
        typer.Option(metavar="N,...", rich_help_panel=_CACHE, help="Size of the cache in MiB (default: what the trace was recorded with)."),
    ] = None
    evict: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME,...",
            rich_help_panel=_CACHE,
            help="Order of eviction: lru (default, the engine's), lfu, lfuda, s3fifo, partition, random, belady.",
        ),
    ] = None
    prefetch: Annotated[
        int, typer.Option(metavar="N", rich_help_panel=_CACHE, help="Read ahead what the token before used in the next N layers.")
    ] = 0
    seed: Annotated[int | None, typer.Option(metavar="N", rich_help_panel=_CACHE, help="Of --evict random (default: 0).")] = None
    drop_cold_experts: Annotated[
        list[str] | None,
        typer.Option(metavar="F,...", rich_help_panel=_LOSSY, help="Drop what is not resident and has less than F / top-k of the routing."),
    ] = None
    n_expert_used: Annotated[
        list[str] | None, typer.Option(metavar="K,...", rich_help_panel=_LOSSY, help="Use the first K experts of each routing only.")
    ] = None
    drop_in_prefill: Annotated[bool, typer.Option("--drop-in-prefill", rich_help_panel=_LOSSY, help="Drop in prefill, too.")] = False
    drop_raw_weight: Annotated[
        bool, typer.Option("--drop-raw-weight", rich_help_panel=_LOSSY, help="Compare the router's weight itself instead of its share.")
    ] = False

    def given(self) -> list[str]:
        """Return the flags that were given."""
        flags = {
            "--mode": self.mode,
            "--cache-mb": self.cache_mb,
            "--evict": self.evict,
            "--prefetch": self.prefetch,
            "--seed": self.seed,
            "--drop-cold-experts": self.drop_cold_experts,
            "--n-expert-used": self.n_expert_used,
            "--drop-in-prefill": self.drop_in_prefill,
            "--drop-raw-weight": self.drop_raw_weight,
        }
        return [flag for flag, value in flags.items() if value not in (None, 0, False)]

    def cells(self, file: RouteFile) -> list[Cell]:
        """Return what to replay of a trace, in the order of the table. Raises UsageError."""
        from moetriage.replay.cells import LOSSLESS, Cell

        mode = self._mode()
        lossy = self.lossy(file.shape, defaults=mode != "simulate")
        recorded = [Cell(mode="recorded", lossy=policy) for policy in (LOSSLESS, *lossy)]
        if mode == "recorded":
            return recorded
        cells = recorded if mode == "closed-loop" else []
        for budget in self.budgets(file):
            for evict in self.evictions():
                cache = {"evict": evict, "budget_bytes": budget, "prefetch": self.prefetch, "seed": self.seed or 0}
                cells += [Cell(mode="simulate", lossy=policy, **cache) for policy in (LOSSLESS, *lossy)]  # type: ignore[arg-type]
                if mode == "closed-loop":
                    cells += [Cell(mode="closed-loop", lossy=policy, **cache) for policy in lossy]  # type: ignore[arg-type]
        return cells

    def grid(self, file: RouteFile) -> Grid:
        """Return the cells of ``--sweep``. Raises UsageError."""
        from moetriage.replay.cells import EVICTIONS
        from moetriage.replay.sweep import Grid, default_budgets

        if self.mode is not None:
            raise UsageError("--mode does nothing with --sweep, which simulates lossless caches and runs lossy ones in closed loop")
        budgets = tuple(self.budgets(file)) if self.cache_mb else default_budgets(file.shape)
        return Grid(
            budgets_bytes=budgets,
            evictions=self.evictions(EVICTIONS),
            lossy=tuple(self.lossy(file.shape, defaults=True, k_too=False)),
            prefetch=self.prefetch,
            seed=self.seed or 0,
        )

    def lossy(self, shape: RouteShape, *, defaults: bool, k_too: bool = True) -> list[Lossy]:
        """Return the lossy policies that were asked for, or some if none was and ``defaults`` are wanted."""
        from moetriage.replay.cells import Lossy

        thresholds = _numbers(self.drop_cold_experts, "--drop-cold-experts", float)
        widths = _numbers(self.n_expert_used, "--n-expert-used", int)
        if defaults and not thresholds and not widths:
            thresholds = [0.5, 0.75, 1.0]
            widths = [k for k in dict.fromkeys((shape.top_k - 1, shape.top_k // 2)) if k > 0] if k_too else []
        if not thresholds and (self.drop_in_prefill or self.drop_raw_weight):
            raise UsageError("--drop-in-prefill and --drop-raw-weight do nothing without --drop-cold-experts F")
        rule = {"in_prefill": self.drop_in_prefill, "raw_weight": self.drop_raw_weight}
        return [*(Lossy(threshold=value, **rule) for value in thresholds), *(Lossy(n_expert_used=k) for k in widths)]

    def budgets(self, file: RouteFile) -> list[int]:
        """Return the cache's sizes in bytes: as given, or as the trace was recorded with. Raises UsageError if neither is known."""
        if self.cache_mb:
            sizes = _numbers(self.cache_mb, "--cache-mb", float)
            for size in sizes:
                if not 0 <= size * MIB <= MAX_BYTES:
                    raise UsageError(f"--cache-mb {size:g}: must be 0 (off) or a number of MiB")
            return [int(size * MIB) for size in sizes]
        recorded = file.extra.get("budget_bytes", "")
        if not (recorded.isascii() and recorded.isdecimal() and 0 < len(recorded) < 17):
            raise UsageError(f"{file.path}: does not say what cache it was recorded with; give --cache-mb")
        return [int(recorded)]

    def evictions(self, defaults: Sequence[str] = ("lru",)) -> tuple[str, ...]:
        """Return the orders that were asked for. Raises UsageError for a name that does not exist, or a seed that nothing uses."""
        from moetriage.replay.cells import EVICTIONS

        names = tuple(name for text in self.evict or () for name in text.split(",")) or tuple(defaults)
        for name in names:
            if name not in EVICTIONS:
                raise UsageError(f"--evict {name}: must be one of {', '.join(EVICTIONS)}")
        if self.seed is not None and "random" not in names:
            raise UsageError(f"--seed {self.seed} does nothing without --evict random")
        if self.seed is not None and not 0 <= self.seed < 2**64:
            raise UsageError(f"--seed {self.seed}: must be between 0 and 2^64 - 1")
        return names

    def _mode(self) -> str:
        from moetriage.replay.cells import MODES

        mode = self.mode or "recorded"
        if mode not in MODES:
            raise UsageError(f"--mode {mode}: must be one of {', '.join(MODES)}")
        return mode

    def refuse_cache_flags(self) -> None:
        """Raise UsageError for flags of a cache where none is simulated."""
        for flag in self.given():
            if flag in ("--cache-mb", "--evict", "--prefetch", "--seed"):
                raise UsageError(
                    f"{flag} does nothing with --mode recorded, which takes the trace's own residency: add --mode simulate or closed-loop"
                )


@dataclass(frozen=True, kw_only=True)
class ActionOptions:
    """What is done beside, or instead of, a plain replay."""

    bound: Annotated[
        bool, typer.Option("--bound", rich_help_panel=_ACTIONS, help="Say what no cache and no lossy policy can beat, too (LRU, F).")
    ] = False
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", rich_help_panel=_ACTIONS, help="Draw hits, losses, bound and layers as .svg, .png or .pdf."),
    ] = None
    sweep: Annotated[
        bool, typer.Option("--sweep", rich_help_panel=_ACTIONS, help="Run budgets x orders x F on all processors; goes on where it ended.")
    ] = False
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", rich_help_panel=_ACTIONS, help="Parquet of --sweep (default: TRACE.sweep.parquet here).")
    ] = None
    jobs: Annotated[
        int | None, typer.Option(metavar="N", rich_help_panel=_ACTIONS, help="Processes of --sweep (default: all processors).")
    ] = None
    advise: Annotated[
        bool, typer.Option("--advise", rich_help_panel=_ACTIONS, help="Say which cache and F suit a machine; needs the next three.")
    ] = False
    memory_mb: Annotated[
        float | None, typer.Option(metavar="M", rich_help_panel=_ACTIONS, help="Memory for weights in MiB, dense ones included.")
    ] = None
    disk_mb_s: Annotated[
        float | None, typer.Option(metavar="D", rich_help_panel=_ACTIONS, help="Random reads in 10^6 bytes a second (moetriage iobench).")
    ] = None
    compute_ms: Annotated[
        float | None, typer.Option(metavar="C", rich_help_panel=_ACTIONS, help="Computing time of a token without reads, in ms.")
    ] = None
    max_weight_dropped: Annotated[
        float | None,
        typer.Option(metavar="W", rich_help_panel=_ACTIONS, help="Most router weight that --advise may discard, 0 to 1 (default: 0.05)."),
    ] = None

    def check(self, cells: CellOptions) -> None:
        """Raise UsageError for flags that do nothing here, or that are missing."""
        if sum((self.sweep, self.advise, self.bound or self.plot is not None)) > 1:
            raise UsageError("--sweep, --advise and --bound or --plot are done one at a time: give one of them")
        for flag, value, needs in (
            ("--out", self.out, self.sweep or "--sweep"),
            ("--jobs", self.jobs, self.sweep or "--sweep"),
            ("--memory-mb", self.memory_mb, self.advise or "--advise"),
            ("--disk-mb-s", self.disk_mb_s, self.advise or "--advise"),
            ("--compute-ms", self.compute_ms, self.advise or "--advise"),
            ("--max-weight-dropped", self.max_weight_dropped, self.advise or "--advise"),
        ):
            if value is not None and needs is not True:
                raise UsageError(f"{flag} {value} does nothing without {needs}: give both, or neither")
        if self.jobs is not None and self.jobs < 1:
            raise UsageError(f"--jobs {self.jobs}: must be at least 1")
        if self.advise and cells.given():
            raise UsageError(f"{cells.given()[0]} does nothing with --advise, which tries caches and thresholds itself: leave it out")

    def machine(self) -> Machine:
        """Return what ``--advise`` is about. Raises UsageError for what is missing."""
        from moetriage.replay.advice import Machine

        if self.memory_mb is None or self.disk_mb_s is None or self.compute_ms is None:
            raise UsageError("--advise needs --memory-mb M, --disk-mb-s D (see moetriage iobench) and --compute-ms C")
        machine = Machine(memory_mb=self.memory_mb, disk_mb_s=self.disk_mb_s, compute_ms=self.compute_ms)
        machine.validate()
        return machine


def _numbers(texts: list[str] | None, flag: str, kind: Callable[[str], Number]) -> list[Number]:
    """Return the numbers of an option that may be repeated and may have several, with commas between them."""
    numbers = []
    for text in (part for texts_part in texts or () for part in texts_part.split(",")):
        try:
            number = kind(text)
        except ValueError as error:
            what = "whole numbers" if kind is int else "numbers"
            raise UsageError(f"{flag} {text}: must be {what}, with commas between them") from error
        numbers.append(number)
    return numbers
