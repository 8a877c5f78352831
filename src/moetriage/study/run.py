"""Run a study cell by cell: data and a folder in, one result a cell in that folder out.

Cells that are done already are not run again, so a study that was stopped goes on where it was. With several jobs each cell gets a process
of its own; what a cell computes does not depend on that.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from moetriage.errors import MoetriageError, UsageError
from moetriage.study.cell import calibrate, run_cell
from moetriage.study.folder import StudyFolder
from moetriage.study.setting import Resources, Setting
from moetriage.study.spec import Cell, StudySpec
from moetriage.train.files import sole_writer

#: Called with steps done, steps in total, and the names of the cells that run.
Progress = Callable[[int, int, Sequence[str]], None]
_POLL_SECONDS = 0.5


def run_study(
    spec: StudySpec, data: Path, out: Path, resources: Resources | None = None, progress: Progress = lambda _done, _total, _running: None
) -> StudyFolder:
    """Run the cells that ``out`` does not have yet and return the folder.

    Raises UsageError for settings, data or a folder that do not fit. Whatever ends it, cells that were finished are kept.
    """
    resources = resources or Resources()
    spec.validate()
    resources.validate()
    setting = Setting(spec=spec, folder=data, resources=resources)
    setting.check()
    folder = StudyFolder(out)
    threshold = folder.open(spec, setting.data.digest_with_heldout)
    with sole_writer(out):
        if threshold is None:
            threshold = calibrate(setting)
            folder.begin(spec, setting.data.digest_with_heldout, threshold)
        folder.results(spec)  # a damaged one is found now, not when all others are done
        missing = [cell for cell in spec.cells if not folder.has(cell)]
        bar = _Bar(spec, len(missing), progress)
        run = _run_here if resources.jobs == 1 else _run_in_processes
        run(setting, missing, threshold, folder, bar)
    return folder


class _Bar:
    """Counts steps; those of cells that are done already count as done."""

    def __init__(self, spec: StudySpec, missing: int, progress: Progress) -> None:
        self._total = len(spec.cells) * spec.steps
        self._before = self._total - missing * spec.steps
        self._progress = progress
        self.show(0, [])

    def show(self, steps: int, running: Sequence[Cell]) -> None:
        """Show that this run has done so many steps and is at these cells."""
        self._progress(self._before + steps, self._total, [cell.name for cell in running])


def _run_here(setting: Setting, cells: Sequence[Cell], threshold: float, folder: StudyFolder, bar: _Bar) -> None:
    done = 0

    def step() -> None:
        nonlocal done
        done += 1
        bar.show(done, [cell])

    for cell in cells:
        folder.add(cell, run_cell(setting, cell, threshold, step))


def _run_in_processes(setting: Setting, cells: Sequence[Cell], threshold: float, folder: StudyFolder, bar: _Bar) -> None:
    """Keep ``jobs`` processes busy. They are ended when anything goes wrong, Ctrl-C included."""
    # spawn: a fork of a process in which torch has started threads can hang.
    context = multiprocessing.get_context("spawn")
    waiting, running, finished = list(cells), list[_Worker](), 0
    with _ended_at_the_end(running):
        while waiting or running:
            while waiting and len(running) < setting.resources.jobs:
                running.append(_Worker(context, setting, waiting.pop(0), threshold, folder.path))
            multiprocessing.connection.wait([worker.process.sentinel for worker in running], timeout=_POLL_SECONDS)
            for worker in [worker for worker in running if not worker.process.is_alive()]:
                running.remove(worker)
                worker.check()
                finished += setting.spec.steps
            bar.show(finished + sum(worker.steps.value for worker in running), [worker.cell for worker in running])


class _Worker:
    """A process that runs one cell."""

    def __init__(self, context: Any, setting: Setting, cell: Cell, threshold: float, out: Path) -> None:
        self.cell = cell
        self.steps = context.Value("q", 0, lock=False)
        # A copy without the opened data, which would be sent as a whole.
        self._said, said = context.Pipe(duplex=False)
        self.process = context.Process(target=_work, args=(replace(setting), cell, threshold, out, self.steps, said), daemon=True)
        self.process.start()
        said.close()

    def check(self) -> None:
        """Raise what ended the process, if it did not end well."""
        self.process.join()
        try:
            error = self._said.recv()
        except EOFError:
            error = None
        if isinstance(error, BaseException):
            raise error
        if self.process.exitcode:
            raise MoetriageError(
                f"the process of cell {self.cell.name} ended with code {self.process.exitcode} (out of memory?); what was finished is "
                "kept: run the same command again, with fewer --jobs"
            )


@contextmanager
def _ended_at_the_end(workers: list[_Worker]) -> Iterator[None]:
    try:
        yield
    finally:
        for worker in workers:
            worker.process.terminate()
        for worker in workers:
            worker.process.join()


def _work(setting: Setting, cell: Cell, threshold: float, out: Path, steps: Any, said: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the one that waits for them ends them
    parent = os.getppid()

    def step() -> None:
        steps.value += 1
        if os.getppid() != parent:
            os._exit(1)  # whoever wanted the result was killed, and may have begun it again

    try:
        StudyFolder(out).add(cell, run_cell(setting, cell, threshold, step))
    except UsageError as error:
        said.send(UsageError(str(error)))
    except MoetriageError as error:
        said.send(MoetriageError(str(error)))
    except Exception as error:  # as text: not every exception can be sent
        if os.environ.get("MOETRIAGE_TRACEBACK"):
            raise
        said.send(MoetriageError(f"cell {cell.name}: unexpected {type(error).__name__}: {error}; what was finished is kept"))
