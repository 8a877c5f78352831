"""What the demo's result says: the table's numbers, and a few sentences that claim no more than these.

In: a ``DemoResult``. Out: rows, sentences, and the object of ``demo --json`` (docs/telemetry.md). Measures nothing, prints nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass

from moetriage import __version__
from moetriage.demo.plan import PLAIN, STREAMED, Cell
from moetriage.demo.run import DemoResult
from moetriage.stream.cell import CellResult
from moetriage.stream.launch import CellOutcome
from moetriage.types import MIB

#: Closer than this two rates of one short run each are not told apart.
_SAME_RATE = 1.1


@dataclass(frozen=True, kw_only=True)
class Row:
    """One cell in numbers; None where there is none.

    tokens: evaluated one by one. read_bytes_per_token: read from the disk; with plain mmap what the kernel counts for the process, else
    what the engine counts. hit_fraction, dropped_fraction: of the routed experts. peak_memory_bytes: resident, mapped pages included.
    """

    cell: str
    tokens: int
    cut_short: bool
    tok_per_s: float | None
    read_bytes_per_token: float | None
    hit_fraction: float | None
    dropped_fraction: float | None
    weight_dropped_fraction: float | None
    peak_memory_bytes: int | None
    prefill_seconds: float | None
    load_seconds: float | None
    cgroup_peak_bytes: int | None


def rows(result: DemoResult) -> list[Row]:
    """Return the table."""
    return [_row(cell, outcome) for cell, outcome in result.cells]


def sentences(result: DemoResult) -> list[str]:
    """Return what the numbers show and what they do not."""
    return list(_sentences(result))


def as_dict(result: DemoResult) -> dict[str, object]:
    """Return the object of ``demo --json``."""
    return {
        "version": __version__,
        "model": result.layout.name,
        "layers": result.layout.n_layer,
        "file_bytes": result.sizes.file_bytes,
        "kept": None if result.kept is None else str(result.kept),
        "cache_bytes": result.sizes.cache_mb * MIB,
        "limit_bytes": None if result.unlimited_because is not None else result.sizes.limit_bytes,
        "unlimited_because": result.unlimited_because,
        "tokens": result.tokens,
        "seconds": result.seconds,
        "same_tokens": _same_tokens(result),
        "cells": [asdict(row) for row in rows(result)],
        "sentences": sentences(result),
    }


def _row(cell: Cell, outcome: CellOutcome) -> Row:
    streams = not cell.config.mmap
    cgroup_peak = None if outcome.limit_bytes is None else outcome.peak_bytes
    if outcome.result is None:
        return Row(cell=cell.name, tokens=0, cut_short=True, cgroup_peak_bytes=cgroup_peak, **_nothing())
    report, decode = outcome.result.report, outcome.result.report["decode"]
    n, routed = decode["tokens"], decode["routed"]
    return Row(
        cell=cell.name,
        tokens=n,
        cut_short=outcome.result.cut_short,
        tok_per_s=report["tok_per_s"],
        read_bytes_per_token=_reads(outcome.result, streams),
        hit_fraction=decode["hits"] / routed if streams and routed else None,
        dropped_fraction=decode["dropped"] / routed if streams and routed else None,
        weight_dropped_fraction=report["drop"]["weight_dropped_fraction"] if streams else None,
        peak_memory_bytes=report["peak_rss_bytes"],
        prefill_seconds=report["prefill_seconds"],
        load_seconds=report["load_seconds"],
        cgroup_peak_bytes=cgroup_peak,
    )


def _nothing() -> dict[str, None]:
    filled = {"cell", "tokens", "cut_short", "cgroup_peak_bytes"}
    return {name: None for name in Row.__dataclass_fields__ if name not in filled}


def _reads(result: CellResult, streams: bool) -> float | None:
    total = result.report["decode"]["read_bytes"] if streams else result.decode_disk_bytes
    tokens = result.report["decode"]["tokens"]
    return total / tokens if total is not None and tokens else None


def _sentences(result: DemoResult) -> Iterator[str]:
    by_name = {row.cell: row for row in rows(result)}
    yield _on_speed(result, by_name[PLAIN], by_name[STREAMED])
    if result.unlimited_because is not None:
        yield (
            f"There was no memory limit ({result.unlimited_because}), so the page cache may hold the whole file, which flatters plain "
            "mmap: its rate and reads say nothing about a model that is larger than memory."
        )
    if (dropping := _on_dropping(by_name)) is not None:
        yield dropping
    n_layer, of_layers = result.layout.n_layer, result.trace.n_layer
    routing = f"one recorded prompt, top-{result.trace.n_expert_used} of {result.trace.n_expert}"
    layers = "" if n_layer == of_layers else f", the first {n_layer} of {of_layers} layers, whose hit rate is lower than that of all"
    yield (
        "The weights are random, so there is no text to show, and nothing here tells how much quality dropping costs; "
        f"what is real is the routing ({routing}{layers}) and the size of what is read."
    )
    yield from _on_limits(result)


def _on_speed(result: DemoResult, plain: Row, streamed: Row) -> str:
    same = ", and both said the same tokens" if _same_tokens(result) else ""
    if not plain.tok_per_s:
        return "Plain mmap did not come to its second token in its share of the time."
    ratio = _ratio(result)
    if ratio is None:
        return "Streaming did not come to its second token in its share of the time."
    where = "Here" if result.unlimited_because is not None else "In the same memory"
    if 1 / _SAME_RATE < ratio < _SAME_RATE:
        return f"{where} streaming was about as fast as plain mmap ({ratio:.2f} times){same}."
    if ratio < 1:
        return f"{where} streaming was slower than plain mmap: {ratio:.2f} times its rate{same}."
    return f"{where} streaming was {ratio:.1f} times as fast as plain mmap{same}."


def _ratio(result: DemoResult) -> float | None:
    """Return plain mmap's seconds over streaming's for the tokens that both evaluated: either begins cold and gets faster."""
    times = {}
    for cell, outcome in result.cells:
        steps = [] if outcome.result is None else outcome.result.steps
        times[cell.name] = [step["wall_seconds"] for step in steps if step["phase"] == 1]
    n = min(len(times[PLAIN]), len(times[STREAMED]))
    return sum(times[PLAIN][:n]) / sum(times[STREAMED][:n]) if n else None


def _on_dropping(by_name: dict[str, Row]) -> str | None:
    streamed = [row for row in by_name.values() if row.cell != PLAIN]
    if len({row.tokens for row in streamed}) > 1:
        return "The streamed cells came to different numbers of tokens, so their reads are not compared."
    lossless = by_name[STREAMED].read_bytes_per_token
    parts = []
    for row in streamed:
        if row.dropped_fraction and lossless and row.read_bytes_per_token is not None and row.weight_dropped_fraction is not None:
            saved, lost = 1 - row.read_bytes_per_token / lossless, row.weight_dropped_fraction
            parts.append(f"{saved:.0%} of the reads for {lost:.1%} of the router's weight ({row.cell.rpartition(', ')[2]})")
    return f"Dropping cold experts saved {' and '.join(parts)}; its tokens are no longer those of the model." if parts else None


def _on_limits(result: DemoResult) -> Iterator[str]:
    """Name what makes a row weaker than it looks."""
    for cell, outcome in result.cells:
        if outcome.result is None:
            yield f"{cell.name}: ended after {outcome.spec.seconds:.0f} s or more without finishing its prompt."
        elif outcome.result.cut_short:
            n = outcome.result.report["decode"]["tokens"]
            yield f"{cell.name}: there was time for {n} of {result.tokens} tokens."
        if outcome.warm_bytes:
            yield f"{cell.name}: it did not begin cold: {outcome.warm_bytes // MIB} MiB of the file stayed in the page cache."
    yield from dict.fromkeys(note for _, outcome in result.cells for note in outcome.notes)
    states = {outcome.result.report["o_direct"] for cell, outcome in result.cells if outcome.result and not cell.config.mmap} - {"on"}
    yield from (f"Reads did not go past the page cache: O_DIRECT {state}." for state in sorted(states))


def _same_tokens(result: DemoResult) -> bool | None:
    """Whether plain mmap and streaming said the same, as far as both came (``run_demo`` refuses a difference); None if one said nothing."""
    said = [outcome.result for cell, outcome in result.cells if cell.name in (PLAIN, STREAMED)]
    return True if all(one is not None and one.report["token_ids"] for one in said) else None
