"""``moetriage train`` as a user meets it: what it prints and leaves, Ctrl-C, a kill, a full disk, a line for each thing that is wrong."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli.support import Command

from moetriage.train.policies import POLICIES

if importlib.util.find_spec("torch") is None:
    pytest.skip("needs the extra train", allow_module_level=True)

Start = Callable[..., "subprocess.Popen[str]"]
SMALL = ("--preset", "tiny", "--batch", "4", "--context", "32", "--threads", "1")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from moetriage.train.corpus import Corpus, Document
    from moetriage.train.data_build import build

    texts = ["".join(f"line {line} of file {number} is {line * number}\n" for line in range(100)) for number in range(70)]
    folder = tmp_path_factory.mktemp("train") / "data"
    build(Corpus(documents=[Document(f"{number}.txt", text) for number, text in enumerate(texts)]), folder, vocab_size=300)
    return folder


def losses(run: Path) -> list[tuple[int, float]]:
    rows: list[dict[str, Any]] = [json.loads(line) for line in (run / "loss.jsonl").read_text().splitlines()]
    return [(row["step"], row["loss"]) for row in rows if "loss" in row]


def test_a_run_ends_with_the_evaluation_of_the_heldout_text(command: Command, data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    result = command("train", data, run, *SMALL, "--steps", 5, "--seed", 3, "--json")
    assert result.code == 0
    assert result.errors == []
    answer = result.json
    assert (answer["step"], answer["finished"], answer["tokens"]) == (5, True, 5 * 4 * 32)
    assert answer["checkpoint"] == str(run / "checkpoint-00000005")
    assert 0 < answer["evaluation"]["gzip_bits_per_byte"] < answer["evaluation"]["model_bits_per_byte"] < 9
    assert json.loads((run / "evaluation.json").read_text()) == answer["evaluation"]
    assert json.loads((run / "run.json").read_text())["train"]["seed"] == 3
    assert len(losses(run)) == 5
    again = command("train", data, run, "--eval-only", "--json")
    assert again.json["evaluation"] == answer["evaluation"]


def test_people_get_a_table(command: Command, data: Path, tmp_path: Path) -> None:
    result = command("train", data, tmp_path / "run", *SMALL, "--steps", 2)
    assert result.code == 0
    for part in ("tokens/s", "this model", "byte trigrams of the training text", "gzip -9", "2 steps, 256 tokens"):
        assert part in result.out


def test_minutes_are_turned_into_steps_that_are_recorded(command: Command, data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    result = command("train", data, run, *SMALL, "--minutes", "0.0001", "--json")
    assert result.code == 0
    assert result.json["steps"] == 1
    about = json.loads((run / "run.json").read_text())
    assert about["train"]["steps"] == 1
    assert about["about"]["minutes"] == 0.0001
    assert about["about"]["measured_step_seconds"] > 0
    assert len(result.errors) == 1
    assert "1 steps in 0.0001 minutes" in result.err


def test_without_evaluation_a_run_ends_when_it_is_trained(command: Command, data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    result = command("train", data, run, *SMALL, "--steps", 2, "--no-eval")
    assert result.code == 0
    assert "bits a byte" not in result.out
    assert not (run / "evaluation.json").exists()
    assert result.errors == [f"moetriage: next: moetriage export {run} model.gguf"]


def test_ctrl_c_while_the_text_is_evaluated_says_that_the_run_is_saved(
    command: Command, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from moetriage.train import evaluate

    def interrupted(*_arguments: object, **_named: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(evaluate, "evaluate_heldout", interrupted)
    result = command("train", data, tmp_path / "run", *SMALL, "--steps", 2)
    assert result.code == 130
    assert f"moetriage train {data} {tmp_path / 'run'} --eval-only" in result.err


def test_the_help_names_every_policy(command: Command) -> None:
    said = re.sub(r"[\s│]+", " ", command("train", "--help").out)
    assert all(re.search(rf"[ ,]{re.escape(policy)}[,.]", said) for policy in POLICIES)


def test_admission_can_be_chosen(command: Command, data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    policy = ("--policy", "capsel2", "--capacity-factor", "0.5", "--margin-threshold", "0.05")
    result = command("train", data, run, *SMALL, *policy, "--steps", 1)
    assert result.code == 0
    assert "for PyTorch alone: a model trained with policy 'capsel2' cannot be exported" in result.err
    row = json.loads((run / "loss.jsonl").read_text().splitlines()[0])
    assert 0 < row["uncovered"] < 1


@pytest.mark.parametrize("options", [("--policy", "top1", "--capacity-factor", "1"), ("--top-k", "1")], ids=["top1", "top-k"])
def test_one_expert_a_token_can_be_chosen(options: tuple[str, ...], command: Command, data: Path, tmp_path: Path) -> None:
    result = command("train", data, tmp_path / "run", *SMALL, *options, "--steps", 1)
    assert result.code == 0, result.err
    assert json.loads((tmp_path / "run" / "run.json").read_text())["model"]["moe"]["renormalise"] is False


def test_weights_that_diverged_are_not_evaluated(command: Command, data: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    run = tmp_path / "run"
    assert command("train", data, run, *SMALL, "--steps", 1).code == 0
    path = run / "checkpoint-00000001" / "model.safetensors"
    weights = load_file(path)
    weights["model.norm.weight"][3] = float("nan")
    save_file(weights, path)
    (run / "evaluation.json").unlink()
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    for options in (["--eval-only"], ["--eval-only", "--json"], ["--resume"], ["--resume", "--json"]):
        result = command("train", data, run, *options)
        assert (result.code, result.out, len(result.errors)) == (2, "", 1)
        assert "model.norm.weight holds NaN or inf: the training diverged" in result.err
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_a_copied_checkpoint_neither_goes_nor_takes_over(command: Command, data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert command("train", data, run, *SMALL, "--steps", 6, "--save-every", 2).code == 0
    for name in ("best", "00000004-mybackup"):
        shutil.copytree(run / "checkpoint-00000004", run / f"checkpoint-{name}")
    shutil.rmtree(run / "checkpoint-00000006")
    answer = command("train", data, run, "--resume", "--json").json
    assert answer["checkpoint"] == str(run / "checkpoint-00000006")
    assert answer["step"] == 6
    names = ["checkpoint-00000004", "checkpoint-00000004-mybackup", "checkpoint-00000006", "checkpoint-best"]
    assert sorted(path.name for path in run.glob("checkpoint-*")) == names


def started(process: subprocess.Popen[str], run: Path, lines: int) -> None:
    """Wait until the run has written so many losses."""
    path = run / "loss.jsonl"
    end = time.monotonic() + 90
    while not path.exists() or path.read_text().count("\n") < lines:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_stops(number: int, start: Start, data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start("train", data, run, *SMALL, "--steps", 10_000, "--save-every", 10_000, "--json")
    started(process, run, 2)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    answer = json.loads(out)
    assert answer["finished"] is False
    assert err.splitlines() == [f"moetriage: stopped after step {answer['step']} of 10000; saved, go on with --resume"]
    assert [path.name for path in run.glob("*check*")] == [f"checkpoint-{answer['step']:08d}"]
    assert len(losses(run)) == answer["step"]


def test_a_killed_run_is_resumed_to_the_same_losses(start: Start, command: Command, data: Path, tmp_path: Path) -> None:
    run, whole = tmp_path / "run", tmp_path / "whole"
    arguments = (*SMALL, "--batch", 32, "--steps", 12, "--save-every", 2)
    process = start("train", data, run, *arguments)
    started(process, run, 4)
    process.kill()
    process.communicate()
    assert len(losses(run)) < 12
    assert command("train", data, run, "--resume", "--json").json["finished"] is True
    assert command("train", data, whole, *arguments).code == 0
    assert losses(run) == losses(whole)


def test_a_disk_that_fills_up_is_one_line_and_what_was_saved_stays(command: Command, data: Path, small_disk: Path) -> None:
    run = small_disk / "run"
    result = command("train", data, run, *SMALL, "--steps", 2)
    assert result.code == 2
    assert len(result.errors) == 1
    assert "checkpoint-00000002: cannot be written" in result.err
    assert "No space left on device" in result.err
    assert "there is no earlier one" in result.err
    assert sorted(path.name for path in run.iterdir()) == ["loss.jsonl", "run.json"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--policy", "capsel3"), "policy 'capsel3': must be dropless or one of top1"),
        (("--policy", "capsel2"), "--policy capsel2 needs --capacity-factor 1.25 and --margin-threshold 0.03 (docs/capacity.md says"),
        (("--policy", "top2"), "--policy top2 needs --capacity-factor 1.25"),
        (("--policy", "top2", "--capacity-factor", "16384"), "16384"),
        (("--policy", "top2", "--top-k", "2", "--capacity-factor", "0"), "capacity factor 0"),
        (("--policy", "top2", "--top-k", "2", "--capacity-factor", "nan"), "capacity factor nan"),
        (("--capacity-factor", "1.25"), "does nothing with policy 'dropless'"),
        (("--steps", "5", "--minutes", "5"), "give one of them"),
        (("--minutes", "-1"), "--minutes -1.0: must be above 0"),
        (("--minutes", "525600"), "--minutes 525600: at "),
        (("--steps", "0"), "--steps 0: must be a whole number"),
        (("--lr", "inf"), "--lr inf"),
        (("--threads", "0"), "--threads 0: must be between 1 and 1024"),
        (("--batch", "60000"), "corpus too small"),
        (("--resume",), "--preset tiny does nothing with --resume"),
        (("--eval-only",), "--preset tiny does nothing with --eval-only"),
        (("--eval-only", "--no-eval"), "--preset tiny does nothing with --eval-only"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_what_is_wrong_is_one_line_and_nothing_is_left(
    arguments: tuple[str, ...], message: str, command: Command, data: Path, tmp_path: Path
) -> None:
    result = command("train", data, tmp_path / "run", "--preset", "tiny", *arguments)
    assert result.code == 2
    assert len(result.errors) == 1
    assert message in result.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (MemoryError(), "out of memory: the system gave none; give smaller sizes, or free memory"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), "out of memory: "),
        (RuntimeError("odd"), "unexpected RuntimeError: odd"),
    ],
)
def test_a_lack_of_memory_is_no_fault_of_ours(
    error: Exception, said: str, command: Command, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from moetriage.train import loop

    def fail(*_arguments: object, **_named: object) -> None:
        raise error

    monkeypatch.setattr(loop, "fit", fail)
    result = command("train", data, tmp_path / "run", *SMALL)
    assert result.code == 1
    assert len(result.errors) == 1
    assert said in result.err


def test_a_changed_corpus_is_found_before_a_run_is_begun(command: Command, data: Path, tmp_path: Path) -> None:
    copy = tmp_path / "data"
    shutil.copytree(data, copy)
    (copy / "heldout.txt").unlink()
    result = command("train", copy, tmp_path / "run", *SMALL)
    assert result.code == 2
    assert len(result.errors) == 1
    assert "heldout.txt: cannot be read" in result.err
    assert not (tmp_path / "run").exists()


def test_a_run_whose_losses_are_gone_is_still_evaluated(command: Command, data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert command("train", data, run, *SMALL, "--steps", 1).code == 0
    (run / "loss.jsonl").unlink()
    result = command("train", data, run, "--resume", "--json")
    assert result.code == 0
    assert result.json["loss"] is None


@pytest.mark.parametrize(("flag", "message"), [("--resume", "no training run there"), ("--eval-only", "no checkpoint there")])
def test_a_folder_without_a_run_is_one_line(flag: str, message: str, command: Command, data: Path, tmp_path: Path) -> None:
    result = command("train", data, tmp_path, flag)
    assert result.code == 2
    assert len(result.errors) == 1
    assert message in result.err


def test_no_data_is_one_line_that_says_how_to_make_some(command: Command, tmp_path: Path) -> None:
    result = command("train", tmp_path, tmp_path / "run")
    assert result.code == 2
    assert len(result.errors) == 1
    assert f"moetriage data build {tmp_path} makes some" in result.err


def test_missing_torch_names_the_extra(command: Command, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "torch" else find(name, *rest))
    result = command("train", data, tmp_path / "run")
    assert result.code == 2
    assert result.errors == ["moetriage: moetriage train needs torch, not installed here: pip install 'moetriage[train]'"]
