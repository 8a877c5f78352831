"""A run whose files were damaged, cut short or mixed up is refused in one line, and two processes do not write in one."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from train.running import begin, make_data

from moetriage.errors import UsageError
from moetriage.train.data import Data
from moetriage.train.files import sole_writer
from moetriage.train.loop import fit
from moetriage.train.run_folder import RunFolder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Data:
    return make_data(tmp_path_factory.mktemp("data") / "d")


def rewritten(path: Path, change: Any) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def without(name: str, state: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in state.items() if name not in key}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: without("rng", state), "rng is missing there"),
        (lambda state: without("norm.weight|exp_avg_sq", state), r"norm.weight.exp_avg_sq is missing there"),
        (lambda state: {key: value[:1] if value.dim() else value for key, value in state.items()}, "does not fit the model"),
        (lambda state: state | {"optimizer.nobody|step": torch.zeros(())}, "optimizer.nobody.step is .* there and missing here"),
        (lambda state: {key: value.double() for key, value in state.items()}, "does not fit the model"),
        (lambda state: state | {"rng": torch.full_like(state["rng"], 255)}, "is damaged: rng is none of torch's generator"),
        (lambda state: {key: value * math.inf if "avg_sq" in key else value for key, value in state.items()}, "avg_sq holds NaN or inf"),
    ],
    ids=["generator", "moments", "shapes", "more", "types", "no generator", "diverged"],
)
def test_a_state_that_is_not_the_models_is_refused(change: Any, message: str, data: Data, tmp_path: Path) -> None:
    """Without its moments a parameter would go on with another step, and nobody would notice."""
    from safetensors.torch import load_file, save_file

    run = begin(tmp_path / "run", data, steps=2, save_every=1)
    fit(run, data)
    path = tmp_path / "run" / "checkpoint-00000002" / "trainer.safetensors"
    save_file({key: value.clone() for key, value in change(load_file(path)).items()}, path)
    with pytest.raises(UsageError, match=message) as caught:
        fit(run, data)
    assert str(path.parent) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda about: about.update(step=99), "holds step 99, so it is a copy"),
        (lambda about: about["model"]["moe"].update(load_balance_weight=0.5), "of another run"),
        (lambda about: about["about"].clear(), "'seconds' is missing"),
        (lambda about: about["about"].update(seconds="nan"), "seconds 'nan' is no time that training took"),
        (lambda about: about["about"].update(seconds=True), "seconds True is no time"),
        (lambda about: about["about"].update(seconds=-1), "seconds -1 is no time"),
        (lambda about: about["about"].update(seconds=10**400), "is damaged .*too large"),
    ],
    ids=["step", "settings", "seconds", "nan", "bool", "negative", "huge"],
)
def test_a_checkpoint_of_another_run_is_refused(change: Any, message: str, data: Data, tmp_path: Path) -> None:
    run = begin(tmp_path / "run", data, steps=1)
    fit(run, data)
    rewritten(tmp_path / "run" / "checkpoint-00000001" / "checkpoint.json", change)
    with pytest.raises(UsageError, match=message):
        fit(run, data)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda content: content.pop("about"), "'about' is missing"),
        (lambda content: content["about"].update(threads=10**9), "threads 1000000000"),
        (lambda content: content["about"].update(data=None), "data None"),
        (lambda content: content["train"].update(betas=5), "not the settings of a training run"),
        (lambda content: content["train"].update(betas=["a", "b"]), "betas .*: must be two numbers"),
        (lambda content: content["model"].update(colour="red"), "not the settings of a NanoMoE model"),
    ],
    ids=["about", "threads", "data", "number", "words", "more"],
)
def test_damaged_settings_of_a_run_are_named(change: Any, message: str, data: Data, tmp_path: Path) -> None:
    begin(tmp_path / "run", data)
    rewritten(tmp_path / "run" / "run.json", change)
    with pytest.raises(UsageError, match=message) as caught:
        RunFolder.open(tmp_path / "run")
    assert str(tmp_path / "run" / "run.json") in str(caught.value)


@pytest.mark.parametrize(
    "line",
    [
        b"\xff\xfe",
        b"{}",
        b"[1]",
        b"[" * 100_000,
        b'{"step": "x"}',
        b'{"step": 1, "lo',
        b'{"step": 2, "loss": NaN}',
        b'{"step": 2, "loss": 1e999}',
    ],
)
def test_a_line_that_is_no_loss_ends_the_losses(line: bytes, data: Data, tmp_path: Path) -> None:
    run = begin(tmp_path / "run", data)
    run.write({"step": 1, "loss": 2.0})
    run.close()
    path = tmp_path / "run" / "loss.jsonl"
    path.write_bytes(path.read_bytes() + line + b"\n" + path.read_bytes())
    assert list(run.rows()) == [{"step": 1, "loss": 2.0}]


def test_a_run_that_is_killed_while_it_begins_can_begin_again(data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".run.json.123.tmp").write_text("{")
    begin(tmp_path / "run", data)

    def full(_number: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UsageError, match="No space left on device"):
        begin(tmp_path / "full", data)
    assert list((tmp_path / "full").iterdir()) == []


def test_a_checkpoint_of_more_steps_than_the_run_is_refused(data: Data, tmp_path: Path) -> None:
    run = begin(tmp_path / "run", data, steps=2)
    fit(run, data)
    rewritten(run.path / "run.json", lambda content: content["train"].update(steps=1))
    with pytest.raises(UsageError, match="step 2 of another run"):
        fit(RunFolder.open(run.path), data)


def test_two_processes_do_not_train_in_one_folder(data: Data, tmp_path: Path) -> None:
    run = begin(tmp_path / "run", data, steps=1)
    with sole_writer(run.path), pytest.raises(UsageError, match="another process is writing there"):
        fit(run, data)
    assert fit(run, data).finished
