"""From what one turn measured to a ``RunReport``.

In: the steps of a turn, four points in time and the session's counters before and after. Out: the report. It measures nothing but the
process's peak memory; what each number means is in docs/telemetry.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from moetriage.stream.session import Session
from moetriage.types import CacheStats, DropStats, Phase, PhaseCounts, PhaseTimes, RunReport, TokenMetrics


@dataclass
class Turn:
    """One prompt and its answer while they are measured; times are those of ``time.perf_counter``, ``before`` the session's counters."""

    number: int
    began: float
    before: Mapping[str, float]
    prefill_ended: float | None = None
    ended: float = 0.0
    finish_reason: str = "length"
    steps: list[TokenMetrics] = field(default_factory=list)
    pieces: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)


def build_report(turn: Turn, session: Session, *, load_seconds: float, config: dict[str, object]) -> RunReport:
    """Return the report of a turn that has ended, by itself or not."""
    after = session.hook.stats()
    diff = {name: value - turn.before.get(name, 0.0) for name, value in after.items()}
    prefill, decode = (_counts(step for step in turn.steps if step.phase is phase) for phase in Phase)
    prefill_ended = _prefill_end(turn)
    decode_seconds = turn.ended - prefill_ended
    return RunReport(
        text="".join(turn.pieces),
        token_ids=turn.token_ids,
        generated=len(turn.token_ids),
        load_seconds=load_seconds,
        prefill_seconds=prefill_ended - turn.began,
        decode_seconds=decode_seconds,
        tok_per_s=decode.tokens / decode_seconds if decode_seconds > 0 else 0.0,
        read_bytes=int(diff.get("read_bytes", 0)),
        reads=int(diff.get("reads", 0)),
        cache=CacheStats(
            budget_bytes=session.budget.bytes,
            resident_bytes=int(after.get("resident_bytes", 0)),
            peak_bytes=int(after.get("peak_bytes", 0)),
            hits=int(diff.get("hits", 0)),
            misses=int(diff.get("misses", 0)),
            evictions=int(diff.get("evictions", 0)),
        ),
        drop=DropStats(
            threshold=None if session.config.drop is None else session.config.drop.threshold,
            routed=int(diff["routed"]),
            dropped=int(diff["dropped"]),
            weight_dropped_fraction=diff["mass_dropped"] / diff["mass"] if diff["mass"] > 0 else 0.0,
        ),
        phases=_phases(turn, decode_seconds),
        peak_rss_bytes=peak_rss_bytes(),
        o_direct="off" if session.config.mmap else session.hook.direct_state,
        finish_reason=turn.finish_reason,
        prefill=prefill,
        decode=decode,
        config=config,
    )


def _prefill_end(turn: Turn) -> float:
    if turn.prefill_ended is not None:
        return turn.prefill_ended
    # Nothing of the prompt was evaluated: it was known already, or the turn was stopped before.
    return turn.began if turn.token_ids else turn.ended


def _counts(steps: Iterable[TokenMetrics]) -> PhaseCounts:
    steps = list(steps)
    names = ("hits", "misses", "dropped", "routed", "reads", "read_bytes")
    return PhaseCounts(tokens=sum(step.n_tokens for step in steps), **{name: sum(getattr(step, name) for step in steps) for name in names})


def _phases(turn: Turn, decode_seconds: float) -> PhaseTimes:
    decode = [step for step in turn.steps if step.phase is Phase.DECODE]
    compute, wait, cache = (sum(getattr(step, f"{name}_seconds") for step in decode) for name in ("compute", "read_wait", "cache"))
    # What is not in an evaluation: sampling, text, callbacks, and an evaluation that was interrupted.
    other = decode_seconds - compute - wait - cache
    return PhaseTimes(compute_seconds=compute, read_wait_seconds=wait, cache_seconds=cache, other_seconds=other)


def peak_rss_bytes() -> int:
    """Return the highest resident memory of this process so far."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0
