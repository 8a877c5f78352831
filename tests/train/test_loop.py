"""Runs: they learn, they repeat, and those that were killed or stopped go on to the very same losses."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from train.running import begin, losses, make_data, small_model, train_config

from moetriage.errors import UsageError
from moetriage.train.checkpoint import newest, open_checkpoint
from moetriage.train.data import Data
from moetriage.train.evaluate import evaluate_heldout
from moetriage.train.lm import NanoMoE
from moetriage.train.loop import fit, measure_step_seconds, steps_within
from moetriage.train.run_folder import RunFolder
from moetriage.train.train_config import PRESETS, TrainConfig
from moetriage.train.trainer import Trainer


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Data:
    return make_data(tmp_path_factory.mktemp("data") / "d")


class Killed(BaseException):
    """Stands for a kill: nothing catches it."""


def kill_after(step: int) -> Any:
    def on_step(now: Any) -> None:
        if now.step == step:
            raise Killed

    return on_step


ONLINE = small_model(moe={"policy": "capsel2-online", "capacity_factor": 1.25, "margin_threshold": 0.05, "top_k": 2})
BIASED = small_model(moe={"loss_free_bias_rate": 0.01, "load_balance_weight": 0.0})


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("model", [small_model(), ONLINE, BIASED], ids=["dropless", "capsel2-online", "loss-free"])
def test_a_killed_run_goes_on_to_the_very_same_losses(model: Any, precision: Any, data: Data, tmp_path: Path) -> None:
    whole = begin(tmp_path / "whole", data, model=model, precision=precision)
    fit(whole, data)
    killed = begin(tmp_path / "killed", data, model=model, precision=precision)
    with pytest.raises(Killed):
        fit(killed, data, on_step=kill_after(5))
    assert len(losses(killed)) == 5
    again = RunFolder.open(tmp_path / "killed")
    torch.manual_seed(99)
    result = fit(again, data)
    assert result.finished
    assert losses(again) == losses(whole)
    assert [step for step, _ in losses(again)] == list(range(1, 7))
    ours, theirs = (open_checkpoint(run.path).weights() for run in (again, whole))
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_run_that_is_killed_before_its_first_checkpoint_begins_again(data: Data, tmp_path: Path) -> None:
    run = begin(tmp_path / "run", data)
    with pytest.raises(Killed):
        fit(run, data, on_step=kill_after(1))
    assert newest(run.path) is None
    fit(run, data)
    assert [step for step, _ in losses(run)] == list(range(1, 7))


def test_a_run_that_is_asked_to_stop_saves_and_goes_on(data: Data, tmp_path: Path) -> None:
    whole = begin(tmp_path / "whole", data)
    fit(whole, data)
    run = begin(tmp_path / "run", data)
    calls = itertools.count(1)
    result = fit(run, data, stop=lambda: next(calls) == 3)
    assert (result.step, result.finished) == (3, False)
    assert open_checkpoint(run.path).step == 3
    assert fit(run, data).finished
    assert losses(run) == losses(whole)


def test_a_finished_run_is_left_alone(data: Data, tmp_path: Path) -> None:
    run = begin(tmp_path / "run", data)
    fit(run, data)
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    assert fit(run, data).finished
    assert {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()} == before


def test_the_same_seed_gives_the_same_losses_and_another_gives_others(data: Data, tmp_path: Path) -> None:
    runs = [begin(tmp_path / str(number), data, seed=seed) for number, seed in enumerate((1, 1, 2))]
    for run in runs:
        fit(run, data)
    first, again, other = map(losses, runs)
    assert first == again
    assert first != other


def test_a_model_learns_what_a_trigram_knows(data: Data, tmp_path: Path) -> None:
    run = begin(tmp_path / "run", data, steps=80, batch=16, save_every=40, learning_rate=6e-3)
    result = fit(run, data)
    curve = [loss for _, loss in losses(run)]
    assert curve[0] == pytest.approx(math.log(300), abs=0.4)
    assert curve[-1] < 2.5
    found = evaluate_heldout(run.path, data)
    assert found["model_bits_per_byte"] < found["trigram_bits_per_byte"]
    assert found["tokens"] == len(data.heldout)
    assert result.model.training
    sampled = [row["heldout_bits_per_byte"] for row in run.rows() if "heldout_bits_per_byte" in row]
    assert len(sampled) == 2
    assert sampled[1] < sampled[0]


def test_a_line_of_the_curve_has_all_there_is_to_know(data: Data, tmp_path: Path) -> None:
    run = begin(tmp_path / "run", data, steps=2)
    ticks = itertools.count()
    fit(run, data, clock=lambda: float(next(ticks)))
    first = json.loads((run.path / "loss.jsonl").read_text().splitlines()[0])
    assert first.keys() == {"step", "tokens", "loss", "load_balance", "grad_norm", "learning_rate", "seconds", "uncovered"}
    assert first["tokens"] == 128
    assert first["load_balance"] == pytest.approx(0.02, rel=0.5)


def test_progress_is_told_after_each_step(data: Data, tmp_path: Path) -> None:
    ticks = itertools.count()
    told: list[Any] = []
    fit(begin(tmp_path / "run", data, steps=3), data, on_step=told.append, clock=lambda: float(next(ticks)))
    assert [(now.step, now.steps) for now in told] == [(1, 3), (2, 3), (3, 3)]
    assert all(now.tokens_per_second > 0 and math.isfinite(now.loss) for now in told)


def test_minutes_become_steps(data: Data) -> None:
    ticks = itertools.count()
    # Each look at the clock is a second later, so every step takes one.
    seconds = measure_step_seconds(small_model(), train_config(), data, clock=lambda: float(next(ticks)))
    assert seconds == 1.0
    assert steps_within(10, seconds) == 570
    assert steps_within(0.001, seconds) == 1
    with pytest.raises(
        UsageError, match=r"--minutes 525600: at 0.01 s a step these are 299\d+ steps, .* at most 10000000; give about 1.75e\+03"
    ):
        steps_within(525_600, 0.01)


def test_a_disk_that_fills_up_ends_the_run_and_the_earlier_checkpoint_goes_on(
    data: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from moetriage.train import checkpoint

    whole = begin(tmp_path / "whole", data)
    fit(whole, data)
    run = begin(tmp_path / "run", data)
    with monkeypatch.context() as patched:
        save = checkpoint._save

        def full(path: Path, tensors: Any) -> None:
            if "00000004" in str(path):
                raise OSError(28, "No space left on device")
            save(path, tensors)

        patched.setattr(checkpoint, "_save", full)
        with pytest.raises(UsageError, match="No space left on device; checkpoint-00000002 is whole"):
            fit(run, data)
    fit(run, data)
    assert losses(run) == losses(whole)


def test_a_loss_that_is_no_number_ends_the_run(data: Data) -> None:
    trainer = Trainer(NanoMoE(small_model(moe={"check_finite": False})), train_config())
    with torch.no_grad():
        trainer.model.output_VD[5] = math.nan
    tokens = torch.full((1, 8), 5)
    with pytest.raises(UsageError, match=r"step 1: the loss is nan: training diverged; begin again with an --lr below 0.003"):
        trainer.step(tokens, tokens)
    assert trainer.steps_done == 0


def test_other_data_than_the_run_was_begun_with_is_refused(data: Data, tmp_path: Path) -> None:
    run = begin(tmp_path / "run", data)
    with pytest.raises(UsageError, match=r"not the data that .* was begun with"):
        fit(run, make_data(tmp_path / "other", word="price"))


def test_a_corpus_too_small_for_a_batch_is_refused(data: Data, tmp_path: Path) -> None:
    run = begin(tmp_path / "run", data, batch=10_000)
    with pytest.raises(UsageError, match=r"corpus too small: \d+ training tokens do not make a batch of 10000 sequences"):
        fit(run, data)


def test_a_context_beyond_the_models_is_refused() -> None:
    with pytest.raises(UsageError, match="--context 64: the model's own is 32"):
        Trainer(NanoMoE(small_model()), train_config(context=64))


def test_a_folder_with_something_in_it_is_no_new_run(data: Data, tmp_path: Path) -> None:
    begin(tmp_path / "run", data)
    with pytest.raises(UsageError, match="go on with --resume, or name another folder"):
        begin(tmp_path / "run", data)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").touch()
    with pytest.raises(UsageError, match="exists already; name another folder"):
        begin(tmp_path / "other", data)


def test_the_learning_rate_rises_and_then_falls_to_nothing() -> None:
    config = train_config(steps=100, learning_rate=0.01, warmup_fraction=0.1)
    rates = [config.rate(step) for step in range(100)]
    assert rates[:10] == pytest.approx([0.001 * step for step in range(1, 11)])
    assert rates[10] == 0.01
    assert all(later < earlier for earlier, later in itertools.pairwise(rates[10:]))
    assert 0 < rates[99] < 0.0002
    assert 0 < TrainConfig(steps=1, batch=1, context=1, learning_rate=0.1).rate(0) <= 0.1


@pytest.mark.parametrize("preset", PRESETS.values())
def test_presets_work_and_survive_json(preset: Any) -> None:
    preset.train.validate()
    preset.model(context=preset.train.context).validate()
    assert TrainConfig.from_dict(json.loads(json.dumps(preset.train.as_dict()))) == preset.train


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "--steps 0"),
        ({"batch": 10**6}, "--batch 1000000: must be a whole number from 1 to 65536"),
        ({"learning_rate": math.nan}, "--lr nan"),
        ({"learning_rate": 20.0}, "--lr 20.0: must be above 0 and at most 1"),
        ({"seed": -1}, "--seed -1"),
        ({"seed": 1.5}, "--seed 1.5"),
        ({"betas": (0.9,)}, "betas (0.9,): must be two numbers"),
        ({"precision": "fp16"}, "--precision fp16"),
        ({"betas": (0.9, 1.0)}, "betas (0.9, 1.0): must be two numbers from 0 up to below 1"),
        ({"warmup_fraction": 1.0}, "warmup_fraction 1.0: must be a number from 0 up to below 1"),
        ({"weight_decay": -0.1}, "weight_decay -0.1: must be a finite number from 0 up"),
        ({"clip": math.inf}, "clip inf: must be a finite number above 0"),
        ({"clip": 0.0}, "clip 0.0: must be a finite number above 0"),
        ({"save_every": 0}, "--save-every 0"),
    ],
)
def test_settings_out_of_range_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        train_config(**changes).validate()
    assert message in str(caught.value)
