"""The study runs every condition, repeats, goes on where it was stopped, and counts what it says it counts."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from moetriage.errors import UsageError
from moetriage.study import run as run_module
from moetriage.study.cell import calibrate, run_cell
from moetriage.study.optimizer import new_optimizer, rate_factor
from moetriage.study.run import run_study
from moetriage.study.setting import Resources, Setting
from moetriage.study.spec import CORE, EXTRA, Cell, Condition, StudySpec, full, smoke
from moetriage.train.corpus import files_corpus
from moetriage.train.data import Data
from moetriage.train.data_build import build
from moetriage.train.files import sole_writer

ONE = Resources(threads=1)
SPEC = smoke()
CAPSEL, FIXED, ONLINE = CORE[4], CORE[3], EXTRA[2]


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data made of a package of the standard library, with a vocabulary of 300."""
    folder = tmp_path_factory.mktemp("study") / "data"
    build(files_corpus([Path(os.__file__).parent / "asyncio"]), folder, vocab_size=300)
    return folder


@pytest.fixture
def setting(data: Path) -> Setting:
    return Setting(spec=SPEC, folder=data, resources=ONE)


def without_times(result: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in result.items() if "seconds" not in key}


@pytest.mark.parametrize("condition", SPEC.conditions, ids=lambda condition: condition.name)
def test_counts_of_every_condition_are_consistent(condition: Condition, setting: Setting) -> None:
    final = run_cell(setting, Cell(condition=condition, seed=0), 0.05)["final"]
    visits = SPEC.heldout_batches * SPEC.batch_size * SPEC.context * SPEC.n_layer
    assert final["visits"] == visits == final["requested"][0]
    accepted, requested = final["accepted"], final["requested"]
    assert all(a <= r for a, r in zip(accepted, requested, strict=True))
    assert final["uncovered"] == visits - accepted[0] - accepted[1], "only a first choice or a rescue covers a token"
    assert 0 <= final["optimum_uncovered"] <= final["uncovered"]
    assert sum(final["by_layer"]["uncovered"]) == final["uncovered"]
    if condition.policy == "fixed-top2":
        assert sum(requested) == 2 * visits
    if condition.policy.endswith("top1"):
        assert sum(requested) == visits
    if condition.policy in ("capsel2", "primary+optional", "capsel2-causal"):
        assert requested[2] <= final["uncertain"]


def test_the_same_cell_gives_the_same_numbers(setting: Setting) -> None:
    cell = Cell(condition=ONLINE, seed=1)
    first, second = (without_times(run_cell(setting, cell, 0.05)) for _ in range(2))
    assert first == second
    assert first["final"] != run_cell(setting, replace(cell, seed=0), 0.05)["final"]


def test_conditions_share_initial_weights_and_batches_within_a_seed(setting: Setting) -> None:
    models = [setting.new_model(Cell(condition=condition, seed=1), 0.05) for condition in SPEC.conditions]
    for model in models[1:]:
        for (name, ours), (_, theirs) in zip(models[0].named_parameters(), model.named_parameters(), strict=True):
            assert torch.equal(ours, theirs), name
    other = setting.new_model(Cell(condition=CAPSEL, seed=0), 0.05)
    assert not torch.equal(next(models[0].parameters()), next(other.parameters()))


def test_held_out_batches_are_the_same_for_all_seeds_and_overlap_no_training(setting: Setting) -> None:
    assert setting.heldout() == setting.heldout()
    assert setting.heldout().stream is setting.data.heldout
    assert not np.array_equal(setting.training(0).at(0)[0], setting.training(1).at(0)[0])


def test_no_step_of_the_first_seed_trains_on_what_it_was_calibrated_with(setting: Setting) -> None:
    batches, spec = setting.training(SPEC.seeds[0]), SPEC
    rows = [tuple(row) for step in range(spec.steps + spec.calibration_batches) for row in batches.at(step)[0].tolist()]
    trained, calibrated = rows[: spec.steps * spec.batch_size], rows[spec.steps * spec.batch_size :]
    assert not set(trained) & set(calibrated)


