"""Write the model, run the cells one after the other within the time there is, and clean up.

In: a ``DemoSettings``. Out: a ``DemoResult``. What the cells are is said in ``plan``, how one is run in ``stream.launch``, what the result
means in ``report``. Prints nothing.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from moetriage.demo.plan import (
    DEFAULT_LAYERS,
    PLAIN,
    PROMPT_TOKENS,
    SHAPE,
    STREAMED,
    TOKENS,
    Cell,
    Sizes,
    plan_cells,
    plan_sizes,
    recorded_routing,
)
from moetriage.demo.workspace import choose_folder, model_file
from moetriage.errors import MoetriageError, UsageError
from moetriage.gguf.layout import ModelLayout, read_layout
from moetriage.stream.cell import CellSpec
from moetriage.stream.cgroup import MemoryCgroup
from moetriage.stream.launch import CellOutcome, launch
from moetriage.trace.io import read_meta
from moetriage.trace.schema import TraceMeta

#: Called with what is being done, how much of it is done, and how much there is: bytes while the file is written, else tokens.
OnProgress = Callable[[str, int, int], None]

WRITING = "writing the model"
#: A cell that goes on for this many times its share is ended: its prompt alone takes too long for a demo.
_KILL_AT_SHARES = 2.0
_MIN_CELL_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True)
class DemoSettings:
    """folders: to choose one from for the file. seconds: for everything; the cells generate fewer tokens where it would take longer.

    use_cgroup: False as if none could be made. The rest is of the model and of the run and has the defaults of ``plan``.
    """

    folders: Sequence[Path]
    keep: bool = False
    seconds: float = 110.0
    use_cgroup: bool = True
    shape: str = SHAPE
    layers: int | None = DEFAULT_LAYERS
    trace: Path = field(default_factory=recorded_routing)
    prompt_tokens: int = PROMPT_TOKENS
    tokens: int = TOKENS
    n_threads: int | None = None


@dataclass(frozen=True, kw_only=True)
class DemoResult:
    """What was run. unlimited_because: why there was no memory limit, or None. kept: where the file is, if it was kept."""

    layout: ModelLayout
    trace: TraceMeta
    sizes: Sizes
    unlimited_because: str | None
    cells: tuple[tuple[Cell, CellOutcome], ...]
    tokens: int
    seconds: float
    kept: Path | None


def run_demo(settings: DemoSettings, progress: OnProgress) -> DemoResult:
    """Run the demo. Raises UsageError for a folder or size that does not work, MoetriageError for a cell that failed or that said what it
    must not; file, processes and cgroup are gone by then, unless the file is to be kept."""
    began = time.monotonic()
    folder = choose_folder(settings.folders)
    trace = read_meta(settings.trace)
    writing = model_file(
        folder, shape=settings.shape, layers=settings.layers, keep=settings.keep, progress=lambda n, total: progress(WRITING, n, total)
    )
    with writing as path:
        layout = read_layout(path)
        sizes = plan_sizes(layout, trace, n_ctx=_n_ctx(settings))
        unlimited_because = _why_unlimited(settings, sizes)
        runs = _run_cells(settings, path, sizes, limited=unlimited_because is None, deadline=began + settings.seconds, progress=progress)
        cells = tuple(runs)
    _check_same_tokens(cells)
    return DemoResult(
        layout=layout,
        trace=trace,
        sizes=sizes,
        unlimited_because=unlimited_because,
        cells=cells,
        tokens=settings.tokens,
        seconds=time.monotonic() - began,
        kept=path if settings.keep else None,
    )


def _n_ctx(settings: DemoSettings) -> int:
    return settings.prompt_tokens + settings.tokens + 1


def _why_unlimited(settings: DemoSettings, sizes: Sizes) -> str | None:
    if sizes.limit_bytes is None:
        return "a file of so few layers fits into any memory in which the process itself fits"
    if not settings.use_cgroup:
        return "it was asked to use none"
    return MemoryCgroup.available()


def _run_cells(
    settings: DemoSettings, path: Path, sizes: Sizes, *, limited: bool, deadline: float, progress: OnProgress
) -> Iterator[tuple[Cell, CellOutcome]]:
    cells = plan_cells(sizes.cache_mb, settings.trace)
    for index, cell in enumerate(cells):
        share = (deadline - time.monotonic()) * cell.weight / sum(later.weight for later in cells[index:])
        seconds = max(share, _MIN_CELL_SECONDS)
        spec = CellSpec(
            model=path,
            config=cell.config,
            prompt_tokens=settings.prompt_tokens,
            tokens=settings.tokens,
            n_ctx=_n_ctx(settings),
            n_threads=settings.n_threads,
            seconds=seconds,
        )
        progress(cell.name, 0, settings.tokens)
        with _named(cell):
            outcome = launch(
                spec,
                limit_bytes=sizes.limit_bytes if limited else None,
                on_step=_on_step(cell, settings.tokens, progress),
                kill_after_seconds=_KILL_AT_SHARES * seconds,
            )
        yield cell, outcome


def _on_step(cell: Cell, total: int, progress: OnProgress) -> Callable[[str, int], None]:
    return lambda phase, tokens: progress(cell.name, tokens if phase == "decode" else 0, total)


@contextlib.contextmanager
def _named(cell: Cell) -> Iterator[None]:
    """Say in which cell it was that something failed."""
    try:
        yield
    except UsageError as error:
        raise UsageError(f"cell {cell.name!r}: {error}") from error
    except MoetriageError as error:
        raise MoetriageError(f"cell {cell.name!r}: {error}") from error


def _check_same_tokens(cells: Sequence[tuple[Cell, CellOutcome]]) -> None:
    """Hold the engine to its word: what it streams without dropping says what the mapped model says."""
    ids = {cell.name: outcome.result.report["token_ids"] for cell, outcome in cells if outcome.result is not None}
    if PLAIN in ids and STREAMED in ids:
        pairs = zip(ids[PLAIN], ids[STREAMED], strict=False)  # one of them may have been cut short
        apart = next((place for place, (plain, streamed) in enumerate(pairs) if plain != streamed), None)
        if apart is not None:
            raise MoetriageError(f"streaming is not lossless here: token {apart + 1} differs from that of plain mmap; please report this")
