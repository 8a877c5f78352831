"""What a run says about itself: a row per step, a line per token, one report; docs/telemetry.md defines every key.

In: ``TokenMetrics`` and ``RunReport`` from the session. Out: text, or an error when the counters contradict each other. It measures
nothing and knows neither llama.cpp nor the cache.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from moetriage.errors import AccountingError, UsageError
from moetriage.types import Phase, RunReport, TokenMetrics

#: First line of a metrics file; a change of a column's meaning changes the number, an added column does not.
CSV_MAGIC = "# token_metrics v1"
COLUMNS = tuple(field.name for field in dataclasses.fields(TokenMetrics))

_TIMES = ("compute_seconds", "read_wait_seconds", "cache_seconds", "other_seconds")
_COUNTS = ("hits", "misses", "dropped", "routed", "evictions", "reads", "read_bytes", "resident_bytes")

# Clocks are read at different places and a difference of two of them may round below zero; more than this is a fault in the count.
_RELATIVE_TOLERANCE = 1e-6
_RUN_TOLERANCE_SECONDS = 1e-3
_STEP_TOLERANCE_SECONDS = 1e-4
_ROUNDING_SECONDS = 1e-6
_MAX_FAULTS_SHOWN = 5


class TokenCsvWriter:
    """Write one CSV row per step, each at once and whole, so that the file can be followed and survives an abort.

    path: the file, replaced if it exists. preamble: facts of the run (version, model, config); each becomes a line ``# key=<JSON>``.

    Attributes: ``rows`` written, ``error`` once writing has failed.

    Raises UsageError at once if the file cannot be written.
    """

    def __init__(self, path: Path | str, preamble: Mapping[str, object]) -> None:
        self.path = str(path)
        self.rows = 0
        self._size = 0
        self.error: UsageError | None = None
        lines = [CSV_MAGIC, *(f"# {key}={_json(value)}" for key, value in preamble.items()), ",".join(COLUMNS)]
        try:
            self._file = Path(path).open("wb", buffering=0)  # noqa: SIM115 (closed by close())
            try:
                self._put("".join(f"{line}\n" for line in lines))
            except OSError:
                self._file.close()
                raise
        except OSError as error:
            raise UsageError(f"{path}: the metrics cannot be written: {error.strerror or error}") from error

    def write(self, metrics: TokenMetrics) -> None:
        """Add a row. Raises UsageError once, when the disk takes no more; the file then ends with its last whole row.

        The caller may stop or go on: later rows are ignored.
        """
        if self.error is not None:
            return
        try:
            self._put(",".join(str(value) for value in _flat(metrics).values()) + "\n")
        except OSError as error:
            self.error = UsageError(f"{self.path}: the metrics end after {self.rows} steps: {error.strerror or error}")
            raise self.error from error
        self.rows += 1

    def close(self) -> None:
        """Close the file; there is nothing left to write."""
        self._file.close()

    def _put(self, text: str) -> None:
        data = text.encode()
        view = memoryview(data)
        try:
            while view:
                view = view[self._file.write(view) :]
        except OSError:
            with contextlib.suppress(OSError):  # a pipe or a device has nothing to cut off
                os.ftruncate(self._file.fileno(), self._size)
            raise
        self._size += len(data)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()


def progress_line(metrics: TokenMetrics) -> str:
    """Return a step as one line of JSON without its line end, with the keys of the CSV's columns."""
    return _json(_flat(metrics))


def report_as_dict(report: RunReport) -> dict[str, object]:
    """Return a report as JSON-ready values under the keys of ``run --json``, in their order."""
    return dataclasses.asdict(report)


def check_identities(report: RunReport, token_metrics: Sequence[TokenMetrics], *, layer_bytes: int = 0) -> None:
    """Check that a run's counters agree with each other.

    token_metrics: all steps of the run, in order; empty if they were not kept (then only the report is checked). layer_bytes: what one
    layer's batch may hold above the budget while it is computed.

    Raises AccountingError that names each identity that fails, with both sides.
    """
    is_streamed = not report.config.get("mmap", False)
    faults = list(_report_faults(report, layer_bytes))
    for metrics in token_metrics:
        faults += (f"step {metrics.step}: {fault}" for fault in _step_faults(metrics, is_streamed=is_streamed))
    if token_metrics:
        faults += _sum_faults(report, token_metrics)
    if faults:
        more = f"; and {len(faults) - _MAX_FAULTS_SHOWN} more" if len(faults) > _MAX_FAULTS_SHOWN else ""
        raise AccountingError(f"the run's counters contradict each other: {'; '.join(faults[:_MAX_FAULTS_SHOWN])}{more}")