def test_data_that_would_have_to_be_read_twice_are_refused(setting: Setting) -> None:
    long = Setting(spec=replace(SPEC, steps=10**6), folder=setting.folder, resources=ONE)
    with pytest.raises(UsageError, match="training and calibration need 2000004 different ones"):
        long.check()


def test_other_held_out_texts_make_other_data(setting: Setting, tmp_path: Path) -> None:
    manifest = json.loads(json.dumps(setting.data.manifest))
    manifest["heldout"]["shards"][0]["sha256"] = "0" * 64
    other = Data(setting.folder, manifest)
    assert other.digest == setting.data.digest
    assert other.digest_with_heldout != setting.data.digest_with_heldout


def test_the_threshold_is_the_median_margin_at_initialisation(setting: Setting) -> None:
    threshold = calibrate(setting)
    cell = Cell(condition=CAPSEL, seed=0)
    # Before anything is learned about half of all visits are below it, on other text, too.
    untrained = Setting(spec=replace(SPEC, learning_rate=0.0), folder=setting.folder, resources=ONE)
    final = run_cell(untrained, cell, threshold)["final"]
    assert 0.35 < final["uncertain"] / final["visits"] < 0.65


def test_the_online_threshold_moves_and_the_fixed_one_does_not(setting: Setting) -> None:
    online = run_cell(setting, Cell(condition=ONLINE, seed=0), 0.9)["training"]["threshold"]
    fixed = run_cell(setting, Cell(condition=CAPSEL, seed=0), 0.9)["training"]["threshold"]
    assert set(fixed) == {0.9}
    assert len(set(online)) > 1
    assert online[-1] < 0.5, "the median margin of four experts is far below 0.9"


def test_torch_is_left_as_it_was(setting: Setting) -> None:
    torch.set_num_threads(2)
    run_cell(setting, Cell(condition=FIXED, seed=0), 0.05)
    assert torch.get_num_threads() == 2
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.is_grad_enabled()


SMALL = replace(SPEC, conditions=(FIXED, CAPSEL), seeds=(0,))


class StoppedError(Exception):
    pass


