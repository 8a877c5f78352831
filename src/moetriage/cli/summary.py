"""A report in the few lines that a person reads after a run.

In: a ``RunReport``. Out: lines of text. Every number is one of the report's or a ratio of two of them.
"""

from __future__ import annotations

from collections.abc import Iterator

from moetriage.cli.terminal import size
from moetriage.types import RunReport

_ENDS = {
    "context": "stopped: the context of {n_ctx} tokens is full (-c)",
    "interrupted": "stopped by Ctrl-C",
}


def summary(report: RunReport) -> list[str]:
    """Return the summary of a run."""
    return list(_lines(report))


def _lines(report: RunReport) -> Iterator[str]:
    if (line := end_line(report)) is not None:
        yield line
    yield f"{short_summary(report)}; loaded in {report.load_seconds:.2f} s"
    if report.config["mmap"]:
        yield "plain mmap: nothing was streamed"
    else:
        yield _cache(report)
        yield _reads(report)
    yield f"{_times(report)}peak memory {size(report.peak_rss_bytes)}"
    if (line := drop_line(report)) is not None:
        yield line


def end_line(report: RunReport) -> str | None:
    """Return why the answer ended early, or None where it did not."""
    line = _ENDS.get(report.finish_reason)
    return None if line is None else line.format(n_ctx=report.config["n_ctx"])


def short_summary(report: RunReport) -> str:
    """Return one line with sizes and rates, for an answer among others."""
    answer = f"{report.generated} tokens"
    if report.decode.tokens:
        answer += f" in {report.decode_seconds:.2f} s: {report.tok_per_s:.2f} tok/s"
    return f"{answer}; prompt {report.prefill.tokens} tokens in {report.prefill_seconds:.2f} s"


def drop_line(report: RunReport) -> str | None:
    """Return what dropping did, or None where nothing could be dropped."""
    drop, replayed = report.drop, report.config["replay_drops"]
    if drop.threshold is None and replayed is None:
        return None
    percent = 100 * drop.dropped / drop.routed if drop.routed else 0.0
    rule = f"replayed from {replayed}" if drop.threshold is None else f"threshold {drop.threshold:g} x uniform"
    return f"moe-drop: {drop.dropped}/{drop.routed} routed experts dropped ({percent:.1f}%), {rule}"


def _cache(report: RunReport) -> str:
    cache, source = report.cache, report.config["cache_source"]
    if cache.budget_bytes == 0:
        return f"cache off ({source})"
    held = f"cache {size(cache.resident_bytes)} of {size(cache.budget_bytes)} ({source})"
    routed = report.decode.routed
    return f"{held}, hits {100 * report.decode.hits / routed:.1f}% of routed experts" if routed else held


def _reads(report: RunReport) -> str:
    per_token = f"{size(report.decode.read_bytes / report.decode.tokens)} a token, " if report.decode.tokens else ""
    return f"read {per_token}{size(report.read_bytes)} in all; O_DIRECT {report.o_direct}"


def _times(report: RunReport) -> str:
    n = report.decode.tokens
    if not n:
        return ""
    phases = report.phases
    parts = {"compute": phases.compute_seconds, "read wait": phases.read_wait_seconds, "cache": phases.cache_seconds}
    text = ", ".join(f"{name} {1e3 * seconds / n:.1f}" for name, seconds in (parts | {"other": phases.other_seconds}).items())
    return f"ms a token: {text}; "
