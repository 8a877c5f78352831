"""From a model, settings and a prompt to a ``RunReport``: the one place that the command line, the demo and the benchmarks go through.

In: a path, a StreamConfig, a Sampling, prompts. Out: text as it comes, files (``run_outputs``) and one report a prompt. Text is made by
llama_cpp's own completion calls, so that stop texts, UTF-8 and chat templates behave as they do there. Prints nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self, cast

from moetriage import __version__
from moetriage.config import StreamConfig
from moetriage.errors import UsageError
from moetriage.gguf.layout import read_layout
from moetriage.stream.interrupts import Interrupts
from moetriage.stream.llama import Llama
from moetriage.stream.memory_plan import context_size
from moetriage.stream.output_files import OutputFiles
from moetriage.stream.report import Turn, build_report
from moetriage.stream.run_outputs import RunOutputs
from moetriage.stream.sampling import Sampling
from moetriage.stream.telemetry import check_identities
from moetriage.types import Phase, RunReport, TokenMetrics

MAX_THREADS = 512
#: How llama_cpp words it, before anything is evaluated.
_TOO_LONG = re.compile(r"Requested tokens \((\d+)\) exceed context window")

Message = dict[str, str]


class PromptError(UsageError):
    """Report a prompt that cannot be evaluated: empty, not text, longer than the context, or refused by the chat template."""


class RunInterrupted(KeyboardInterrupt):
    """Ctrl-C ended a generation; ``report`` is what there was until then, and the runner can go on with another prompt."""

    def __init__(self, report: RunReport) -> None:
        super().__init__()
        self.report = report


class Runner:
    """A loaded model with its outputs, for one prompt or many; a context manager that closes both.

    n_ctx: context in tokens (default: 4096, or what the model was trained on if that is less); n_threads: default: the processors this
    process may use. outputs: files to write. notify: called with one line for each thing the user should know.
    A cache stays warm from one prompt to the next, and so does what a prompt has in common with the one before.

    Raises UsageError and its kinds for what the user can mend; nothing is loaded before values and output files are checked.
    """

    def __init__(
        self,
        model: Path,
        config: StreamConfig,
        *,
        sampling: Sampling | None = None,
        n_ctx: int | None = None,
        n_threads: int | None = None,
        outputs: OutputFiles | None = None,
        notify: Callable[[str], None] = lambda _line: None,
    ) -> None:
        began = time.perf_counter()
        self.sampling = sampling or Sampling()
        files = outputs or OutputFiles()
        config.validate()
        self.sampling.validate()
        n_threads = _threads(n_threads)
        layout = read_layout(model)
        files.check([*layout.paths, *(path for path in (config.force_routing, config.replay_drops) if path is not None)])
        n_ctx = context_size(layout, n_ctx)
        self.llm = Llama(
            model,
            stream=config,
            record_routes=files.route_trace is not None,
            notify=notify,
            n_ctx=n_ctx,
            n_threads=n_threads,
            n_threads_batch=n_threads,
        )
        self._config = self._resolved(model, n_threads)
        self._outputs = RunOutputs(files, self.llm.session, self._preamble(), notify)
        self._turns = 0
        self._steps: list[TokenMetrics] = []
        self.load_seconds = time.perf_counter() - began

    def generate(
        self,
        prompt: str | Sequence[Message],
        *,
        on_text: Callable[[str], None] | None = None,
        on_metrics: Callable[[TokenMetrics], None] | None = None,
    ) -> RunReport:
        """Answer one prompt: a text to continue, or the messages of a chat, which the model's template makes into one.

        on_text: called with each piece of text; on_metrics: after each evaluated step. What they raise ends the generation.
        Raises PromptError for a prompt that is empty or does not fit, ReadError for a failed read, RunInterrupted after Ctrl-C (at the
        next layer, in the middle of a prompt too), TraceError if an output fails that must not. The runner stays usable.
        """
        pieces = self._pieces(prompt)
        turn = Turn(self._turns, time.perf_counter(), self.llm.session.hook.stats())
        self._turns += 1
        self._steps = turn.steps
        self.llm.sampled = []
        try:
            with Interrupts() as interrupts, self._watched(turn, interrupts, on_metrics), contextlib.closing(pieces):
                for text, finish_reason in pieces:
                    turn.finish_reason = finish_reason or turn.finish_reason
                    turn.pieces.append(text)
                    if text and on_text is not None:
                        with interrupts.held():
                            on_text(text)
        except KeyboardInterrupt:
            turn.finish_reason = "interrupted"
        report = self._report(turn)
        if turn.finish_reason == "interrupted":
            raise RunInterrupted(report)
        return report

    def check(self, report: RunReport) -> None:
        """Hold the last report against the steps it was made from. Raises AccountingError if they contradict each other."""
        session = self.llm.session
        largest = max(session.layer_expert_bytes(layer) * session.layout.n_expert for layer in session.layers)
        # What an interrupted evaluation counted belongs to no step.
        steps = [] if report.finish_reason == "interrupted" else self._steps
        check_identities(report, steps, layer_bytes=largest)

    def close(self) -> None:
        """Finish the output files and free the model. Raises TraceError if an output fails that must not."""
        try:
            self._outputs.close()
        finally:
            self.llm.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def _pieces(self, prompt: str | Sequence[Message]) -> Generator[tuple[str, str | None], None, None]:
        """Yield llama_cpp's stream as texts, the last with the reason why it ended."""
        try:
            if isinstance(prompt, str):
                _check_prompt(prompt)
                chunks: Any = self.llm.create_completion(prompt, stream=True, **self.sampling.arguments())
                for chunk in chunks:
                    choice = chunk["choices"][0]
                    yield choice["text"], choice["finish_reason"]
            else:
                for chunk in self._chat(prompt):
                    choice = chunk["choices"][0]
                    yield choice["delta"].get("content") or "", choice["finish_reason"]
        except ValueError as error:
            if (match := _TOO_LONG.search(str(error))) is None:
                raise
            raise PromptError(
                f"the prompt has {match[1]} tokens and the context {self.llm.n_ctx()}, of which one at least is needed for the answer: "
                "shorten the prompt or give a larger context (-c)"
            ) from error

    def _chat(self, messages: Sequence[Message]) -> Any:
        if "tokenizer.chat_template" not in self.llm.metadata:
            raise UsageError(f"{self.llm.model_path}: has no chat template; use run without --chat")
        for message in messages:
            _check_text(message["content"])
        try:  # templates raise what they like, for example when they know no system role
            return self.llm.create_chat_completion(cast(Any, list(messages)), stream=True, **self.sampling.arguments())
        except Exception as error:
            raise PromptError(f"the model's chat template does not take this conversation: {error}") from error

    @contextlib.contextmanager
    def _watched(self, turn: Turn, interrupts: Interrupts, on_metrics: Callable[[TokenMetrics], None] | None) -> Iterator[None]:
        """Take in what the session measures while the turn lasts."""
        session = self.llm.session

        def on_routes(columns: dict[str, Any]) -> None:
            interrupts.hold()
            self._outputs.routes(columns, turn.number)

        def on_step(metrics: TokenMetrics) -> None:
            interrupts.hold()
            if metrics.phase is Phase.PREFILL:
                turn.prefill_ended = session.evaluated_at  # writing its trace is a part of the next step
            turn.steps.append(metrics)
            self._outputs.step(metrics)
            if on_metrics is not None:
                on_metrics(metrics)
            interrupts.release()

        session.on_step = on_step
        session.on_routes = on_routes if self._outputs.wants_routes else None
        try:
            yield
        finally:
            turn.ended = time.perf_counter()
            session.on_step = session.on_routes = None
            turn.token_ids = list(self.llm.sampled)

    def _report(self, turn: Turn) -> RunReport:
        # llama_cpp shortens the answer to what the context holds and calls both "length".
        limit = self.sampling.max_tokens
        if turn.finish_reason == "length" and (limit is None or len(turn.token_ids) < limit):
            turn.finish_reason = "context"
        return build_report(turn, self.llm.session, load_seconds=self.load_seconds, config=self._config)

    def _resolved(self, model: Path, n_threads: int) -> dict[str, object]:
        """Return all settings as they are in effect, for reports and files."""
        session = self.llm.session
        return session.config.as_dict() | {
            "n_expert_used": session.top_k,
            "cache_source": session.budget.source,
            "version": __version__,
            "model": str(model),
            "arch": session.layout.arch,
            "working_set_bytes": session.working_set_bytes,
            "n_ctx": self.llm.n_ctx(),
            "n_threads": n_threads,
            "sampling": dataclasses.asdict(self.sampling),
        }

    def _preamble(self) -> dict[str, object]:
        return {"version": self._config["version"], "model": self._config["model"], "config": self._config}