def test_a_stopped_study_goes_on_where_it_was(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def counted(setting: Setting, cell: Cell, threshold: float, on_step: Callable[[], None]) -> dict[str, Any]:
        if len(ran) == 1:
            raise StoppedError
        ran.append(cell.name)
        return run_cell(setting, cell, threshold, on_step)

    monkeypatch.setattr(run_module, "run_cell", counted)
    with pytest.raises(StoppedError):
        run_study(SMALL, data, tmp_path / "out", ONE)
    monkeypatch.setattr(run_module, "run_cell", lambda *arguments: ran.append(arguments[1].name) or run_cell(*arguments))
    steps: list[tuple[int, int, list[str]]] = []
    folder = run_study(SMALL, data, tmp_path / "out", ONE, lambda *counts: steps.append(counts))
    assert ran == [cell.name for cell in SMALL.cells]
    assert steps[0] == (8, 16, [])
    assert steps[-1] == (16, 16, [SMALL.cells[-1].name])
    whole = run_study(SMALL, data, tmp_path / "whole", ONE)
    assert [without_times(cell) for cell in folder.results(SMALL)] == [without_times(cell) for cell in whole.results(SMALL)]


@pytest.mark.slow
def test_jobs_change_nothing_but_the_time(data: Path, tmp_path: Path) -> None:
    steps: list[tuple[int, int, list[str]]] = []
    many = run_study(SMALL, data, tmp_path / "many", Resources(jobs=2, threads=1), lambda *counts: steps.append(counts))
    one = run_study(SMALL, data, tmp_path / "one", ONE)
    for ours, theirs in zip(many.results(SMALL), one.results(SMALL), strict=True):
        assert ours["environment"].pop("jobs") == 2
        assert theirs["environment"].pop("jobs") == 1
        assert without_times(ours) == without_times(theirs)
    assert steps[-1] == (16, 16, [])


@pytest.mark.slow
def test_an_error_in_a_job_is_the_error_of_the_study(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    diverging = replace(SMALL, learning_rate=1e30, clip_norm=1e30)
    with pytest.raises(UsageError, match="router's logit is"):
        run_study(diverging, data, out, Resources(jobs=2, threads=1))
    assert list((out / "cells").iterdir()) == []


def test_whatever_ends_a_job_is_said_in_one_line(setting: Setting, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_arguments: object) -> None:
        raise RuntimeError("odd")

    said: list[BaseException] = []
    monkeypatch.setattr(run_module, "run_cell", fail)
    monkeypatch.setattr(run_module.signal, "signal", lambda *_arguments: None)
    run_module._work(setting, SMALL.cells[0], 0.05, tmp_path, SimpleNamespace(value=0), SimpleNamespace(send=said.append))
    assert [str(error) for error in said] == [f"cell {SMALL.cells[0].name}: unexpected RuntimeError: odd; what was finished is kept"]


def test_two_processes_do_not_write_one_study(data: Path, tmp_path: Path) -> None:
    with sole_writer(tmp_path), pytest.raises(UsageError, match="another process is writing there"):
        run_study(SMALL, data, tmp_path, ONE)


@pytest.mark.parametrize(
    ("spec", "resources", "said"),
    [
        (replace(SMALL, load_balance_weight=float("nan")), ONE, "--load-balance nan"),
        (SMALL, Resources(jobs=0), "--jobs 0: must be between 1 and 64"),
        (SMALL, Resources(threads=0), "--threads 0"),
        (SMALL, Resources(device="tpu"), "--device tpu: must be cpu, cuda"),
        (SMALL, Resources(device="cuda:99"), "--device cuda:99: PyTorch sees"),
        (replace(SMALL, context=4096), ONE, "corpus too small"),
        (replace(SMALL, heldout_batches=10**6), ONE, "corpus too small: its held-out part gives"),
    ],
)
def test_what_cannot_be_run_is_refused_before_a_folder_is_made(
    spec: StudySpec, resources: Resources, said: str, data: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError) as caught:
        run_study(spec, data, tmp_path / "out", resources)
    assert said in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_the_full_study_is_the_documents_design() -> None:
    spec = full()
    assert [(c.policy, c.capacity_factor) for c in spec.conditions if c.core] == [
        ("top1", 1.25),
        ("top1", 2.0),
        ("bpr-top1", 1.25),
        ("fixed-top2", 1.25),
        ("capsel2", 1.25),
    ]
    assert len(spec.cells) == 30
    visits = spec.batch_size * spec.context * spec.n_layer
    assert visits * spec.calibration_batches == 24_576
    assert 2 * visits * spec.heldout_batches == 98_304
    assert spec.steps * spec.batch_size * spec.context == 256_000
    assert json.loads(json.dumps(spec.as_dict())) == spec.as_dict()


def test_the_learning_rate_warms_up_and_falls_to_its_last_fraction() -> None:
    spec = full()
    factors = [rate_factor(spec, step) for step in range(spec.steps)]
    assert factors[0] == pytest.approx(1 / spec.warmup_steps)
    assert max(factors) == factors[spec.warmup_steps] == 1
    assert factors[-1] == pytest.approx(spec.final_lr_fraction)


def test_biases_and_norms_do_not_decay(setting: Setting) -> None:
    model = setting.new_model(Cell(condition=FIXED, seed=0), 0.05)
    adam, _ = new_optimizer(SPEC, model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decays = {group["weight_decay"]: {names[id(p)] for p in group["params"]} for group in adam.param_groups}
    assert decays[0.0] == {name for name in names.values() if name.endswith("bias") or "norm" in name}
    assert any("experts" in name for name in decays[0.0]), "the experts' biases are stacked into two dimensions"
    assert len(decays[0.0]) + len(decays[SPEC.weight_decay]) == len(names)
