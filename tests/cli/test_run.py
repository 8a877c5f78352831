"""``moetriage run``: text, JSON whose numbers agree with each other, metrics, progress, traces and the summary."""

from __future__ import annotations

import csv
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli.support import Command

from moetriage import __version__
from moetriage.cli.options import ContextOptions, EngineOptions, FileOptions, SamplingOptions
from moetriage.config import DropConfig, StreamConfig
from moetriage.stream.output_files import OutputFiles
from moetriage.stream.sampling import Sampling
from moetriage.stream.telemetry import COLUMNS
from moetriage.trace.io import read_trace
from moetriage.types import MIB, Phase

GREEDY = ("-p", "Hello there", "-n", "12", "--temp", "0")
KEYS = {
    *("text", "token_ids", "generated", "load_seconds", "prefill_seconds", "decode_seconds", "tok_per_s", "read_bytes", "reads", "cache"),
    *("drop", "phases", "peak_rss_bytes", "o_direct", "config"),
}


def assert_accounts_for_itself(report: Any, *, top_k_sum: int = 16) -> None:
    """The identities that hold for every run, taken from its JSON alone."""
    assert report.keys() >= KEYS
    assert report["generated"] == len(report["token_ids"])
    assert sum(report["phases"].values()) == pytest.approx(report["decode_seconds"], abs=1e-3)
    decode, prefill, cache = report["decode"], report["prefill"], report["cache"]
    assert decode["hits"] + decode["misses"] + decode["dropped"] == decode["routed"] == decode["tokens"] * top_k_sum
    assert cache["hits"] == prefill["hits"] + decode["hits"]
    assert cache["misses"] == prefill["misses"] + decode["misses"]
    assert report["tok_per_s"] * report["decode_seconds"] == pytest.approx(decode["tokens"])
    assert report["peak_rss_bytes"] > 10 * MIB


def test_the_options_become_the_default_settings() -> None:
    assert EngineOptions().stream_config() == StreamConfig()
    assert SamplingOptions(seed=0).sampling(Sampling.max_tokens) == Sampling()
    assert FileOptions().output_files() == OutputFiles()
    assert ContextOptions() == ContextOptions(ctx_size=None, threads=None)


def test_every_engine_flag_reaches_its_setting() -> None:
    options = EngineOptions(
        cache_mb="7",
        force_cache=True,
        io_threads=2,
        no_odirect=True,
        dense_weights="mmap",
        prefetch=3,
        no_staged=True,
        n_expert_used=2,
        drop_cold_experts=0.5,
        drop_in_prefill=True,
        drop_no_renorm=True,
        drop_raw_weight=True,
    )
    assert options.stream_config() == StreamConfig(
        cache_mb=7,
        force_cache=True,
        io_threads=2,
        odirect=False,
        dense_weights="mmap",
        prefetch=3,
        staged=False,
        n_expert_used=2,
        drop=DropConfig(threshold=0.5, in_prefill=True, renorm=False, raw_weight=True),
    )
    assert EngineOptions(cache_ceil_mb=9, replay_drops=Path("d")).stream_config() == StreamConfig(cache_ceil_mb=9, replay_drops=Path("d"))
    assert EngineOptions(mmap=True, force_routing=Path("r")).stream_config() == StreamConfig(mmap=True, force_routing=Path("r"))


def test_text_goes_to_standard_output_and_the_summary_to_standard_error(command: Command, model: Path) -> None:
    result = command("run", model, *GREEDY)
    report = command("run", model, *GREEDY, "--json").json
    assert result.code == 0
    assert result.out == report["text"] + "\n"
    assert "12 tokens" in result.errors[0]
    for part in ("tok/s", "prompt 6 tokens", "hits ", "% of routed experts", "a token", "O_DIRECT", "all experts fit", "peak memory"):
        assert part in result.err
    assert "moe-drop" not in result.err