def run(
    model: Path,
    config: StreamConfig,
    prompt: str,
    *,
    chat: bool = False,
    sampling: Sampling | None = None,
    n_ctx: int | None = None,
    n_threads: int | None = None,
    outputs: OutputFiles | None = None,
    on_text: Callable[[str], None] | None = None,
    on_metrics: Callable[[TokenMetrics], None] | None = None,
    notify: Callable[[str], None] = lambda _line: None,
) -> RunReport:
    """Load a model, answer one prompt, check the counts, and return the report; see ``Runner`` for the arguments.

    chat: wrap the prompt in the model's chat template. Raises what ``Runner`` raises, and AccountingError.
    """
    with Runner(model, config, sampling=sampling, n_ctx=n_ctx, n_threads=n_threads, outputs=outputs, notify=notify) as runner:
        messages = [{"role": "user", "content": prompt}]
        report = runner.generate(messages if chat else prompt, on_text=on_text, on_metrics=on_metrics)
        runner.check(report)
    return report


def _threads(n_threads: int | None) -> int:
    if n_threads is None:
        return len(os.sched_getaffinity(0))
    if not 1 <= n_threads <= MAX_THREADS:
        raise UsageError(f"-t {n_threads}: must be between 1 and {MAX_THREADS} threads")
    return n_threads


def _check_prompt(prompt: str) -> None:
    if not prompt:
        raise PromptError("the prompt is empty: give at least one character (-p)")
    _check_text(prompt)


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(f"the prompt is no valid UTF-8 at character {error.start}") from error
