"""``moetriage export``: a checkpoint becomes files that `moetriage run` and transformers take, and what it refuses."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from cli.support import Command

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="the extra train is not installed")


@pytest.fixture(scope="module")
def checkpoint() -> Callable[..., Path]:
    """Return a function that writes the checkpoint of an untrained model: ``checkpoint(run, style="gpt2")``."""
    from train import exporting

    from moetriage.train.checkpoint import save_checkpoint

    tokenizer = exporting.tokenizer().as_json().encode()

    def save(run: Path, **changes: object) -> Path:
        made = exporting.model(exporting.config(**changes))
        return save_checkpoint(run, 1, config=made.config, weights=made.state_dict(), trainer_state={}, tokenizer=tokenizer, about={})

    return save


def test_an_exported_checkpoint_runs(command: Command, checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "m.gguf"
    checkpoint(run)
    result = command("export", run, out, "--type", "f16", "--json")
    assert result.code == 0, result.err
    assert result.json == {"written": [{"path": str(out), "bytes": out.stat().st_size}]}
    texts = []
    for options in (["--mmap"], ["--cache-mb", "0"]):
        answer = command("run", out, "-p", "def f(x):\n", "-n", "12", "--temp", "0", "--json", *options)
        assert answer.code == 0, answer.err
        texts.append(answer.json["token_ids"])
    assert texts[0] == texts[1]
    assert 0 < len(texts[0]) <= 12


def test_both_kinds_are_written_at_once(command: Command, checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    out, hf = tmp_path / "m.gguf", tmp_path / "hf"
    result = command("export", checkpoint(tmp_path / "run"), out, "--hf", hf, "--name", "my model")
    assert result.code == 0, result.err
    assert result.out.splitlines() == [str(out), str(hf)]
    assert json.loads((hf / "config.json").read_text())["architectures"] == ["Qwen3MoeForCausalLM"]


def test_a_name_that_is_no_utf8_names_the_model_all_the_same(command: Command, checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    out = tmp_path / "m\udcff.gguf"
    assert command("export", checkpoint(tmp_path / "run"), out).code == 0
    assert out.exists()


def test_a_tokenizer_of_another_size_is_one_line(command: Command, checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "run")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    for changed in ({**tokenizer["model"], "vocab": dict(list(vocab.items())[:300])}, [], {"vocab": ["a"]}, {"vocab": {"a": "x"}}):
        (folder / "tokenizer.json").write_text(json.dumps({**tokenizer, "model": changed}))
        for target in ([tmp_path / "m.gguf"], ["--hf", tmp_path / "hf"]):
            result = command("export", folder, *target)
            assert (result.code, len(result.errors)) == (2, 1)
            assert str(folder) in result.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_weights_that_diverged_are_exported_nowhere(command: Command, checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    path = checkpoint(tmp_path / "run") / "model.safetensors"
    weights = load_file(path)
    weights["model.norm.weight"][3] = float("nan")
    save_file(weights, path)
    result = command("export", tmp_path / "run", "--hf", tmp_path / "hf")
    assert (result.code, len(result.errors)) == (2, 1)
    assert "model.norm.weight holds NaN or inf" in result.err


def test_what_exists_is_kept_without_force(command: Command, checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    run, out, hf = checkpoint(tmp_path / "run"), tmp_path / "m.gguf", tmp_path / "hf"
    hf.mkdir()
    result = command("export", run, out, "--hf", hf)
    assert (result.code, len(result.errors)) == (2, 1)
    assert "exists already" in result.err
    assert not out.exists(), "nothing is written if one of both is refused"
    assert command("export", run, out, "--hf", hf, "--force").code == 0


@pytest.mark.parametrize(("out", "hf"), [("x", "x"), ("x", "./y/../x"), ("x/m.gguf", "x")])
def test_a_file_that_the_folder_would_replace_is_refused_before_anything_is_written(
    out: str, hf: str, command: Command, checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    run = checkpoint(tmp_path / "run")
    (tmp_path / "y").mkdir()
    if out != hf and out != "x":
        assert command("export", run, "--hf", tmp_path / hf).code == 0
    before = sorted(tmp_path.rglob("*"))
    result = command("export", run, tmp_path / out, "--hf", f"{tmp_path}/{hf}", "--force")
    assert (result.code, len(result.errors)) == (2, 1)
    assert f"{out}: lies where --hf" in result.err
    assert sorted(tmp_path.rglob("*")) == before


def test_a_disk_that_cannot_be_written_to_is_one_line_that_names_the_file(
    command: Command, checkpoint: Callable[..., Path], tmp_path: Path, small_disk: Path
) -> None:
    if subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], capture_output=True, check=False).returncode:
        pytest.skip("no file system can be made read-only here")
    run = checkpoint(tmp_path / "run")
    for target, named in (([small_disk / "m.gguf"], "m.gguf"), (["--hf", small_disk / "hf"], "hf")):
        result = command("export", run, *target)
        assert (result.code, len(result.errors)) == (2, 1)
        assert f"{small_disk / named}: writing failed: Read-only file system" in result.err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "nothing to write: give OUT.gguf, --hf DIR, or both"),
        (["--hf", "hf", "--type", "f16"], "--type f16 is about a GGUF file"),
        (["m.gguf", "--type", "q2_K"], "--type q2_K: must be one of f32, f16, q8_0, q4_0"),
        (["no/such/folder/m.gguf"], "does not exist"),
    ],
)
def test_bad_options_are_one_line(
    command: Command,
    checkpoint: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    result = command("export", checkpoint(tmp_path / "run"), *arguments)
    assert (result.code, len(result.errors)) == (2, 1)
    assert said in result.err


def test_a_model_of_another_style_is_one_line(command: Command, checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    result = command("export", checkpoint(tmp_path / "run", style="gpt2"), tmp_path / "m.gguf")
    assert (result.code, len(result.errors)) == (2, 1)
    assert "style 'gpt2' cannot be exported: style qwen3 can" in result.err


def test_weights_that_do_not_fit_the_settings_are_one_line(command: Command, checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    folder = checkpoint(tmp_path / "run")
    about = json.loads((folder / "checkpoint.json").read_text())
    about["model"]["n_layer"] = 3
    (folder / "checkpoint.json").write_text(json.dumps(about))
    result = command("export", folder, tmp_path / "m.gguf")
    assert (result.code, len(result.errors)) == (2, 1)
    assert "a checkpoint of another shape: model.layers.2" in result.err


def test_a_folder_without_a_checkpoint_is_one_line(command: Command, tmp_path: Path) -> None:
    result = command("export", tmp_path, tmp_path / "m.gguf")
    assert (result.code, len(result.errors)) == (2, 1)
    assert "no checkpoint there" in result.err
