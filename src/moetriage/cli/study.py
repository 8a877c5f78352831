"""``moetriage study``: run the matched study of admission policies, and report on it.

In: options. Out: a folder of results with a report, pictures and a table on standard output. What is run and said is the business of
``moetriage.study``.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from moetriage.cli import terminal
from moetriage.cli.extras import need_train_extra
from moetriage.cli.options import Json
from moetriage.errors import UsageError

if TYPE_CHECKING:
    from moetriage.study.run import Progress

#: None: as far as matplotlib is there.
Plots = Annotated[
    bool | None, typer.Option("--plots/--no-plots", help="Draw pictures for the report (default: where matplotlib is installed).")
]
app = typer.Typer(
    no_args_is_help=True, rich_markup_mode="rich", help="Compare admission policies under one capacity: the matched study (docs/study.md)."
)
_REPORT, _SUMMARY = "report.md", "summary.json"
#: Away from a terminal, a line this often.
_NOTE_SECONDS = 120.0


@app.command("run")
def run(
    data: Annotated[Path, typer.Argument(metavar="DATA", help="Folder that `moetriage data build` wrote.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder for the results; a study that was stopped goes on there.")],
    preset: Annotated[
        Literal["full", "smoke"], typer.Option(help="full: the whole study, hours. smoke: all conditions in a minute, for a first look.")
    ] = "full",
    conditions: Annotated[
        list[str] | None, typer.Option("--condition", metavar="NAME", help="Run this condition only, as capsel2@1.25; may be repeated.")
    ] = None,
    seeds: Annotated[int | None, typer.Option(metavar="N", help="Seeds 0 to N - 1 (default: 3; with smoke 2).")] = None,
    precision: Annotated[Literal["fp32", "bf16"], typer.Option(help="bf16: autocast; routing stays in float32.")] = "fp32",
    load_balance: Annotated[
        float,
        typer.Option("--load-balance", metavar="W", help="Weight of a load-balancing loss; the study that this one repeats mentions none."),
    ] = 0.0,
    jobs: Annotated[int, typer.Option(metavar="N", help="Cells at the same time, each in a process of its own.")] = 1,
    threads: Annotated[
        int | None, typer.Option("--threads", "-t", metavar="N", help="Threads of each job (default: the processors, shared out).")
    ] = None,
    device: Annotated[str, typer.Option(metavar="cpu|cuda|cuda:N", help="Where to compute.")] = "cpu",
    plots: Plots = None,
    json_output: Json = False,
) -> None:
    """Run all conditions and seeds that OUT does not have yet, then report on them."""
    need_train_extra("study run", "torch", "tokenizers", "networkx")
    from moetriage.study.run import run_study
    from moetriage.study.setting import Resources
    from moetriage.study.spec import PRESETS, first_seeds, named

    plots = _drawable(plots)
    chosen: dict[str, Any] = {"precision": precision, "load_balance_weight": load_balance}
    if conditions:
        chosen["conditions"] = named(conditions)
    if seeds is not None:
        chosen["seeds"] = first_seeds(seeds)
    spec = PRESETS[preset](**chosen)
    with _step_bar() as progress:
        folder = run_study(spec, data, out, Resources(jobs=jobs, threads=threads, device=device), progress)
    _report(folder, plots=plots, json_output=json_output)


@app.command("report")
def report(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder of a study, finished or not.")],
    plots: Plots = None,
    json_output: Json = False,
) -> None:
    """Write report.md, summary.json and pictures into OUT from the results that are there."""
    from moetriage.study.folder import StudyFolder

    plots = _drawable(plots)
    _report(StudyFolder(out), plots=plots, json_output=json_output)


def _drawable(plots: bool | None) -> bool:
    """Say whether to draw, before anything is run for it. Raises UsageError if pictures were asked for that cannot be drawn."""
    from moetriage.study.plots import check_matplotlib

    if plots is not False:
        try:
            check_matplotlib()
        except UsageError as error:
            if plots:
                raise
            terminal.note(f"no pictures: {error}")
            return False
    return plots is not False


def _report(folder: Any, *, plots: bool, json_output: bool) -> None:
    from moetriage.study.report import as_json, markdown
    from moetriage.study.summary import summarise
    from moetriage.train.files import write_whole

    spec, _, threshold = folder.read()
    cells = folder.results(spec)
    summary = summarise(spec, threshold, cells)
    names: list[str] = []
    if plots:
        from moetriage.study.plots import draw

        names = draw(spec, threshold, cells, folder.path)
    write_whole(folder.path / _REPORT, markdown(summary, plots=names))
    write_whole(folder.path / _SUMMARY, as_json(summary))
    if json_output:
        terminal.print_json(summary)
        return
    _print(summary)
    terminal.note(f"{len(cells)} of {len(spec.cells)} cells; the report is {folder.path / _REPORT}")


def _print(summary: dict[str, Any]) -> None:
    """Print the coverage of each condition and, where settings are the same, the comparison with the document."""
    from moetriage.study.report import reference_table, short_table

    for table in [short_table(summary), *([reference_table(summary)] if summary["comparable"] else [])]:
        terminal.print_table(table.titles, table.rows)


@contextmanager
def _step_bar() -> Iterator[Progress]:
    """Show optimizer steps over all cells, and which cells run: a bar on a terminal, otherwise a line every few minutes."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    at_terminal, said = sys.stderr.isatty(), time.monotonic()
    parts = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("steps"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Bars(*parts, console=Console(stderr=True), transient=True, disable=not at_terminal) as bars:
        task = bars.add_task("study", total=None)

        def show(done: int, total: int, running: Sequence[str]) -> None:
            nonlocal said
            bars.update(task, completed=done, total=total, description=" ".join(running) or "study")
            if not at_terminal and time.monotonic() - said > _NOTE_SECONDS:
                said = time.monotonic()
                terminal.note(f"{done} of {total} steps, running {' '.join(running)}")

        yield show
