"""One measured run in a process of its own, so that its memory, its reads and its crashes are its own: the child of demo and benchmarks.

In: a ``CellSpec`` as JSON, the only argument of ``python -m moetriage.stream.cell``. Out: lines of JSON on standard output: notes, steps,
at the end the ``CellResult`` or the error. ``launch`` is the other side. Knows no cgroup and compares nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from moetriage.config import DropConfig, StreamConfig
from moetriage.errors import MoetriageError
from moetriage.types import Phase, TokenMetrics

#: Prose of many different words: a prompt that repeats itself would route to few experts.
_PASSAGE = (
    "The morning ferry left the harbour ten minutes late, carrying two cyclists, a crate of lemons and somebody's piano. From the upper "
    "deck one could count nineteen islands, most of them bare, and a lighthouse that no longer warned anybody of anything. Weather reports "
    "had promised rain; instead a dry wind blew from the south-east, lifting hats, newspapers and finally a whole umbrella into the water. "
)
_PR_SET_PDEATHSIG = 1

Emit = Callable[[Mapping[str, object]], None]


@dataclass(frozen=True, kw_only=True)
class CellSpec:
    """What to run: ``prompt_tokens`` of prose, then ``tokens`` evaluated one by one (one more is sampled, see ``tok_per_s`` in the docs).

    n_ctx: context in tokens; None takes just what prompt and tokens need. seconds: after so many since the process began no further token
    is begun; None for no bound. seed, temperature: of the sampling, whose other settings are ``Sampling``'s.
    """

    model: Path
    config: StreamConfig
    prompt_tokens: int
    tokens: int
    n_ctx: int | None = None
    n_threads: int | None = None
    temperature: float = 0.8
    seed: int = 1
    seconds: float | None = None

    def to_json(self) -> str:
        return json.dumps(vars(self) | {"model": str(self.model), "config": self.config.as_dict()})

    @classmethod
    def from_json(cls, text: str) -> Self:
        values = json.loads(text)
        config = values.pop("config")
        for name in ("force_routing", "replay_drops"):
            config[name] = None if config[name] is None else Path(config[name])
        config["drop"] = None if config["drop"] is None else DropConfig(**config["drop"])
        return cls(**values | {"model": Path(values["model"]), "config": StreamConfig(**config)})


@dataclass(frozen=True, kw_only=True)
class CellResult:
    """What a cell measured.

    report: keys of ``run --json``. steps: TokenMetrics of each step, as dicts. cut_short: the time was over before the last token.
    prefill_disk_bytes, decode_disk_bytes: what the kernel counts as read from the disk for this process, mapped pages and their read-ahead
    included; None where it does not say.
    """

    report: dict[str, Any]
    steps: list[dict[str, Any]] = field(repr=False)
    cut_short: bool
    prefill_disk_bytes: int | None
    decode_disk_bytes: int | None


class _OutOfTime(KeyboardInterrupt):
    """Ends a generation from within as Ctrl-C would: the runner then still reports what there was."""


def run_cell(spec: CellSpec, emit: Emit, *, began: float) -> CellResult:
    """Run a cell in this process; ``began``: its start on the clock of ``time.monotonic``. Raises what a Runner raises."""
    # Here, so that the parent, which needs the two classes only, loads no llama.cpp.
    from moetriage.stream.runner import RunInterrupted, Runner
    from moetriage.stream.sampling import Sampling
    from moetriage.stream.telemetry import report_as_dict

    sampling = Sampling(max_tokens=spec.tokens + 1, temperature=spec.temperature, seed=spec.seed)
    n_ctx = spec.n_ctx or spec.prompt_tokens + spec.tokens + 1
    steps: list[TokenMetrics] = []
    disk: list[int | None] = []
    cut_short = False

    def on_metrics(metrics: TokenMetrics) -> None:
        nonlocal cut_short
        steps.append(metrics)
        disk.append(_disk_read_bytes())
        emit({"phase": metrics.phase.name.lower(), "tokens": sum(step.n_tokens for step in steps if step.phase is metrics.phase)})
        done = len([step for step in steps if step.phase is Phase.DECODE])
        if spec.seconds is not None and 0 < done < spec.tokens and time.monotonic() - began > spec.seconds:
            cut_short = True
            raise _OutOfTime

    with Runner(
        spec.model, spec.config, sampling=sampling, n_ctx=n_ctx, n_threads=spec.n_threads, notify=lambda line: emit({"note": line})
    ) as runner:
        disk.append(_disk_read_bytes())
        try:
            report = runner.generate(prompt_of(runner.llm, spec.prompt_tokens), on_metrics=on_metrics)
        except RunInterrupted as interrupted:
            if not cut_short:
                raise
            report = interrupted.report
        runner.check(report)
    batches = sum(step.phase is Phase.PREFILL for step in steps)
    return CellResult(
        report=report_as_dict(report),
        steps=[dataclasses.asdict(step) for step in steps],
        cut_short=cut_short,
        prefill_disk_bytes=_between(disk[0], disk[batches]),
        decode_disk_bytes=_between(disk[batches], disk[-1]),
    )


def prompt_of(llm: Any, n_tokens: int) -> str:
    """Return prose of exactly ``n_tokens`` tokens of the model's vocabulary. Raises MoetriageError where cutting it changes its tokens."""
    text = _PASSAGE * (1 + n_tokens // 40)
    tokens = llm.tokenize(text.encode(), add_bos=False)[:n_tokens]
    cut = str(llm.detokenize(tokens).decode(errors="replace"))
    count = len(llm.tokenize(cut.encode(), special=True))
    if count != n_tokens:
        raise MoetriageError(f"{llm.model_path}: no prompt of {n_tokens} tokens could be made (it has {count}); try another number")
    return cut


def _between(before: int | None, after: int | None) -> int | None:
    return None if before is None or after is None else after - before


def _disk_read_bytes() -> int | None:
    """Return what this process has had read from disks so far; None where the kernel does not count it (some containers)."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/io").read_text().splitlines():
            name, _, value = line.partition(": ")
            if name == "read_bytes":
                return int(value)
    return None


@contextlib.contextmanager
def _own_stdout() -> Iterator[Emit]:
    """Yield what writes the lines; whatever else prints in this process goes to standard error."""
    lines = sys.stdout

    def emit(values: Mapping[str, object]) -> None:
        print(json.dumps(values, allow_nan=False), file=lines, flush=True)

    with contextlib.redirect_stdout(sys.stderr):
        yield emit


def _main() -> int:
    began = time.monotonic()
    # A parent that is killed cannot end its child, which would go on for minutes with gigabytes.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    with _own_stdout() as emit:
        try:
            result = run_cell(CellSpec.from_json(sys.argv[1]), emit, began=began)
        except MoetriageError as error:
            emit({"error": str(error), "exit_code": error.exit_code})
            return error.exit_code
        emit({"result": vars(result)})
    return 0


if __name__ == "__main__":
    sys.exit(_main())
