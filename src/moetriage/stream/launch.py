"""Run a cell in a process of its own: from a cold page cache, inside a memory limit where one is given, and always gone at the end.

In: a ``CellSpec`` and a limit in bytes. Out: a ``CellOutcome``: what the child measured, and what its cgroup did. ``cell`` is the other
side. Decides nothing about models, sizes or what to compare.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any

from moetriage.errors import MoetriageError, UsageError
from moetriage.gguf.layout import read_layout
from moetriage.stream.cell import CellResult, CellSpec
from moetriage.stream.cgroup import MemoryCgroup
from moetriage.stream.page_cache import drop_page_cache

#: Called with "prefill" or "decode" and the number of tokens evaluated in that phase.
OnStep = Callable[[str, int], None]


@dataclass(frozen=True, kw_only=True)
class CellOutcome:
    """A cell that has ended.

    result: None if the child was ended because it was not done in time. limit_bytes: None without a cgroup.
    peak_bytes: of the cgroup, page cache included; without one the highest resident memory of the process, mapped pages included (0 if it
    was ended). held_peak_bytes: what of it could not be given back; None without a cgroup.
    warm_bytes: what of the model stayed in the page cache when it was emptied beforehand; above 0 the cell did not begin cold.
    """

    spec: CellSpec
    result: CellResult | None
    limit_bytes: int | None
    peak_bytes: int
    held_peak_bytes: int | None
    warm_bytes: int
    notes: tuple[str, ...]


def launch(
    spec: CellSpec, *, limit_bytes: int | None = None, on_step: OnStep | None = None, kill_after_seconds: float | None = None
) -> CellOutcome:
    """Run a cell and wait for it.

    limit_bytes: of the memory cgroup to make for it; None for none. kill_after_seconds: end the child then, if it has not ended itself.
    Raises UsageError where no cgroup can be made, what the child raised as UsageError or MoetriageError, and MoetriageError for a child
    that crashed or that its limit killed. No process is left behind, whatever is raised in here (Ctrl-C included).
    """
    warm_bytes = drop_page_cache(read_layout(spec.model).paths)
    notes: list[str] = []
    with contextlib.ExitStack() as stack:
        cgroup = None if limit_bytes is None else stack.enter_context(MemoryCgroup(limit_bytes))
        argv = [sys.executable, "-m", "moetriage.stream.cell", spec.to_json()]
        child = stack.enter_context(_Child(argv if cgroup is None else cgroup.wrap(argv), kill_after_seconds))
        last: dict[str, Any] = {}
        for last in child.lines():
            if "note" in last:
                notes.append(last["note"])
            elif "phase" in last and on_step is not None:
                on_step(last["phase"], last["tokens"])
        code = child.wait()
        if not child.was_late and "result" not in last:
            raise _failure(last, code, child.complaint(), cgroup)
        result = CellResult(**last["result"]) if "result" in last else None
        resident = 0 if result is None else int(result.report["peak_rss_bytes"])
        return CellOutcome(
            spec=spec,
            result=result,
            limit_bytes=None if cgroup is None else cgroup.limit_bytes,
            peak_bytes=resident if cgroup is None else cgroup.peak_bytes(),
            held_peak_bytes=None if cgroup is None else cgroup.stat().held_peak_bytes,
            warm_bytes=warm_bytes,
            notes=tuple(notes),
        )


def _failure(last: dict[str, Any], code: int, complaint: str, cgroup: MemoryCgroup | None) -> MoetriageError:
    if "error" in last:
        kind = UsageError if last["exit_code"] == UsageError.exit_code else MoetriageError
        return kind(last["error"])
    if cgroup is not None and cgroup.oom_kills():
        return MoetriageError(f"it needed more than its memory limit of {cgroup.limit_bytes} bytes and was killed")
    how = f"by {signal.Signals(-code).name}" if code < 0 else f"with status {code}"
    return MoetriageError(f"its process ended {how}{complaint and f': {complaint}'}")


class _Child:
    """A child process that reports in lines; killed, with all it started, when the ``with`` block is left."""

    def __init__(self, argv: Sequence[str], kill_after_seconds: float | None) -> None:
        self.was_late = False
        self._argv = argv
        self._timer = None if kill_after_seconds is None else threading.Timer(kill_after_seconds, self._kill_late)

    def __enter__(self) -> _Child:
        self._stderr: IO[str] = tempfile.TemporaryFile("w+", errors="replace")
        # A session of its own: the Ctrl-C of a terminal goes to us alone, and we end the child.
        self._process = subprocess.Popen(
            self._argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=self._stderr, text=True, start_new_session=True
        )
        if self._timer is not None:
            self._timer.daemon = True
            self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._stderr.close()

    def lines(self) -> Iterator[dict[str, Any]]:
        """Yield what the child says until it ends; what is no JSON object (cut off by its death) is left out."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with contextlib.suppress(ValueError):
                yield json.loads(line)

    def wait(self) -> int:
        return self._process.wait()

    def complaint(self) -> str:
        """Return the last line of the child's standard error."""
        self._stderr.seek(0)
        return self._stderr.read().strip().rpartition("\n")[2]

    def _kill_late(self) -> None:
        self.was_late = True
        self._kill()

    def _kill(self) -> None:
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
