"""transformers loads an exported folder to the same logits and the same tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from train import exporting

from moetriage.errors import UsageError
from moetriage.train import hf_export
from moetriage.train.hf_export import write_hf

transformers = pytest.importorskip("transformers", reason="the extra train-test is not installed")

CONFIG = exporting.config()
TOKENIZER = exporting.tokenizer()


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    transformers.utils.logging.disable_progress_bar()
    yield
    transformers.utils.logging.enable_progress_bar()


@pytest.mark.parametrize("changes", [{}, {"tied": False}, {"moe": replace(CONFIG.moe, renormalise=False)}])
@torch.no_grad()
def test_logits_are_the_same_in_transformers(changes: dict[str, Any], tmp_path: Path) -> None:
    made = exporting.model(exporting.config(**changes))
    folder = tmp_path / "hf"
    assert write_hf(exporting.trained(made, TOKENIZER), folder) == sum(path.stat().st_size for path in folder.iterdir())
    theirs, info = transformers.Qwen3MoeForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    tokens = torch.randint(1, CONFIG.vocab_size, (2, 100))
    logits = made(tokens).logits_BSV
    assert logits.std() > 0.5
    torch.testing.assert_close(theirs(tokens).logits, logits, rtol=0, atol=1e-4)


def test_texts_become_the_same_tokens_in_transformers(tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    write_hf(exporting.trained(exporting.model(CONFIG), TOKENIZER), folder)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    for text in exporting.SAMPLES:
        assert theirs(text)["input_ids"] == TOKENIZER.encode(text), repr(text)
        assert theirs.decode(TOKENIZER.encode(text)) == text
    assert theirs.eos_token == "<|endoftext|>"


def test_a_model_of_another_style_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="style 'gpt2' cannot be exported"):
        write_hf(exporting.trained(exporting.model(exporting.config(style="gpt2")), TOKENIZER), tmp_path / "hf")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_replaced_only_by_force_and_only_if_it_is_a_model(tmp_path: Path) -> None:
    trained = exporting.trained(exporting.model(CONFIG), TOKENIZER)
    folder = tmp_path / "hf"
    write_hf(trained, folder)
    with pytest.raises(UsageError, match="exists already; choose another name, or replace it with --force"):
        write_hf(trained, folder)
    write_hf(exporting.trained(exporting.model(exporting.config(n_layer=1)), TOKENIZER), folder, force=True)
    assert '"num_hidden_layers": 1' in (folder / "config.json").read_text()
    other = tmp_path / "photos"
    other.mkdir()
    (other / "holiday.jpg").write_text("x")
    with pytest.raises(UsageError, match=r"photos: holds holiday.jpg, which no export wrote, so --force does not replace it"):
        write_hf(trained, other, force=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "photos"]


def test_a_folder_that_holds_more_or_less_than_an_export_is_kept(tmp_path: Path) -> None:
    trained = exporting.trained(exporting.model(CONFIG), TOKENIZER)
    folder = tmp_path / "hf"
    write_hf(trained, folder)

    def refused(reason: str) -> None:
        before = sorted(folder.iterdir())
        with pytest.raises(UsageError, match=f"hf: {reason}, so --force does not replace it; choose another name"):
            write_hf(trained, folder, force=True)
        assert sorted(folder.iterdir()) == before

    (folder / "thesis.tex").write_text("x")
    refused("holds thesis.tex, which no export wrote")
    (folder / "thesis.tex").unlink()
    (folder / "tokenizer.json").unlink()
    refused("has no tokenizer.json, as an export has")
    (folder / "tokenizer.json").mkdir()
    refused("holds tokenizer.json, which no export wrote")
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match="file: is no folder"):
        write_hf(trained, tmp_path / "file", force=True)
    with pytest.raises(UsageError, match="cannot be written: File name too long"):
        write_hf(trained, tmp_path / ("x" * 300))


def test_a_full_disk_leaves_the_old_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = exporting.trained(exporting.model(CONFIG), TOKENIZER)
    folder = tmp_path / "hf"
    write_hf(trained, folder)

    def full(*_arguments: Any, **_named: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(hf_export, "save_file", full)
    with pytest.raises(UsageError, match="hf: writing failed: No space left on device; nothing was kept"):
        write_hf(trained, folder, force=True)
    assert (folder / "model.safetensors").stat().st_size > 0
    assert list(tmp_path.iterdir()) == [folder]
