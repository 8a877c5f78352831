"""``moetriage demo``: four ways to run a model that is larger than the memory it gets, side by side.

In: options. Out: progress on standard error; a table and what it shows, or JSON, on standard output. What is run is the business of
``moetriage.demo``; here is decided where its file may lie and what a signal does.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from moetriage.cli import terminal
from moetriage.cli.options import Json
from moetriage.cli.summary import summary

if TYPE_CHECKING:
    from moetriage.demo.report import Row
    from moetriage.demo.run import DemoResult, OnProgress

_COLUMNS = ("cell", "tok/s", "MiB read/token", "hits", "dropped", "peak memory")


def demo(
    directory: Annotated[
        Path | None,
        typer.Option("--dir", metavar="DIR", help="Folder on a disk for the model file (default: your cache folder, or /var/tmp)."),
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the model file there, and use it the next time.")] = False,
    layers: Annotated[int | None, typer.Option(metavar="N", help="Layers of the model: 0.34 GB each, and 0.45 GB (default: 8).")] = None,
    tokens: Annotated[int | None, typer.Option(metavar="N", help="Tokens to generate in each cell (default: 128).")] = None,
    seconds: Annotated[float, typer.Option(metavar="S", help="Time for everything; slow cells generate fewer tokens.")] = 110.0,
    threads: Annotated[
        int | None, typer.Option("--threads", "-t", metavar="N", help="Computing threads (default: all processors).")
    ] = None,
    json_output: Json = False,
    shape: Annotated[str | None, typer.Option(hidden=True, help="Shape of the model; --trace must fit it.")] = None,
    trace: Annotated[Path | None, typer.Option(hidden=True, help="Recorded routing.")] = None,
) -> None:
    """Compare plain mmap, streaming and streaming with dropped experts on a model larger than the memory it gets.

    Writes a file in the shape of Qwen3-30B-A3B with fewer layers (3.2 GB, removed afterwards) and routes it as the real model was recorded.
    Then lets the small trained model that comes with moetriage write, streamed in a cache below its size.
    """
    from moetriage.demo.plan import DEFAULT_LAYERS, SHAPE, TOKENS, recorded_routing
    from moetriage.demo.report import as_dict
    from moetriage.demo.run import DemoSettings, run_demo
    from moetriage.demo.text import bundled_model, write_text

    settings = DemoSettings(
        folders=[directory] if directory is not None else _default_folders(),
        keep=keep,
        layers=DEFAULT_LAYERS if layers is None else layers,
        tokens=TOKENS if tokens is None else tokens,
        seconds=seconds,
        n_threads=threads,
        shape=shape or SHAPE,
        trace=trace or recorded_routing(),
    )
    with _signals_clean_up(), _progress() as on_progress:
        result = run_demo(settings, on_progress)
    if json_output:
        written = [cell.as_dict() for cell in write_text(bundled_model(), n_threads=threads)]
        terminal.print_json(as_dict(result) | {"text": written})
    else:
        _print(result)
        _write(threads)


def _default_folders() -> list[Path]:
    folders = [Path("/var/tmp")]
    if home := os.environ.get("HOME"):
        folders.insert(0, Path(os.environ.get("XDG_CACHE_HOME") or f"{home}/.cache") / "moetriage")
    return folders


@contextlib.contextmanager
def _signals_clean_up() -> Iterator[None]:
    """Let the signals that end a process do so by an exception, as Ctrl-C does: gigabytes lie on the disk meanwhile."""

    def leave(number: int, _frame: Any) -> NoReturn:
        sys.exit(128 + number)

    previous = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _progress() -> Iterator[OnProgress]:
    """Show a bar for each thing that is done on a terminal, otherwise a line when it begins."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

    from moetriage.demo.run import WRITING

    at_terminal = sys.stderr.isatty()
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed:.0f} of {task.total:.0f} {task.fields[unit]}"))
    console = Console(stderr=True, markup=False, highlight=False)
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True, disable=not at_terminal) as bars:

        def on_progress(what: str, done: int, total: int) -> None:
            unit, scale = ("MB", 1e6) if what == WRITING else ("tokens", 1.0)
            if what not in tasks:
                for earlier in tasks.values():
                    bars.stop_task(earlier)
                tasks[what] = bars.add_task(what, unit=unit)
                if not at_terminal:
                    terminal.note(f"{what} ({total / scale:.0f} {unit})")
            bars.update(tasks[what], completed=done / scale, total=total / scale)

        yield on_progress


def _print(result: DemoResult) -> None:
    from moetriage.demo.report import rows, sentences

    sizes, of = result.sizes, result.layout
    limit = "no memory limit" if result.unlimited_because or not sizes.limit_bytes else f"in {terminal.size(sizes.limit_bytes)} of memory"
    title = (
        f"{of.name}: {of.n_layer} layers, {terminal.size(sizes.file_bytes)}, {limit}, "
        f"expert cache {terminal.size(sizes.cache_mb << 20)}, {result.tokens} tokens"
    )
    terminal.print_table(_COLUMNS, [_cells(row) for row in rows(result)], title=title)
    for sentence in sentences(result):
        print(sentence)
    terminal.note(f"{result.seconds:.0f} s in all" + (f"; the model is kept in {result.kept}" if result.kept else "; the model is removed"))


def _write(threads: int | None) -> None:
    """Show what the trained model writes, as it comes."""
    from moetriage.demo.text import PROMPT, bundled_model, write_text

    def on_cell(name: str) -> None:
        print(f"\nA small model trained on Python's standard library writes, {name}:\n\n{PROMPT}", end="", flush=True)

    for cell in write_text(bundled_model(), lambda piece: print(piece, end="", flush=True), on_cell=on_cell, n_threads=threads):
        print(flush=True)
        terminal.dim(summary(cell.report))


def _cells(row: Row) -> tuple[str, ...]:
    def shown(value: float | None, text: str) -> str:
        return "-" if value is None else text.format(value)

    return (
        row.cell,
        shown(row.tok_per_s, "{:.2f}"),
        shown(None if row.read_bytes_per_token is None else row.read_bytes_per_token / 2**20, "{:.1f}"),
        shown(row.hit_fraction, "{:.1%}"),
        shown(row.dropped_fraction, "{:.1%}"),
        "-" if row.peak_memory_bytes is None else terminal.size(row.peak_memory_bytes),
    )
