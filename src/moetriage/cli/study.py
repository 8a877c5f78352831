"""``moetriage study``: run the matched study of admission policies, and report on it.

In: options. Out: a folder of results with a report, pictures and a table on standard output. What is run and said is the business of
``moetriage.study``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from moetriage.cli import terminal
from moetriage.cli.extras import need_train_extra
from moetriage.cli.options import Json

app = typer.Typer(
    no_args_is_help=True, rich_markup_mode="rich", help="Compare admission policies under one capacity: the matched study (docs/study.md)."
)
_REPORT, _SUMMARY = "report.md", "summary.json"


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
        float, typer.Option("--load-balance", metavar="W", help="Weight of a load-balancing loss; the document mentions none.")
    ] = 0.0,
    jobs: Annotated[int, typer.Option(metavar="N", help="Cells at the same time, each in a process of its own.")] = 1,
    threads: Annotated[
        int | None, typer.Option("--threads", "-t", metavar="N", help="Threads of each job (default: the processors, shared out).")
    ] = None,
    device: Annotated[str, typer.Option(metavar="cpu|cuda|cuda:N", help="Where to compute.")] = "cpu",
    plots: Annotated[bool, typer.Option("--plots/--no-plots", help="Draw pictures for the report (needs matplotlib).")] = True,
    json_output: Json = False,
) -> None:
    """Run all conditions and seeds that OUT does not have yet, then report on them."""
    need_train_extra("study run", "torch", "tokenizers", "networkx")
    from moetriage.study.run import run_study
    from moetriage.study.setting import Resources
    from moetriage.study.spec import PRESETS, first_seeds, named

    if plots:
        _check_plots()
    chosen: dict[str, Any] = {"precision": precision, "load_balance_weight": load_balance}
    if conditions:
        chosen["conditions"] = named(conditions)
    if seeds is not None:
        chosen["seeds"] = first_seeds(seeds)
    spec = PRESETS[preset](**chosen)
    with _step_bar(f"study ({preset})") as progress:
        folder = run_study(spec, data, out, Resources(jobs=jobs, threads=threads, device=device), progress)
    _report(folder, plots=plots, json_output=json_output)


@app.command("report")
def report(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder of a study, finished or not.")],
    plots: Annotated[bool, typer.Option("--plots/--no-plots", help="Draw pictures for the report (needs matplotlib).")] = True,
    json_output: Json = False,
) -> None:
    """Write report.md, summary.json and pictures into OUT from the results that are there."""
    from moetriage.study.folder import StudyFolder

    if plots:
        _check_plots()
    _report(StudyFolder(out), plots=plots, json_output=json_output)


def _check_plots() -> None:
    from moetriage.study.plots import check_matplotlib

    check_matplotlib()


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
    """Print the coverage of each condition and the comparison with the document."""
    from moetriage.study.report import coverage_table, reference_table

    for table in (coverage_table(summary), reference_table(summary)):
        terminal.print_table(table.titles, [[text.strip("*") for text in row] for row in table.rows])


@contextmanager
def _step_bar(text: str) -> Iterator[Callable[[int, int], None]]:
    """Show a bar of optimizer steps over all cells; what is yielded takes those done and their number."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    parts = (TextColumn(text), BarColumn(), MofNCompleteColumn(), TextColumn("steps"), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*parts, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task(text, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
