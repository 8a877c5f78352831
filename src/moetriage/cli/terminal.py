"""What the commands write where: results on standard output, everything else on standard error.

In: texts and numbers. Out: lines, tables, spinners and progress bars, the last two only on a terminal. Knows no model.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from moetriage.types import MIB

#: Tables that go to a file or a pipe are not folded to the 80 columns that would be assumed there.
_FILE_WIDTH = 140
_NAME_WIDTH = 24


def note(text: str) -> None:
    """Print one line on standard error."""
    print(f"moetriage: {one_line(text)}", file=sys.stderr, flush=True)


def raw_line(text: str) -> None:
    """Print a line that a program reads on standard error."""
    print(text, file=sys.stderr, flush=True)


def one_line(text: str) -> str:
    return " ".join(text.split("\n"))


def dim(lines: Sequence[str]) -> None:
    """Print lines on standard error that should not stand out."""
    console = _console(stderr=True)
    for line in lines:
        console.print(line, style="dim", soft_wrap=True)


def print_json(value: object) -> None:
    """Print the result of ``--json``: one object on one line, the last of standard output."""
    print(json.dumps(value, allow_nan=False), flush=True)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, title: str | None = None) -> None:
    """Print a table on standard output; the first column is left-aligned, numbers follow on the right."""
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for index, column in enumerate(columns):
        # Names stay whole, unless one is a text of its own.
        whole = index == 0 and all(len(row[0]) <= _NAME_WIDTH for row in rows)
        table.add_column(column, justify="left" if index == 0 else "right", overflow="fold", no_wrap=whole)
    for row in rows:
        table.add_row(*row)
    _console().print(table)


def print_facts(facts: Sequence[tuple[str, str]]) -> None:
    """Print names and values in two columns on standard output."""
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim")
    table.add_column(overflow="fold")
    for name, value in facts:
        table.add_row(name, value)
    _console().print(table)


@contextmanager
def spinner(text: str, *, enabled: bool = True) -> Iterator[Callable[[str | None], None]]:
    """Show that something is going on; the function that is yielded changes the text, or with None ends it early."""
    if not (enabled and sys.stderr.isatty()):
        yield lambda _text: None
        return
    status = _console(stderr=True).status(text)

    def update(new_text: str | None) -> None:
        if new_text is None:
            status.stop()
        else:
            status.update(new_text)

    with status:
        yield update


@contextmanager
def byte_bar(text: str, *, enabled: bool = True) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar with rate; the function that is yielded takes bytes done and bytes in total."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    parts = (TextColumn(text), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*parts, console=_console(stderr=True), transient=True, disable=not (enabled and sys.stderr.isatty())) as progress:
        task = progress.add_task(text, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def size(nbytes: float) -> str:
    """Return a size as people read it: 532 KiB, 12.3 MiB, 15.7 GiB."""
    if nbytes < MIB:
        return f"{nbytes / 1024:.0f} KiB"
    if nbytes < 1024 * MIB:
        return f"{nbytes / MIB:.1f} MiB"
    return f"{nbytes / (1024 * MIB):.2f} GiB"


def _console(*, stderr: bool = False) -> Any:
    from rich.console import Console

    is_terminal = (sys.stderr if stderr else sys.stdout).isatty()
    return Console(stderr=stderr, markup=False, highlight=False, width=None if is_terminal else _FILE_WIDTH)