def _report_faults(report: RunReport, layer_bytes: int) -> Iterable[str]:
    cache, drop = report.cache, report.drop
    for name in ("load_seconds", "prefill_seconds", "decode_seconds", "tok_per_s"):
        yield from _negative(name, getattr(report, name))
    yield from (fault for name in _TIMES for fault in _negative(name, getattr(report.phases, name)))
    yield from _apart("phases", report.phases.total_seconds, "decode_seconds", report.decode_seconds, _RUN_TOLERANCE_SECONDS)
    if len(report.token_ids) != report.generated:
        yield f"generated {report.generated} is not the number of token_ids ({len(report.token_ids)})"
    # The first token comes out of the prefill, so a run may count it in or out; nothing else may be left out of the rate.
    tokens = report.tok_per_s * report.decode_seconds
    if report.decode_seconds > 0 and not 0.999 * max(report.generated - 1, 0) <= tokens <= 1.001 * report.generated:
        yield f"tok_per_s {report.tok_per_s:g} x decode_seconds {report.decode_seconds:g} is not generated ({report.generated})"
    allowed = cache.budget_bytes + layer_bytes
    for name in ("resident_bytes", "peak_bytes"):
        if getattr(cache, name) > allowed:
            yield f"cache {name} {getattr(cache, name)} is above the budget of {cache.budget_bytes} bytes and one layer ({layer_bytes})"
    yield from _phase_faults(report)
    if cache.resident_bytes > cache.peak_bytes:
        yield f"cache resident_bytes {cache.resident_bytes} is above its peak_bytes {cache.peak_bytes}"
    if drop.dropped > drop.routed:
        yield f"dropped {drop.dropped} is above routed {drop.routed}"
    if not 0 <= drop.weight_dropped_fraction <= 1 or (drop.weight_dropped_fraction > 0 and drop.dropped == 0):
        yield f"weight_dropped_fraction {drop.weight_dropped_fraction:g} does not go with {drop.dropped} dropped"


def _phase_faults(report: RunReport) -> Iterable[str]:
    """Check the counts of both phases; a report made without steps has none."""
    prefill, decode = report.prefill, report.decode
    if prefill.tokens + decode.tokens == 0:
        return
    counted = decode.hits + decode.misses + decode.dropped
    if counted != decode.routed and not report.config.get("mmap", False):
        yield f"decode: hits {decode.hits} + misses {decode.misses} + dropped {decode.dropped} is {counted}, not routed {decode.routed}"
    if report.finish_reason == "interrupted":
        return  # what an ended evaluation counted is in the report, but in no phase
    for name, total in (("hits", report.cache.hits), ("misses", report.cache.misses), ("dropped", report.drop.dropped)):
        if getattr(prefill, name) + getattr(decode, name) != total:
            yield f"{name} of prefill {getattr(prefill, name)} and of decode {getattr(decode, name)} are not the report's {total}"


def _step_faults(metrics: TokenMetrics, *, is_streamed: bool) -> Iterable[str]:
    for name in ("wall_seconds", *_TIMES, *_COUNTS):
        yield from _negative(name, getattr(metrics, name))
    parts = sum(getattr(metrics, name) for name in _TIMES)
    yield from _apart("phases", parts, "wall_seconds", metrics.wall_seconds, _STEP_TOLERANCE_SECONDS)
    if metrics.n_tokens < 1:
        yield f"n_tokens {metrics.n_tokens} is below 1"
    counted = metrics.hits + metrics.misses + metrics.dropped
    if is_streamed and metrics.phase is Phase.DECODE and counted != metrics.routed:
        yield f"hits {metrics.hits} + misses {metrics.misses} + dropped {metrics.dropped} is {counted}, not routed {metrics.routed}"
    if metrics.dropped > metrics.routed:
        yield f"dropped {metrics.dropped} is above routed {metrics.routed}"
    if (metrics.read_bytes > 0) != (metrics.reads > 0):
        yield f"{metrics.reads} reads cannot have read {metrics.read_bytes} bytes"


def _sum_faults(report: RunReport, token_metrics: Sequence[TokenMetrics]) -> Iterable[str]:
    for name, total in (("hits", report.cache.hits), ("misses", report.cache.misses), ("dropped", report.drop.dropped)):
        counted = sum(getattr(metrics, name) for metrics in token_metrics)
        if counted != total:
            yield f"{name} of all steps are {counted}, the report says {total}"
    # Read-ahead goes on after the last step, so a run may read and evict more than its steps did, never less.
    for name, total in (("evictions", report.cache.evictions), ("reads", report.reads), ("read_bytes", report.read_bytes)):
        counted = sum(getattr(metrics, name) for metrics in token_metrics)
        if counted > total:
            yield f"{name} of all steps are {counted}, more than the report's {total}"
    for phase, name, total_seconds in (
        (Phase.PREFILL, "prefill_seconds", report.prefill_seconds),
        (Phase.DECODE, "decode_seconds", report.decode_seconds),
    ):
        wall = sum(metrics.wall_seconds for metrics in token_metrics if metrics.phase is phase)
        if wall > total_seconds * (1 + _RELATIVE_TOLERANCE) + _RUN_TOLERANCE_SECONDS:
            yield f"steps of {phase.name.lower()} took {wall:.6f} s, longer than {name} {total_seconds:.6f}"


def _negative(name: str, value: float) -> Iterable[str]:
    limit = -_ROUNDING_SECONDS if isinstance(value, float) else 0
    if not (math.isfinite(value) and value >= limit):
        yield f"{name} is {value:g}"


def _apart(parts: str, left: float, whole: str, right: float, tolerance_seconds: float) -> Iterable[str]:
    if not abs(left - right) <= _RELATIVE_TOLERANCE * abs(right) + tolerance_seconds:
        yield f"{parts} sum to {left:.6f} s, but {whole} is {right:.6f}"


def _flat(metrics: TokenMetrics) -> dict[str, object]:
    return dataclasses.asdict(metrics) | {"phase": metrics.phase.name.lower()}


def _json(value: object) -> str:
    return json.dumps(value, allow_nan=False)
