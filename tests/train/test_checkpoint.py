"""A checkpoint is whole or not there, gives back what was put in, and says what is wrong with it."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from train.running import small_model

from moetriage.errors import UsageError
from moetriage.train import checkpoint as module
from moetriage.train.checkpoint import load_model, newest, open_checkpoint, save_checkpoint
from moetriage.train.lm import NanoMoE


def save(run: Path, step: int, model: NanoMoE, **changes: Any) -> Path:
    options = {"trainer_state": {"a": torch.arange(3)}, "tokenizer": b'{"t": 1}', "about": {"seconds": 1.5}} | changes
    return save_checkpoint(run, step, config=model.config, weights=model.state_dict(), **options)


@pytest.fixture
def model() -> NanoMoE:
    return NanoMoE(small_model())


def test_what_was_saved_comes_back(model: NanoMoE, tmp_path: Path) -> None:
    folder = save(tmp_path, 7, model)
    found = open_checkpoint(tmp_path)
    assert found.folder == folder == open_checkpoint(folder).folder
    assert (found.step, found.config, found.about, found.tokenizer) == (7, model.config, {"seconds": 1.5}, {"t": 1})
    assert torch.equal(found.trainer_state()["a"], torch.arange(3))
    other = load_model(found)
    for name, tensor in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor), name


def test_the_newest_is_taken_and_the_oldest_goes(model: NanoMoE, tmp_path: Path) -> None:
    for step in (5, 10, 90, 100):
        save(tmp_path, step, model)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-00000090", "checkpoint-00000100"]
    assert open_checkpoint(tmp_path).step == 100


def test_a_copy_by_another_name_is_the_users(model: NanoMoE, tmp_path: Path) -> None:
    first = save(tmp_path, 99_999_999, model)
    copies = [tmp_path / f"checkpoint-{name}" for name in ("best", "99999999-mybackup", "1", "0099999999", "00000007 ", "\u0661" * 8)]
    for copy in copies:
        shutil.copytree(first, copy)
    for step in (100_000_000, 100_000_001):
        save(tmp_path, step, model)
    assert open_checkpoint(tmp_path).step == 100_000_001
    assert open_checkpoint(copies[0]).step == 99_999_999
    own = [tmp_path / f"checkpoint-{step}" for step in (100_000_000, 100_000_001)]
    assert sorted(tmp_path.iterdir()) == sorted([*copies, *own])


def test_a_copy_under_a_name_of_the_runs_is_refused(model: NanoMoE, tmp_path: Path) -> None:
    shutil.copytree(save(tmp_path, 5, model), tmp_path / "checkpoint-00000010")
    with pytest.raises(UsageError, match="checkpoint-00000010: holds step 5, so it is a copy; name it otherwise"):
        open_checkpoint(tmp_path)


def test_a_half_written_one_is_none(model: NanoMoE, tmp_path: Path) -> None:
    """What a kill leaves behind while one is written."""
    save(tmp_path, 5, model)
    partial = tmp_path / ".checkpoint-00000010.partial"
    partial.mkdir()
    (partial / "checkpoint.json").write_text("{}")
    assert open_checkpoint(tmp_path).step == 5
    save(tmp_path, 10, model)
    assert not partial.exists()


@pytest.mark.parametrize("at", ["model.safetensors", "trainer.safetensors", "tokenizer.json", "checkpoint.json"])
def test_a_disk_that_fills_up_leaves_the_earlier_one(at: str, model: NanoMoE, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 5, model)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    to_disk = module._to_disk

    def full(path: Path) -> None:
        if path.name == at:
            raise OSError(errno.ENOSPC, "No space left on device")
        to_disk(path)

    monkeypatch.setattr(module, "_to_disk", full)
    with pytest.raises(UsageError) as caught:
        save(tmp_path, 10, model)
    assert "cannot be written: No space left on device; checkpoint-00000005 is whole: go on from there with --resume" in str(caught.value)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_folder_without_one_is_refused(tmp_path: Path) -> None:
    assert newest(tmp_path) is None
    with pytest.raises(UsageError, match="no checkpoint there"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"d_model": 32, "moe": {"d_model": 32}}, r"model.embed_tokens.weight is \(300, 64\) there and \(300, 32\) in this model"),
        ({"n_layer": 3}, r"model.layers.2.\S+ is missing there"),
        ({"n_layer": 1}, r"model.layers.1.\S+ is \(\S.*\) there and missing in this model"),
        ({"moe": {"num_experts": 4}}, r"\S+ is \(8, \S+ \S+ there and \(4, \S+ \S+ in this model"),
    ],
    ids=["width", "layer more", "layer less", "experts"],
)
def test_a_model_of_another_shape_is_refused_by_name(settings: dict[str, Any], message: str, model: NanoMoE, tmp_path: Path) -> None:
    save(tmp_path, 5, model)
    with pytest.raises(UsageError, match="a checkpoint of another shape: " + message):
        load_model(dataclasses.replace(open_checkpoint(tmp_path), config=small_model(**settings)))


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "checkpoint.json").write_text("{"), "checkpoint.json: is damaged"),
        (lambda folder: (folder / "checkpoint.json").write_text("{}"), "is damaged ('format' is missing)"),
        (lambda folder: change(folder / "checkpoint.json", format=9), "in format 9, this version reads 1"),
        (lambda folder: change(folder / "checkpoint.json", model={"style": "qwen3"}), "not the settings of a NanoMoE model"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json: cannot be read"),
        (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors: cannot be read"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"\1" * 100), "model.safetensors: the checkpoint is damaged"),
    ],
    ids=["cut", "empty", "version", "settings", "no tokenizer", "no weights", "weights"],
)
def test_a_damaged_one_is_refused_with_its_path(damage: Any, message: str, model: NanoMoE, tmp_path: Path) -> None:
    folder = save(tmp_path, 5, model)
    damage(folder)
    with pytest.raises(UsageError) as caught:
        load_model(open_checkpoint(folder))
    assert str(folder) in str(caught.value)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("step", 2.5, "step 2.5 is no number of steps"),
        ("step", -1, "step -1 is no number of steps"),
        ("about", [], "about is no object"),
        ("model", [], "not the settings of a NanoMoE model"),
        ("n_layer", 10**9, "n_layer 1000000000: must be a whole number from 1 to 1024"),
        ("d_model", 10**12, "must be a whole number from 1 to 262144"),
        ("tied", "yes", "tied 'yes': must be true or false"),
        ("rope_base", 10**30, "rope_base 1"),
        ("norm_eps", True, "norm_eps True: must be a number above 0"),
    ],
)
def test_hostile_values_are_refused(key: str, value: Any, message: str, model: NanoMoE, tmp_path: Path) -> None:
    folder = save(tmp_path, 5, model)
    settings = json.loads((folder / "checkpoint.json").read_text())
    (settings if key in settings else settings["model"])[key] = value
    (folder / "checkpoint.json").write_text(json.dumps(settings))
    with pytest.raises(UsageError) as caught:
        load_model(open_checkpoint(folder))
    assert str(folder) in str(caught.value)
    assert message in str(caught.value)


def test_a_huge_model_in_the_settings_is_refused_before_it_is_built(model: NanoMoE, tmp_path: Path) -> None:
    folder = save(tmp_path, 5, model)
    settings = json.loads((folder / "checkpoint.json").read_text())
    settings["model"]["moe"]["d_expert"] = 1 << 18
    settings["model"]["moe"]["num_experts"] = 1 << 18
    (folder / "checkpoint.json").write_text(json.dumps(settings))
    with pytest.raises(UsageError, match="a checkpoint of another shape"):
        load_model(open_checkpoint(folder))


def framed(header: bytes, rest: bytes = b"") -> bytes:
    return len(header).to_bytes(8, "little") + header + rest


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 8,
        framed(b"[]"),
        framed(b"NaN"),
        framed(b"[" * 100_000),
        framed(b'{"a": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}', b"1"),
        framed(b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}', b"1234"),
        framed(b'{"a": {"dtype": "F32", "shape": [4611686018427387904, 4], "data_offsets": [0, 4]}}', b"1234"),
        framed(b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 1152921504606846976]}}', b"1234"),
    ],
    ids=["empty", "endless header", "list", "nan", "deep", "type", "shape", "size", "offset"],
)
def test_hostile_weights_are_one_line(content: bytes, model: NanoMoE, tmp_path: Path) -> None:
    folder = save(tmp_path, 5, model)
    (folder / "model.safetensors").write_bytes(content)
    with pytest.raises(UsageError) as caught:
        load_model(open_checkpoint(folder))
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_diverged_are_loaded_nowhere(value: float, model: NanoMoE, tmp_path: Path) -> None:
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    weights["model.norm.weight"][3] = value
    save_checkpoint(tmp_path, 5, config=model.config, weights=weights, trainer_state={}, tokenizer=b"{}", about={})
    with pytest.raises(UsageError, match=r"checkpoint-00000005: model.norm.weight holds NaN or inf: the training diverged; take an"):
        load_model(open_checkpoint(tmp_path))


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_pipe_is_not_waited_for(name: str, model: NanoMoE, tmp_path: Path) -> None:
    folder = save(tmp_path, 5, model)
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with pytest.raises(UsageError, match=f"{name}: the checkpoint is damaged .no regular file"):
        load_model(open_checkpoint(folder))


def test_weights_of_another_type_are_refused(model: NanoMoE, tmp_path: Path) -> None:
    weights = {name: tensor.half() for name, tensor in model.state_dict().items()}
    folder = save_checkpoint(tmp_path, 5, config=model.config, weights=weights, trainer_state={}, tokenizer=b"{}", about={})
    with pytest.raises(UsageError, match=r"is stored as torch.float16, and this version reads torch.float32"):
        load_model(open_checkpoint(folder))
