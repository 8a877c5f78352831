"""``moetriage chat``: a conversation on the terminal, or piped in line by line.

In: lines from standard input. Out: answers on standard output; the cache stays warm from one to the next. What is special about a line
is decided here, what an answer is made of in ``stream.runner``.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from moetriage.cli import terminal
from moetriage.cli.models import model_path
from moetriage.cli.option_groups import with_groups
from moetriage.cli.options import ContextOptions, EngineOptions, FileOptions, Json, Model, SamplingOptions
from moetriage.cli.run import RunSettings, following, load
from moetriage.cli.summary import drop_line, end_line, short_summary
from moetriage.errors import ReadError

if TYPE_CHECKING:
    from moetriage.stream.runner import Message, Runner
    from moetriage.types import RunReport

_HELP = "/reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer"


@with_groups
def chat(
    *,
    model: Model,
    system: Annotated[str | None, typer.Option("--system", metavar="TEXT", help="System message to begin the conversation with.")] = None,
    n_predict: Annotated[
        int | None, typer.Option("--n-predict", "-n", metavar="N", help="At most N tokens an answer (default: to the context's end).")
    ] = None,
    json_output: Json = False,
    engine: EngineOptions,
    context: ContextOptions,
    tokens: SamplingOptions,
    files: FileOptions,
) -> None:
    """Talk to a model in its own chat format: /reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer.

    With --json the answers come at the end, as the reports of all turns.
    """
    from moetriage.stream.telemetry import report_as_dict

    config, sampling = engine.stream_config(), tokens.sampling(n_predict)
    settings = RunSettings(model=model_path(model), config=config, sampling=sampling, context=context, files=files.output_files())
    with load(settings, shows_stages=not files.progress) as runner:
        conversation = Conversation(runner, system, shows_text=not json_output, progress=files.progress)
        conversation.run()
    if json_output:
        terminal.print_json({"turns": [report_as_dict(report) for report in conversation.reports]})


class Conversation:
    """Lines in, answers out. ``reports``: one for each answer."""

    def __init__(self, runner: Runner, system: str | None, *, shows_text: bool, progress: bool) -> None:
        self.reports: list[RunReport] = []
        self._runner = runner
        self._start: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self._messages = list(self._start)
        self._shows_text = shows_text
        self._progress = progress
        self._at_terminal = sys.stdin.isatty() and sys.stdout.isatty()

    def run(self) -> None:
        """Answer line after line until there are no more."""
        if self._at_terminal:
            with contextlib.suppress(ImportError):  # not every Python is built with it
                importlib.import_module("readline")  # input() then has line editing and history
            terminal.dim([_HELP])
        while (line := self._read()) is not None:
            match line.strip():
                case "":
                    continue
                case "/exit":
                    return
                case "/reset":
                    self._messages = list(self._start)
                    terminal.note("the conversation is forgotten")
                case word if word.startswith("/") and word[1:].isalpha():
                    terminal.note(f"there is no {word}: {_HELP}")
                case _:
                    self._answer(line)

    def _read(self) -> str | None:
        """Return the next line without its end, or None where input ends. Ctrl-C discards what was typed."""
        while True:
            try:
                return input("> " if self._at_terminal else "")
            except EOFError:
                if self._at_terminal:
                    print()
                return None
            except KeyboardInterrupt:
                if not self._at_terminal:
                    raise
                print()
                terminal.dim([_HELP])

    def _answer(self, line: str) -> None:
        from moetriage.stream.runner import PromptError, RunInterrupted

        asked: Message = {"role": "user", "content": line}
        try:
            with following(shows_text=self._shows_text, progress=self._progress) as (on_text, on_metrics):
                try:
                    report = self._runner.generate([*self._messages, asked], on_text=on_text, on_metrics=on_metrics)
                except RunInterrupted as interrupted:
                    report = interrupted.report
        except (PromptError, ReadError) as error:  # the conversation can go on without this line
            terminal.note(str(error))
            return
        self._keep(asked, report)

    def _keep(self, asked: Message, report: RunReport) -> None:
        self.reports.append(report)
        if report.text:
            self._messages += [asked, {"role": "assistant", "content": report.text}]
        if self._shows_text:
            print(flush=True)
            terminal.dim([line for line in (end_line(report), short_summary(report), drop_line(report)) if line is not None])
        self._runner.check(report)
