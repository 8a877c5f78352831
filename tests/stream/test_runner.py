"""The runner: reports that agree with the trace and with the kernel's own counts, and a session that survives whatever ends a prompt."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from moetriage.config import DropConfig, StreamConfig
from moetriage.errors import AccountingError, ReadError, UsageError
from moetriage.gguf.synth import SHAPES
from moetriage.stream.output_files import OutputFiles
from moetriage.stream.runner import PromptError, RunInterrupted, Runner, run
from moetriage.stream.sampling import Sampling
from moetriage.stream.telemetry import report_as_dict
from moetriage.trace.io import read_trace
from moetriage.types import MIB, Phase, TokenMetrics

GREEDY = Sampling(max_tokens=12, temperature=0)
PROMPT = "Hello there, this is a prompt"
TINY = [shape for shape in SHAPES if shape.startswith("tiny-")]


@pytest.fixture
def make(model: Path) -> Iterator[Callable[..., Runner]]:
    """Make runners that are closed at the end of the test; one thread, as several wait for each other by spinning."""
    made: list[Runner] = []

    def runner(config: StreamConfig | None = None, *, path: Path = model, sampling: Sampling = GREEDY, **arguments: Any) -> Runner:
        made.append(Runner(path, config or StreamConfig(), sampling=sampling, n_threads=1, **arguments))
        return made[-1]

    yield runner
    for one in made:
        one.close()


def interrupt_at(step: int) -> Callable[[TokenMetrics], None]:
    """Return a callback that sends SIGINT to this process after so many evaluations."""
    seen: list[TokenMetrics] = []

    def on_metrics(metrics: TokenMetrics) -> None:
        seen.append(metrics)
        if len(seen) == step:
            os.kill(os.getpid(), signal.SIGINT)

    return on_metrics


def test_run_reports_what_was_streamed_to_the_callbacks(model: Path) -> None:
    pieces: list[str] = []
    steps: list[TokenMetrics] = []
    report = run(model, StreamConfig(), PROMPT, sampling=GREEDY, n_threads=1, on_text=pieces.append, on_metrics=steps.append)
    assert report.text == "".join(pieces)
    assert [step.phase for step in steps] == [Phase.PREFILL, *[Phase.DECODE] * 11]
    assert report.prefill.tokens == steps[0].n_tokens
    assert report.decode.tokens == report.generated - 1 == 11
    assert report.load_seconds > 0
    json.dumps(report_as_dict(report), allow_nan=False)


@pytest.mark.parametrize("cache_mb", ["auto", 0])
@pytest.mark.parametrize("shape", TINY)
def test_every_family_accounts_for_itself(shape: str, cache_mb: Any, tiny: Callable[..., Path]) -> None:
    drop = DropConfig(threshold=1.0) if cache_mb == "auto" else None
    report = run(tiny(shape), StreamConfig(cache_mb=cache_mb, drop=drop), PROMPT, sampling=GREEDY, n_threads=1)
    decode = report.decode
    assert decode.hits + decode.misses + decode.dropped == decode.routed > 0
    assert report.drop.routed == (decode.routed if drop else 0)


@pytest.mark.parametrize("cache_mb", ["auto", 2, 0])
def test_prefill_looks_each_distinct_expert_of_a_batch_up_once(cache_mb: Any, make: Callable[..., Runner], tmp_path: Path) -> None:
    """1100 tokens are three batches of at most 512."""
    runner = make(StreamConfig(cache_mb=cache_mb), outputs=OutputFiles(route_trace=tmp_path / "t.csv"))
    report = runner.generate("x" * 1100)
    runner.close()
    frame = read_trace(tmp_path / "t.csv").frame
    prefill = frame.filter(pl.col("phase") == int(Phase.PREFILL)).with_columns((pl.col("step") // 512).alias("batch"))
    distinct = prefill.select("batch", "layer", "expert").unique()
    assert report.prefill.tokens == 1100
    assert report.prefill.hits + report.prefill.misses == len(distinct)
    assert int(prefill["expert_bytes"].sum()) == report.prefill.read_bytes


def test_bytes_read_are_what_the_kernel_counted(make: Callable[..., Runner]) -> None:
    def kernel_bytes() -> int:
        lines = Path("/proc/self/io").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("read_bytes:")).split()[1])

    runner = make(StreamConfig(cache_mb=0))
    runner.generate(PROMPT)  # whatever Python loads at first use is loaded now
    if runner.llm.session.hook.direct_state != "on":
        pytest.skip(f"reads go through the page cache here: {runner.llm.session.hook.direct_state}")
    engine_before, kernel_before = runner.llm.session.hook.stats()["disk_bytes"], kernel_bytes()
    report = runner.generate("Another prompt")
    engine = runner.llm.session.hook.stats()["disk_bytes"] - engine_before
    assert kernel_bytes() - kernel_before == pytest.approx(engine, rel=0.01)
    # O_DIRECT reads whole blocks, so the disk gives more than was asked of it.
    assert report.read_bytes < engine < 1.5 * report.read_bytes


def test_the_cache_stays_warm_from_one_prompt_to_the_next(make: Callable[..., Runner]) -> None:
    runner = make()
    first, second = (runner.generate(PROMPT) for _ in range(2))
    runner.check(second)
    assert second.token_ids == first.token_ids
    assert first.cache.misses > 20
    assert second.cache.misses <= 4
    assert second.prefill.tokens < first.prefill.tokens


@pytest.mark.parametrize("step", [1, 2, 5])
def test_an_interrupted_prompt_is_reported_and_the_next_one_is_as_if_nothing_had_been(
    step: int, make: Callable[..., Runner], tmp_path: Path
) -> None:
    expected = make().generate(PROMPT)
    runner = make(StreamConfig(cache_mb=2), outputs=OutputFiles(csv=tmp_path / "m.csv", route_trace=tmp_path / "t.parquet"))
    with pytest.raises(RunInterrupted) as caught:
        runner.generate("Something else altogether", on_metrics=interrupt_at(step))
    report = caught.value.report
    runner.check(report)
    assert report.finish_reason == "interrupted"
    assert report.decode.tokens == step - 1
    assert report.generated == len(report.token_ids) == step - 1
    after = runner.generate(PROMPT)
    runner.check(after)
    assert after.token_ids == expected.token_ids
    runner.close()
    frame = read_trace(tmp_path / "t.parquet").frame
    steps_of_turn = frame.group_by("turn").agg(pl.col("step").n_unique()).sort("turn")["step"].to_list()
    assert steps_of_turn == [r.prefill.tokens + r.decode.tokens for r in (report, after)]
    assert len((tmp_path / "m.csv").read_text().splitlines()) == 5 + step + 12


@pytest.mark.parametrize("which", ["on_text", "on_metrics"])
def test_a_callback_that_raises_ends_the_prompt_and_leaves_the_runner_usable(which: str, make: Callable[..., Runner]) -> None:
    class EnoughError(Exception):
        pass

    def enough(_what: object) -> None:
        raise EnoughError

    expected = make().generate(PROMPT)
    runner = make()
    with pytest.raises(EnoughError):
        runner.generate("Something else altogether", **{which: enough})
    after = runner.generate(PROMPT)
    runner.check(after)
    assert after.token_ids == expected.token_ids


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "the prompt is empty"),
        ("\ud800", "no valid UTF-8 at character 0"),
        ("x" * 300, "the prompt has 300 tokens and the context 256"),
        ([{"role": "user", "content": "x" * 300}], "and the context 256"),
        ([{"role": "user", "content": "a\ud800"}], "no valid UTF-8 at character 1"),
    ],
)
def test_a_prompt_that_cannot_be_evaluated_is_refused_before_anything_is(prompt: Any, message: str, make: Callable[..., Runner]) -> None:
    runner = make(n_ctx=256)
    before = runner.llm.session.hook.stats()
    with pytest.raises(PromptError, match=message):
        runner.generate(prompt)
    assert runner.llm.session.hook.stats() == before
    assert runner.generate("Hello").generated == 12


def test_a_context_ends_where_it_was_asked_to_though_llama_cpp_rounds_it_up(make: Callable[..., Runner]) -> None:
    runner = make(n_ctx=20)
    with pytest.raises(PromptError, match="the prompt has 30 tokens and the context 20"):
        runner.generate("x" * 30)
    report = runner.generate("x" * 15)
    assert (report.generated, report.finish_reason, report.config["n_ctx"]) == (5, "context", 20)


def test_a_model_without_a_chat_template_is_not_given_another_ones(make: Callable[..., Runner]) -> None:
    runner = make()
    del runner.llm.metadata["tokenizer.chat_template"]
    with pytest.raises(UsageError, match="has no chat template"):
        runner.generate([{"role": "user", "content": "Hello"}])


def test_what_a_chat_template_refuses_is_a_prompt_error(make: Callable[..., Runner], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: object, **_kwargs: object) -> None:
        raise ValueError("roles must alternate")

    runner = make()
    monkeypatch.setattr(runner.llm, "create_chat_completion", refuse)
    with pytest.raises(PromptError, match="does not take this conversation: roles must alternate"):
        runner.generate([{"role": "user", "content": "Hello"}])


def test_a_failed_read_ends_the_prompt_and_the_runner_goes_on_once_it_can_read(
    model: Path, make: Callable[..., Runner], tmp_path: Path
) -> None:
    expected = make().generate(PROMPT)
    copy, data = tmp_path / "m.gguf", model.read_bytes()
    copy.write_bytes(data)
    runner = make(StreamConfig(cache_mb=0), path=copy, outputs=OutputFiles(csv=tmp_path / "m.csv", route_trace=tmp_path / "t.csv"))
    with copy.open("r+b") as file:
        file.truncate(len(data) // 2)
        with pytest.raises(ReadError) as caught:
            runner.generate(PROMPT)
        assert (caught.value.path, caught.value.layer in range(4)) == (str(copy), True)
        assert caught.value.offset + caught.value.nbytes > len(data) // 2
        file.seek(0)
        file.write(data)
    after = runner.generate(PROMPT)
    runner.check(after)
    assert after.token_ids == expected.token_ids
    runner.close()
    assert read_trace(tmp_path / "t.csv").frame["turn"].unique().to_list() == [1]


def test_counts_that_contradict_the_steps_are_an_error(make: Callable[..., Runner]) -> None:
    runner = make()
    report = runner.generate(PROMPT)
    runner.check(report)
    runner._steps.pop()
    with pytest.raises(AccountingError, match="of all steps are"):
        runner.check(report)


def test_the_signal_handler_is_put_back_and_another_ones_is_left_alone(make: Callable[..., Runner]) -> None:
    runner = make()
    runner.generate(PROMPT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    seen: list[object] = []

    def theirs(number: int, _frame: object) -> None:
        seen.append(number)

    previous = signal.signal(signal.SIGINT, theirs)
    try:
        report = runner.generate("Hello", on_metrics=interrupt_at(2))
    finally:
        signal.signal(signal.SIGINT, previous)
    assert report.generated == 12
    assert seen == [signal.SIGINT]


def test_settings_are_checked_before_a_file_is_read() -> None:
    with pytest.raises(UsageError, match="--io-threads 0"):
        Runner(Path("none.gguf"), StreamConfig(io_threads=0))
    with pytest.raises(UsageError, match="--top-p 0"):
        Runner(Path("none.gguf"), StreamConfig(), sampling=Sampling(top_p=0))
    with pytest.raises(UsageError, match="-t 513: must be between 1 and 512"):
        Runner(Path("none.gguf"), StreamConfig(), n_threads=513)


def test_peak_memory_is_the_kernels(make: Callable[..., Runner]) -> None:
    report = make().generate(PROMPT)
    status = Path("/proc/self/status").read_text()
    now = int(next(line for line in status.splitlines() if line.startswith("VmHWM:")).split()[1]) * 1024
    assert 10 * MIB < report.peak_rss_bytes <= now
