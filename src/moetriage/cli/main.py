"""Entry point of the ``moetriage`` command: arguments in, exit code out (0, 1, or 2 for what the user can mend)."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from moetriage import __version__
from moetriage.errors import MoetriageError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"moetriage {__version__}")
        raise typer.Exit


@app.callback()
def moetriage(
    version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")] = False,
) -> None:
    """Decide which experts run when memory, disk bandwidth or expert capacity is scarce, and measure what each decision costs."""


def main() -> None:
    """Run the command line; an error of ours becomes one line on stderr."""
    try:
        app()
    except MoetriageError as error:
        print(f"moetriage: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
