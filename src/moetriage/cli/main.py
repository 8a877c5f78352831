"""Entry point of the ``moetriage`` command: arguments in, exit code out.

0, 2 for what the user can mend, 130 after Ctrl-C, 1 for the rest. This is the one place where errors become text: one line on standard
error, whatever happened. With MOETRIAGE_TRACEBACK=1 an error that is a fault of ours is shown with its traceback.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from typing import Annotated

import typer

from moetriage import __version__
from moetriage.cli import chat, data, demo, export, model, replay, run, study, terminal, train
from moetriage.errors import MoetriageError

INTERRUPTED = 130

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")
app.command("run")(run.run)
app.command("chat")(chat.chat)
app.command("inspect")(model.inspect)
app.command("iobench")(model.iobench)
app.command("synth")(model.synth)
app.command("demo")(demo.demo)
app.command("replay")(replay.replay)
app.add_typer(data.app, name="data")
app.command("train")(train.train)
app.command("export")(export.export)
app.add_typer(study.app, name="study")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"moetriage {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def moetriage(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")] = False,
) -> None:
    """Decide which experts run when memory, disk bandwidth or expert capacity is scarce, and measure what each decision costs."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main() -> None:
    """Run the command line and exit."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]  # a model's text may not fit the terminal's encoding
    warnings.showwarning = lambda message, *_args, **_kwargs: terminal.note(f"warning: {message}")
    sys.exit(invoke(sys.argv[1:]))


def _is_lack_of_memory(error: Exception) -> bool:
    """Say whether an allocation failed; torch tells so by a RuntimeError's text alone."""
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "allocate memory" in str(error))


def _abandon_output() -> None:
    """Drop what standard output does not take: Python would try again when it exits, complain, and exit with a code of its own."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def invoke(arguments: Sequence[str]) -> int:
    """Run one command and return its exit code; every error becomes one line on standard error."""
    try:
        code = app(args=list(arguments), prog_name="moetriage", standalone_mode=False)
        sys.stdout.flush()
    except MoetriageError as error:
        terminal.note(str(error))
        return error.exit_code
    except typer.TyperException as error:
        terminal.note(error.format_message())
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as error:
        where = "reading or writing failed: " if error.filename is None else f"{error.filename}: "
        terminal.note(f"{where}{error.strerror or error}")
        _abandon_output()
        return 1
    except Exception as error:
        if os.environ.get("MOETRIAGE_TRACEBACK"):
            raise
        if _is_lack_of_memory(error):
            terminal.note(f"out of memory: {str(error) or 'the system gave none'}; give smaller sizes, or free memory")
            return 1
        terminal.note(f"unexpected {type(error).__name__}: {error} (a fault of moetriage; MOETRIAGE_TRACEBACK=1 shows where)")
        return 1
    return code if isinstance(code, int) else 0
