"""``moetriage run``: one prompt, its text, a summary or JSON.

In: options. Out: text on standard output as it comes, or one JSON object; the exit code is 0, 130 after Ctrl-C, or that of the error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moetriage.cli import terminal
from moetriage.cli.models import model_path
from moetriage.cli.option_groups import with_groups
from moetriage.cli.options import ContextOptions, EngineOptions, FileOptions, Json, Model, SamplingOptions
from moetriage.cli.summary import summary
from moetriage.config import StreamConfig
from moetriage.errors import UsageError
from moetriage.stream.output_files import OutputFiles
from moetriage.stream.sampling import Sampling
from moetriage.types import Phase, TokenMetrics

if TYPE_CHECKING:
    from moetriage.stream.runner import Runner

INTERRUPTED = 130


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """Everything a runner is made from, validated as far as it goes without a model."""

    model: Path
    config: StreamConfig
    sampling: Sampling
    context: ContextOptions
    files: OutputFiles


@with_groups
def run(
    *,
    model: Model,
    prompt: Annotated[str | None, typer.Option("--prompt", "-p", metavar="TEXT", help="The text to continue.")] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", metavar="FILE", help="Take the prompt from a file.")] = None,
    n_predict: Annotated[int, typer.Option("--n-predict", "-n", metavar="N", help="Generate at most N tokens.")] = 128,
    chat: Annotated[bool, typer.Option("--chat", help="Wrap the prompt in the model's chat template.")] = False,
    json_output: Json = False,
    engine: EngineOptions,
    context: ContextOptions,
    tokens: SamplingOptions,
    files: FileOptions,
) -> None:
    """Generate text with a Mixture-of-Experts model that may be larger than memory."""
    from moetriage.stream.runner import RunInterrupted
    from moetriage.stream.telemetry import report_as_dict

    config, sampling = engine.stream_config(), tokens.sampling(n_predict)
    text = _prompt(prompt, file)
    settings = RunSettings(model=model_path(model), config=config, sampling=sampling, context=context, files=files.output_files())
    with (
        load(settings, shows_stages=not files.progress) as runner,
        following(shows_text=not json_output, progress=files.progress) as (on_text, on_metrics),
    ):
        try:
            report = runner.generate([{"role": "user", "content": text}] if chat else text, on_text=on_text, on_metrics=on_metrics)
        except RunInterrupted as interrupted:
            report = interrupted.report
    if json_output:
        terminal.print_json(report_as_dict(report))
    else:
        print(flush=True)
        terminal.dim(summary(report))
    runner.check(report)
    if report.finish_reason == "interrupted":
        raise typer.Exit(INTERRUPTED)


@contextmanager
def load(settings: RunSettings, *, shows_stages: bool) -> Iterator[Runner]:
    """Load a model and close it at the end."""
    with terminal.spinner(f"loading {settings.model.name}", enabled=shows_stages):
        from moetriage.stream.runner import Runner

        runner = Runner(
            settings.model,
            settings.config,
            sampling=settings.sampling,
            n_ctx=settings.context.ctx_size,
            n_threads=settings.context.threads,
            outputs=settings.files,
            notify=terminal.note,
        )
    with runner:
        yield runner


@contextmanager
def following(*, shows_text: bool, progress: bool) -> Iterator[tuple[Callable[[str], None], Callable[[TokenMetrics], None]]]:
    """Yield what to call with each text and each step of a generation, so that a person can follow it."""
    from moetriage.stream.telemetry import progress_line

    read = 0
    with terminal.spinner("reading the prompt", enabled=not progress) as update:

        def on_text(text: str) -> None:
            if shows_text:
                update(None)
                print(text, end="", flush=True)

        def on_metrics(metrics: TokenMetrics) -> None:
            nonlocal read
            if progress:
                terminal.raw_line(progress_line(metrics))
            elif metrics.phase is Phase.PREFILL:
                read += metrics.n_tokens
                update(f"reading the prompt: {read} tokens")
            elif not shows_text:
                update(f"token {metrics.step - read + 1}")

        yield on_text, on_metrics


def _prompt(prompt: str | None, file: Path | None) -> str:
    if (prompt is None) == (file is None):
        raise UsageError("give the prompt with one of -p TEXT and -f FILE")
    if file is None:
        return prompt or ""
    try:
        return file.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"-f {file}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UsageError(f"-f {file}: is no valid UTF-8 at byte {error.start}") from error
