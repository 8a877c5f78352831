"""``moetriage replay``: what another cache, order of eviction or lossy policy would have made of a recorded run.

In: traces and options. Out: tables or one JSON object (docs/replay.md), and the files that were asked for. What is found is the business of
``moetriage.replay``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moetriage.cli import replay_tables, terminal
from moetriage.cli.option_groups import with_groups
from moetriage.cli.options import Json
from moetriage.cli.replay_options import ActionOptions, CellOptions
from moetriage.errors import UsageError

if TYPE_CHECKING:
    from moetriage.replay.routes import RouteFile, RouteTable
    from moetriage.replay.rows import Row

_DEFAULT_ADVICE_LOSS = 0.05


@with_groups
def replay(
    *,
    traces: Annotated[list[Path], typer.Argument(metavar="TRACE...", help="Routing traces (.csv, .parquet), or directories of them.")],
    cells: CellOptions,
    actions: ActionOptions,
    allow_truncated: Annotated[
        bool, typer.Option("--allow-truncated", help="Read an incomplete or corrupt trace up to its last whole step; every result says so.")
    ] = False,
    json_output: Json = False,
) -> None:
    """Predict what another cache, order of eviction or lossy policy would have read, from routing that run --route-trace recorded."""
    from moetriage.replay.routes import RouteFile

    actions.check(cells)
    one_only = "--plot" if actions.plot else "--advise" if actions.advise else "--out" if actions.out else None
    if one_only and len(traces) > 1:
        raise UsageError(f"{one_only} is about one trace, and {len(traces)} were given")
    files = [RouteFile(path, allow_truncated=allow_truncated) for path in traces]
    do = _sweep if actions.sweep else _advise if actions.advise else _replay
    answers = [do(file, cells, actions, json_output) for file in files]
    if json_output:
        merged: dict[str, Any] = {"rows": [], "traces": []}
        for answer in answers:
            for key, value in answer.items():
                merged[key] = merged.get(key, []) + value if isinstance(value, list) else value
        terminal.print_json(merged)


def _replay(file: RouteFile, cells: CellOptions, actions: ActionOptions, quiet: bool) -> dict[str, Any]:
    from moetriage.replay.engine import run_cells
    from moetriage.replay.rows import rows_of

    asked = cells.cells(file)
    if all(cell.mode == "recorded" for cell in asked) and not (actions.bound or actions.plot):
        cells.refuse_cache_flags()
    if actions.plot:
        from moetriage.replay.plots import check_path

        check_path(actions.plot)
    with terminal.spinner(f"replaying {file.path}"):
        # Bounds and pictures look at all of the trace at once anyway; a plain replay goes through it in bounded memory.
        routes = file.load() if actions.bound or actions.plot else file
        outcomes = run_cells(routes, asked)
    truncated = _say_truncated(file)
    rows = rows_of(file.path, outcomes, truncated=truncated)
    views = replay_tables.static_views(rows)
    answer: dict[str, Any] = {"rows": rows, "traces": [_about(file)]} | ({"static_view": views} if views else {})
    if not quiet:
        replay_tables.print_rows(file, rows)
        replay_tables.print_static_views(views)
    if actions.bound:
        answer["bounds"] = _bounds(file, file.load() if routes is file else routes, cells, quiet)  # type: ignore[arg-type]
    if actions.plot:
        _plot(file, routes, cells, actions.plot)  # type: ignore[arg-type]
        answer["plot"] = str(actions.plot)
    return answer


def _bounds(file: RouteFile, table: RouteTable, cells: CellOptions, quiet: bool) -> list[Row]:
    """Hold LRU, belady and each threshold against what is possible, for each budget."""
    from moetriage.replay.comparison import compare_with_bound

    found: list[Row] = []
    for budget in cells.budgets(file):
        with terminal.spinner(f"bounding {file.path}"):
            found += compare_with_bound(
                file.path, table, budget, [policy for policy in cells.lossy(file.shape, defaults=True) if policy.threshold]
            )
    if not quiet:
        replay_tables.print_bounds(found)
    return found


def _plot(file: RouteFile, table: RouteTable, cells: CellOptions, path: Path) -> None:
    from moetriage.replay.figure_data import figure_data
    from moetriage.replay.plots import draw

    budgets = cells.budgets(file)
    with terminal.spinner(f"drawing {path}"):
        draw(figure_data(table, model=file.model, budget_bytes=budgets[0]), path)
    terminal.note(f"drew {path}")


def _sweep(file: RouteFile, cells: CellOptions, actions: ActionOptions, quiet: bool) -> dict[str, Any]:
    from moetriage.replay.sweep import sweep

    grid = cells.grid(file)
    out = actions.out or Path(f"{Path(file.path).name.removesuffix('.csv').removesuffix('.parquet')}.sweep.parquet")
    table = file.load()
    truncated = _say_truncated(file)
    with _cell_bar(f"sweeping {file.path}") as progress:
        rows = sweep(table, grid, out, trace=file.path, truncated=truncated, jobs=actions.jobs, progress=progress)
    if not quiet:
        replay_tables.print_rows(file, rows)
    terminal.note(f"{len(grid.groups()) * (1 + len(grid.lossy))} cells are in {out}")
    return {"rows": rows, "traces": [_about(file)], "out": str(out)}


def _advise(file: RouteFile, cells: CellOptions, actions: ActionOptions, quiet: bool) -> dict[str, Any]:
    from moetriage.replay.advice import advise
    from moetriage.replay.rows import rows_of

    machine = actions.machine()
    loss = _DEFAULT_ADVICE_LOSS if actions.max_weight_dropped is None else actions.max_weight_dropped
    with terminal.spinner(f"replaying {file.path}"):
        advice = advise(file, machine, max_weight_dropped=loss)
    truncated = _say_truncated(file)
    if not quiet:
        replay_tables.print_advice(advice, machine)
    rows = rows_of(file.path, [setting.outcome for setting in advice.by_threshold], truncated=truncated)
    return {"rows": rows, "traces": [_about(file)], "advice": replay_tables.advice_as_dict(advice)}


def _say_truncated(file: RouteFile) -> bool:
    if file.truncated_reason is not None:
        terminal.note(f"read up to the last whole step only: {file.truncated_reason}")
    return file.truncated_reason is not None


def _about(file: RouteFile) -> Row:
    shape = file.shape
    return {
        "trace": file.path,
        "model": file.model,
        "rows": file.rows,
        "n_expert": shape.n_expert,
        "n_expert_used": shape.top_k,
        "moe_layers": len(shape.layers),
        "working_set_bytes": shape.working_set_bytes,
        "cliff_bytes": shape.cliff_bytes,
        "expert_total_bytes": shape.total_bytes,
        "truncated_reason": file.truncated_reason,
    }


@contextmanager
def _cell_bar(text: str) -> Iterator[Callable[[int, int], None]]:
    """Show a bar of cells; what is yielded takes those done and their number."""
    import sys

    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    parts = (TextColumn(text), BarColumn(), MofNCompleteColumn(), TextColumn("cells"), TimeRemainingColumn())
    with Progress(*parts, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task(text, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