def test_the_bundled_model_needs_no_path(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = command("run", "bundled", "-p", "def ", "-n", 3, "--cache-mb", 9, "--json")
    assert result.code == 0
    assert result.json["generated"] == 3
    (tmp_path / "bundled").write_text("a file of that name is the user's")
    assert command("run", "bundled", "-p", "def ").code == 2


def test_json_is_one_line_and_accounts_for_the_run(command: Command, model: Path) -> None:
    result = command("run", model, *GREEDY, "--json", "--cache-mb", "2")
    assert result.code == 0
    assert result.err == ""
    assert len(result.out.splitlines()) == 1
    report = result.json
    assert_accounts_for_itself(report)
    assert report["generated"] == 12
    assert report["decode"]["tokens"] == 11
    assert report["finish_reason"] == "length"
    assert report["cache"]["budget_bytes"] == 2 * MIB
    assert report["read_bytes"] == report["cache"]["misses"] * 82_944
    assert report["drop"] == {"threshold": None, "routed": 0, "dropped": 0, "weight_dropped_fraction": 0.0}
    assert report["config"]["model"] == str(model)
    assert report["config"]["version"] == __version__
    assert report["config"]["sampling"]["temperature"] == 0
    assert report["config"]["n_expert_used"] == 4


@pytest.mark.parametrize(
    "flags", ["--cache-mb 0", "--mmap", "--no-odirect", "--prefetch 2 --cache-mb 2", "--n-expert-used 2", "--dense-weights mmap -t 1"]
)
def test_every_mode_accounts_for_itself(flags: str, command: Command, model: Path) -> None:
    result = command("run", model, *GREEDY, "--json", *flags.split())
    assert result.code == 0, result.err
    report = result.json
    if "--mmap" in flags:
        assert report["cache"] == dict.fromkeys(report["cache"], 0)
        assert (report["reads"], report["read_bytes"], report["o_direct"]) == (0, 0, "off")
        return
    assert_accounts_for_itself(report, top_k_sum=8 if "--n-expert-used" in flags else 16)
    if flags == "--no-odirect":
        assert report["o_direct"] == "off"
    if flags == "--cache-mb 0":
        assert report["cache"]["hits"] == 0


def test_streaming_changes_no_token(command: Command, model: Path) -> None:
    token_ids = [
        command("run", model, *GREEDY, "--json", *flags).json["token_ids"]
        for flags in ((), ("--mmap",), ("--cache-mb", "0"), ("--cache-mb", "2", "--io-threads", "1"))
    ]
    assert token_ids == token_ids[:1] * 4


def test_the_seed_makes_a_choice_repeatable_and_is_reported(command: Command, model: Path) -> None:
    sampled = ("-p", "Hello", "-n", "16", "--temp", "2", "--json")
    first = command("run", model, *sampled).json
    again = command("run", model, *sampled, "--seed", first["config"]["sampling"]["seed"]).json
    other = command("run", model, *sampled, "--seed", 1 + first["config"]["sampling"]["seed"] // 2).json
    assert first["token_ids"] == again["token_ids"] != other["token_ids"]


def test_dropping_says_what_it_dropped(command: Command, model: Path) -> None:
    flags = ("--drop-cold-experts", "0.9", "--cache-mb", "2")
    report = command("run", model, *GREEDY, *flags, "--json").json
    assert_accounts_for_itself(report)
    assert report["drop"]["threshold"] == 0.9
    assert 0 < report["drop"]["dropped"] == report["decode"]["dropped"] < report["drop"]["routed"] == 11 * 16
    assert 0 < report["drop"]["weight_dropped_fraction"] < 0.5
    result = command("run", model, *GREEDY, *flags)
    assert "with top-k 4: the threshold is 22.5 % of the routing" in result.errors[0]
    share = result.errors[-1].removeprefix("moe-drop: ").split(" ")[0]
    dropped, routed = map(int, share.split("/"))
    expected = f"moe-drop: {dropped}/{routed} routed experts dropped ({100 * dropped / routed:.1f}%), threshold 0.9 x uniform"
    assert result.errors[-1] == expected
    assert dropped > 0


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_trace_holds_the_run_and_its_drops_can_be_replayed(suffix: str, command: Command, model: Path, tmp_path: Path) -> None:
    path = tmp_path / f"t{suffix}"
    dropping = command(
        *("run", model, *GREEDY, "--json", "--drop-cold-experts", "0.9", "--drop-no-renorm", "--cache-mb", "2", "--route-trace", path)
    ).json
    trace = read_trace(path)
    decode = trace.frame.filter(trace.frame["phase"] == int(Phase.DECODE))
    assert len(decode) == dropping["decode"]["routed"]
    assert int(decode["dropped"].sum()) == dropping["decode"]["dropped"] > 0
    assert int(decode["residency"].sum()) == dropping["decode"]["hits"]
    assert int(trace.frame["expert_bytes"].sum()) == dropping["read_bytes"]
    assert int(decode.filter(decode["dropped"] == 1)["expert_bytes"].sum()) == 0
    prefill = trace.frame.filter(trace.frame["phase"] == int(Phase.PREFILL))
    distinct = prefill.select("layer", "expert").unique()
    assert len(distinct) == dropping["prefill"]["hits"] + dropping["prefill"]["misses"]
    assert trace.meta.extra["moetriage"] == __version__
    assert trace.meta.extra["drop_renorm"] == "false"
    assert json.loads(trace.meta.extra["config"])["drop"]["threshold"] == 0.9
    assert trace.meta.layer_dense_bytes.keys() == {0, 1, 2, 3}

    replayed_path = tmp_path / f"again{suffix}"
    replayed = command("run", model, *GREEDY, "--json", "--replay-drops", path, "--route-trace", replayed_path).json
    assert replayed["token_ids"] == dropping["token_ids"]
    assert replayed["decode"]["dropped"] == dropping["decode"]["dropped"]
    assert read_trace(replayed_path).meta.extra["drop_renorm"] == "false"
    summary = command("run", model, *GREEDY, "--replay-drops", path).errors[-1]
    assert summary.endswith(f"replayed from {path}")


def test_forced_routing_takes_the_traces_width(command: Command, model: Path, tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    narrow = command("run", model, *GREEDY, "--json", "--n-expert-used", "2", "--route-trace", path).json
    forced = command("run", model, *GREEDY, "--json", "--force-routing", path).json
    assert forced["config"]["n_expert_used"] == 2
    assert forced["token_ids"] == narrow["token_ids"]


def test_a_trace_changes_nothing(command: Command, model: Path, tmp_path: Path) -> None:
    plain = command("run", model, *GREEDY, "--json").json
    traced = command("run", model, *GREEDY, "--json", "--route-trace", tmp_path / "t.csv").json
    assert traced["token_ids"] == plain["token_ids"]
    assert traced["cache"] == plain["cache"]


def test_metrics_and_progress_tell_the_same_steps(command: Command, model: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.csv"
    result = command("run", model, *GREEDY, "--json", "--progress", "--csv", path)
    steps = [json.loads(line) for line in result.errors]
    assert [step["n_tokens"] for step in steps] == [6, *[1] * 11]
    assert [step["phase"] for step in steps] == ["prefill", *["decode"] * 11]
    lines = path.read_text().splitlines()
    preamble = dict(line.removeprefix("# ").split("=", 1) for line in lines[1:4])
    assert json.loads(preamble["version"]) == __version__
    assert json.loads(preamble["model"]) == str(model)
    assert json.loads(preamble["config"]) == result.json["config"]
    rows = list(csv.DictReader(lines[4:]))
    assert [{name: str(step[name]) for name in COLUMNS} for step in steps] == rows


def test_a_stop_text_ends_the_answer_and_is_not_part_of_it(command: Command, model: Path) -> None:
    text = command("run", model, *GREEDY, "--json").json["text"]
    stop = text[len(text) // 2 :][:3]
    report = command("run", model, *GREEDY, "--json", "--stop", stop).json
    assert report["finish_reason"] == "stop"
    assert report["text"] == text[: text.index(stop)]
    assert_accounts_for_itself(report)


def test_the_contexts_end_ends_the_answer_and_is_said(command: Command, model: Path) -> None:
    arguments = ("run", model, "-p", "x" * 250, "-n", "100", "-c", "256", "--temp", "0")
    report = command(*arguments, "--json").json
    assert report["finish_reason"] == "context"
    assert report["generated"] == 6
    result = command(*arguments)
    assert result.code == 0
    assert result.errors[0] == "stopped: the context of 256 tokens is full (-c)"


def test_a_chat_prompt_is_wrapped_in_the_models_template(command: Command, model: Path) -> None:
    plain = command("run", model, *GREEDY, "--json").json
    chat = command("run", model, *GREEDY, "--json", "--chat").json
    assert chat["prefill"]["tokens"] > plain["prefill"]["tokens"]
    assert_accounts_for_itself(chat)


def test_a_prompt_comes_from_a_file_too(command: Command, model: Path, tmp_path: Path) -> None:
    (tmp_path / "prompt.txt").write_text("Hello there")
    from_file = command("run", model, "-f", tmp_path / "prompt.txt", *GREEDY[2:], "--json").json
    assert from_file["token_ids"] == command("run", model, *GREEDY, "--json").json["token_ids"]


def test_a_run_whose_counters_contradict_each_other_says_so_and_exits_with_1(
    command: Command, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from moetriage.stream import report

    right = report._phases
    monkeypatch.setattr(report, "_phases", lambda turn, seconds: right(turn, seconds + 1))
    result = command("run", model, *GREEDY, "--json")
    assert result.code == 1
    assert result.json["generated"] == 12
    assert len(result.errors) == 1
    assert "contradict each other: phases sum to" in result.err


def test_a_failed_read_is_one_line_that_names_the_place(command: Command, model: Path, tmp_path: Path) -> None:
    """Cut the file once its header has been checked: the experts of the last layer are gone."""
    from moetriage.stream import runner

    copy = tmp_path / "m.gguf"
    copy.write_bytes(model.read_bytes())
    original = runner.Llama.__init__

    def cut_after_loading(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        with copy.open("r+b") as file:
            file.truncate(copy.stat().st_size // 2)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner.Llama, "__init__", cut_after_loading)
        result = command("run", copy, *GREEDY, "--cache-mb", "0")
    assert result.code == 1
    assert len(result.errors) == 1
    for part in (str(copy), "at byte ", "layer ", "expert "):
        assert part in result.err


def test_a_closed_pipe_ends_a_run_quietly(start: Callable[..., subprocess.Popen[str]], model: Path) -> None:
    process = start("run", model, "-p", "Hello", "-n", "3000", "--temp", "0")
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(1)
    process.stdout.close()
    assert process.wait(timeout=60) == 1
    assert process.stderr.read() == ""


def test_a_full_standard_output_is_one_line(model: Path) -> None:
    script = "import sys; from moetriage.cli.main import main; main()"
    import sys

    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", script, "run", "-t", "1", str(model), *GREEDY],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    assert done.returncode == 1
    assert done.stderr == "moetriage: reading or writing failed: No space left on device\n"
