"""``moetriage train``: a language model with experts, trained on data that ``moetriage data build`` made.

In: options. Out: a folder with checkpoints and a curve of losses; how it ended, and an evaluation on the held-out text, on standard output.
What a run is, is the business of ``moetriage.train``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moetriage.cli import terminal
from moetriage.cli.extras import need_train_extra
from moetriage.cli.option_groups import with_groups
from moetriage.cli.options import Json
from moetriage.cli.train_options import RunOptions
from moetriage.errors import UsageError

if TYPE_CHECKING:
    from moetriage.train.data import Data
    from moetriage.train.loop import FitResult, Progress
    from moetriage.train.model_config import ModelConfig
    from moetriage.train.run_folder import RunFolder

_STOPPED = 130
#: Away from a terminal, a line this often, and a first one sooner.
_NOTE_SECONDS, _FIRST_NOTE_SECONDS = 60.0, 10.0


@with_groups
def train(
    *,
    data: Annotated[Path, typer.Argument(metavar="DATA", help="Folder that `moetriage data build` wrote.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder of the run.")],
    options: RunOptions,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run in OUT, from its newest checkpoint and with its settings.")
    ] = False,
    eval_only: Annotated[
        bool, typer.Option("--eval-only", help="Train nothing: evaluate the run or checkpoint OUT on the held-out text.")
    ] = False,
    no_eval: Annotated[
        bool, typer.Option("--no-eval", help="Do not evaluate on the held-out text at the end; --eval-only does it later.")
    ] = False,
    threads: Annotated[
        int | None, typer.Option("--threads", "-t", metavar="N", help="Computing threads (default: all processors; on --resume the run's).")
    ] = None,
    json_output: Json = False,
) -> None:
    """Train a small Mixture-of-Experts language model. Ctrl-C saves and stops; --resume goes on to the same losses.

    At the end the held-out text is evaluated in bits per byte: by the model, by gzip, and by byte trigrams counted on the training text.
    """
    need_train_extra("train", "torch", "safetensors", "tokenizers")
    from moetriage.train.allocator import keep_freed_memory
    from moetriage.train.data import open_data
    from moetriage.train.run_folder import MAX_THREADS

    if threads is not None and not 1 <= threads <= MAX_THREADS:
        raise UsageError(f"--threads {threads}: must be between 1 and {MAX_THREADS}")
    keep_freed_memory()
    texts = open_data(data)
    texts.verify()
    if eval_only:
        options.refuse_with("--eval-only")
        for flag, given in (("--resume", resume), ("--no-eval", no_eval)):
            if given:
                raise UsageError(f"{flag} is about training and --eval-only trains nothing: give one of them")
        answer = {"folder": str(out), "evaluation": _evaluate(texts, out, threads)}
        _say(answer, json_output)
        return
    run = _resumed(out, options, texts) if resume else _begun(out, options, texts, threads)
    _train(run, texts, threads or run.about["threads"], evaluate=not no_eval, json_output=json_output)


def _begun(out: Path, options: RunOptions, texts: Data, threads: int | None) -> RunFolder:
    """Make the folder of a new run; with --minutes its number of steps is measured first."""
    from moetriage.train.loop import about_run, batches_of, measure_step_seconds, steps_within
    from moetriage.train.run_folder import RunFolder, check_new
    from moetriage.train.trainer import repeatable

    check_new(out)
    model, settings = options.configs(texts.vocab_size)
    batches_of(settings, texts)
    about = about_run(texts, threads)
    if options.minutes is not None:
        with terminal.spinner("measuring a step") as update, repeatable(about["threads"]):
            tell = lambda done, total: update(f"measuring a step: {done} of {total}")  # noqa: E731
            seconds = measure_step_seconds(model, settings, texts, progress=tell)
        settings = dataclasses.replace(settings, steps=steps_within(options.minutes, seconds))
        settings.validate()
        about |= {"minutes": options.minutes, "measured_step_seconds": seconds}
        terminal.note(f"a step takes {seconds:.3f} s: {settings.steps} steps in {options.minutes:g} minutes")
    if (reason := _not_exportable(model)) is not None:
        terminal.note(f"for PyTorch alone: {reason}")
    return RunFolder.begin(out, model, settings, about)


def _not_exportable(model: ModelConfig) -> str | None:
    from moetriage.train.export import check_gguf

    try:
        check_gguf(model)
    except UsageError as error:
        return str(error)
    return None


def _resumed(out: Path, options: RunOptions, texts: Data) -> RunFolder:
    from moetriage.train.loop import check_data
    from moetriage.train.run_folder import RunFolder

    options.refuse_with("--resume")
    run = RunFolder.open(out)
    check_data(run, texts)
    return run


def _train(run: RunFolder, texts: Data, threads: int, *, evaluate: bool, json_output: bool) -> None:
    from moetriage.train.files import write_whole
    from moetriage.train.loop import fit
    from moetriage.train.trainer import repeatable

    with _stop_on_signal() as stop, _progress(run) as on_step, repeatable(threads):
        result = fit(run, texts, on_step=on_step, stop=stop)
    answer = _answer(run, result)
    if not result.finished:
        terminal.note(f"stopped after step {result.step} of {run.train.steps}; saved, go on with --resume")
        if json_output:
            terminal.print_json(answer)
        raise typer.Exit(_STOPPED)
    if evaluate:
        try:
            answer["evaluation"] = _evaluate(texts, run.path, threads)
        except KeyboardInterrupt:
            terminal.note(
                f"the run is trained and saved; the held-out text is evaluated by: moetriage train {texts.folder} {run.path} --eval-only"
            )
            raise
        write_whole(run.path / "evaluation.json", json.dumps(answer["evaluation"], indent=1) + "\n")
    _say(answer, json_output)
    if not json_output and _not_exportable(run.model) is None:
        terminal.note(f"next: moetriage export {run.path} model.gguf")


def _answer(run: RunFolder, result: FitResult) -> dict[str, Any]:
    from moetriage.train.checkpoint import newest

    losses = [row["loss"] for row in run.rows() if isinstance(row.get("loss"), float)][-50:]
    tokens = result.step * run.train.tokens_per_step
    return {
        "folder": str(run.path),
        "checkpoint": str(newest(run.path)),
        "step": result.step,
        "steps": run.train.steps,
        "finished": result.finished,
        "loss": sum(losses) / len(losses) if losses else None,
        "tokens": tokens,
        "seconds": result.seconds,
        "tokens_per_second": tokens / max(result.seconds, 1e-9),
    }


def _evaluate(texts: Data, path: Path, threads: int | None) -> dict[str, Any]:
    """Evaluate the held-out text: by the newest checkpoint at ``path``, by gzip, by trigrams."""
    from moetriage.train.evaluate import evaluate_heldout
    from moetriage.train.trainer import repeatable

    with terminal.spinner("evaluating the held-out text") as update, repeatable(threads):
        return evaluate_heldout(
            path, texts, progress=lambda done, total: update(f"evaluating the held-out text: {100 * done / total:.0f} %")
        )


def _say(answer: dict[str, Any], json_output: bool) -> None:
    if json_output:
        terminal.print_json(answer)
        return
    found = answer.get("evaluation")
    facts = [("run", answer["folder"])]
    if "step" in answer:
        facts.append(("trained", f"{answer['step']} steps, {answer['tokens']} tokens in {answer['seconds']:.0f} s"))
        facts.append(("tokens/s", f"{answer['tokens_per_second']:.0f}"))
        if answer["loss"] is not None:  # its file may have been removed
            facts.append(("loss", f"{answer['loss']:.3f} nats a token, mean of the last steps"))
    if found is not None:
        facts.append(("held-out text", f"{found['bytes']} bytes, {found['tokens']} tokens"))
    terminal.print_facts(facts)
    if found is None:
        return
    names = (("model", "this model"), ("trigram", "byte trigrams of the training text"), ("gzip", "gzip -9"))
    terminal.print_table(
        ("what predicts the held-out text", "bits a byte"), [(text, f"{found[f'{name}_bits_per_byte']:.3f}") for name, text in names]
    )


@contextlib.contextmanager
def _stop_on_signal() -> Iterator[Callable[[], bool]]:
    """Let Ctrl-C and SIGTERM be asked about after each step; a second Ctrl-C ends at once, as a step or a disk may hang."""
    asked = False

    def on_signal(_number: int, _frame: Any) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True

    previous = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: asked
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _progress(run: RunFolder) -> Iterator[Callable[[Progress], None]]:
    """Show a bar on a terminal, otherwise a line a minute."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    numbers = TextColumn("loss {task.fields[loss]:.3f}  {task.fields[rate]:,.0f} tokens/s")
    columns = (TextColumn(f"training {run.path.name}"), BarColumn(), MofNCompleteColumn(), numbers, TimeRemainingColumn())
    at_terminal = sys.stderr.isatty()
    say_at = time.monotonic() + _FIRST_NOTE_SECONDS
    with Bars(*columns, console=Console(stderr=True), transient=True, disable=not at_terminal) as bars:
        task = bars.add_task("", total=run.train.steps, loss=float("nan"), rate=0.0)

        def on_step(now: Progress) -> None:
            nonlocal say_at
            bars.update(task, completed=now.step, loss=now.loss, rate=now.tokens_per_second)
            if not at_terminal and time.monotonic() > say_at:
                say_at = time.monotonic() + _NOTE_SECONDS
                left = (now.steps - now.step) * run.train.tokens_per_step / now.tokens_per_second / 60
                terminal.note(
                    f"step {now.step} of {now.steps}, loss {now.loss:.3f}, {now.tokens_per_second:.0f} tokens/s, {left:.0f} minutes left"
                )

        yield on_step
