"""What llama.cpp computes from an exported model is what PyTorch computes, and it reads the same tokens in a text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from train import exporting

from moetriage import Llama, StreamConfig
from moetriage.errors import UsageError
from moetriage.gguf.ggml_api import type_names
from moetriage.gguf.header import open_header
from moetriage.gguf.layout import read_layout
from moetriage.train.export import Trained, write_gguf
from moetriage.train.lm import NanoMoE
from moetriage.train.tokenizer import END_OF_TEXT_ID, Tokenizer

N_TOKENS = 100
Logits = npt.NDArray[np.float32]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return exporting.tokenizer()


@pytest.fixture(scope="module")
def tied() -> NanoMoE:
    return exporting.model(exporting.config())


@pytest.fixture(scope="module")
def untied() -> NanoMoE:
    return exporting.model(exporting.config(tied=False), seed=2)


@pytest.fixture
def export(tmp_path: Path, tokenizer: Tokenizer) -> Callable[..., Path]:
    def write(model: NanoMoE, **options: Any) -> Path:
        out = tmp_path / f"{options.get('ggml_type', 'default')}.gguf"
        assert write_gguf(exporting.trained(model, tokenizer), out, **options) == out.stat().st_size
        return out

    return write


def tokens_of(model: NanoMoE) -> list[int]:
    return torch.randint(1, model.config.vocab_size, (N_TOKENS,), generator=torch.Generator().manual_seed(3)).tolist()


@torch.no_grad()
def torch_logits(model: NanoMoE) -> Logits:
    logits: Logits = model(torch.tensor([tokens_of(model)]), drop_free=True).logits_BSV[0].numpy()
    return logits


def llama_logits(path: Path, model: NanoMoE, stream: StreamConfig | None = None) -> Logits:
    llama = Llama(
        path, stream=stream or StreamConfig(mmap=True), n_ctx=N_TOKENS, n_threads=1, n_threads_batch=1, logits_all=True, type_k=0, type_v=0
    )
    try:
        llama.eval(tokens_of(model))
        scores: Logits = llama.scores[:N_TOKENS].copy()
        return scores
    finally:
        llama.close()


def root_mean_square(values: Logits) -> float:
    return float(np.sqrt(np.mean(np.square(values))))


@pytest.mark.parametrize("which", ["tied", "untied"])
def test_f32_logits_are_those_of_pytorch(which: str, export: Callable[..., Path], request: pytest.FixtureRequest) -> None:
    model = request.getfixturevalue(which)
    ours, theirs = torch_logits(model), llama_logits(export(model, ggml_type="f32"), model)
    assert ours.std() > 0.5, "logits that are all alike show nothing"
    assert np.abs(ours - theirs).max() < 1e-4  # 1.5e-5 measured


@pytest.mark.parametrize(("ggml_type", "largest", "mean"), [("f16", 0.02, 0.003), ("q8_0", 1.5, 0.08), ("q4_0", 4.0, 0.6)])
def test_rounded_logits_differ_by_no_more_than_rounding(
    ggml_type: str, largest: float, mean: float, tied: NanoMoE, export: Callable[..., Path]
) -> None:
    """Bounds are 1.5 times what was measured; random sharp routers are the worst case, since rounding then chooses other experts."""
    error = torch_logits(tied) - llama_logits(export(tied, ggml_type=ggml_type), tied)
    assert 1e-4 < np.abs(error).max() < largest
    assert root_mean_square(error) < mean


def test_streamed_logits_equal_resident_logits(tied: NanoMoE, export: Callable[..., Path]) -> None:
    path = export(tied, ggml_type="q8_0")
    assert np.array_equal(llama_logits(path, tied), llama_logits(path, tied, StreamConfig(cache_mb=0)))


def test_a_model_trained_with_two_experts_and_a_capacity_exports_without_the_capacity(export: Callable[..., Path]) -> None:
    settings = exporting.config()
    limited = replace(settings, moe=replace(settings.moe, top_k=2, policy="fixed-top2", capacity_factor=1.25))
    model = exporting.model(limited)
    assert np.abs(torch_logits(model) - llama_logits(export(model, ggml_type="f32"), model)).max() < 1e-4


def test_llama_cpp_reads_the_same_tokens_in_a_text(tied: NanoMoE, tokenizer: Tokenizer, export: Callable[..., Path]) -> None:
    llama = Llama(export(tied), stream=StreamConfig(mmap=True), n_ctx=32, n_threads=1, n_threads_batch=1)
    for text in (*exporting.SAMPLES, "".join(exporting.SAMPLES), "a <|endoftext|> that is plain text"):
        theirs = llama.tokenize(text.encode(), add_bos=False, special=False)
        assert theirs == tokenizer.encode(text), repr(text)
        assert llama.detokenize(theirs, special=True).decode() == text
    # Where special tokens are commands, as in a chat template, it is one; and none is added by itself.
    assert llama.tokenize(b"<|endoftext|>", special=True) == [END_OF_TEXT_ID]
    assert llama.tokenize(b"a", add_bos=True) == tokenizer.encode("a")
    assert llama.token_eos() == END_OF_TEXT_ID
    llama.close()


def test_types_are_those_asked_for_and_routers_and_norms_stay_exact(untied: NanoMoE, export: Callable[..., Path]) -> None:
    with open_header(export(untied, ggml_type="q4_0", name="my model")) as header:
        types = {tensor.name: type_names()[tensor.ggml_type] for tensor in header.tensors()}
        assert header.scalars["general.name"] == "my model"
    exact = [name for name, kind in types.items() if kind == "f32"]
    assert all("norm" in name or "ffn_gate_inp" in name for name in exact)
    assert len(exact) == 1 + 2 * 5
    assert types["output.weight"] == "q8_0"
    assert {kind for name, kind in types.items() if name not in (*exact, "output.weight")} == {"q4_0"}


def test_a_tied_output_matrix_is_kept_above_q4_0(tied: NanoMoE, export: Callable[..., Path]) -> None:
    with open_header(export(tied, ggml_type="q4_0")) as header:
        types = {tensor.name: type_names()[tensor.ggml_type] for tensor in header.tensors()}
    assert types["token_embd.weight"] == "q8_0"
    assert "output.weight" not in types


def test_the_settings_come_back_from_the_file(tied: NanoMoE, export: Callable[..., Path]) -> None:
    layout = read_layout(export(tied, ggml_type="f16"))
    settings = tied.config
    assert (layout.arch, layout.n_expert, layout.top_k) == ("qwen3moe", settings.moe.num_experts, settings.moe.top_k)
    values = layout.metadata
    assert values["qwen3moe.rope.freq_base"] == settings.rope_base
    assert values["qwen3moe.context_length"] == settings.context
    assert values["qwen3moe.attention.layer_norm_rms_epsilon"] == pytest.approx(settings.norm_eps)


MOE = exporting.config().moe


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"style": "gpt2"}, "a model of style 'gpt2' cannot be exported: style qwen3 can"),
        ({"moe": replace(MOE, activation="gelu")}, "experts with gelu cannot be exported: those with swiglu can"),
        ({"moe": replace(MOE, renormalise=False)}, "renormalise=False cannot be exported as GGUF"),
        ({"moe": replace(MOE, loss_free_bias_rate=0.01)}, "a selection bias"),
        (
            {"moe": replace(MOE, num_experts=1, top_k=2, policy="fixed-top2", capacity_factor=2.0)},
            "policy 'fixed-top2' and num_experts 1 cannot be exported, as an engine gives every token 2 experts: one with 2 or more can",
        ),
        ({"n_layer": 513}, "n_layer 513 cannot be exported as GGUF: llama.cpp reads at most 512"),
        ({"moe": replace(MOE, num_experts=1025)}, "num_experts 1025 cannot be exported as GGUF: llama.cpp reads at most 1024"),
        (
            {"moe": replace(MOE, top_k=2, policy="capsel2", capacity_factor=1.25, margin_threshold=0.1)},
            "policy 'capsel2' cannot be exported, as an engine gives every token the same number of experts: dropless, top2",
        ),
    ],
)
def test_a_model_that_llama_cpp_would_compute_otherwise_is_refused(changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        # Refused before a weight is looked at.
        write_gguf(Trained(config=exporting.config(**changes), weights={}, tokenizer={}), tmp_path / "m.gguf")
    assert said in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_type_is_refused(tied: NanoMoE, export: Callable[..., Path]) -> None:
    with pytest.raises(UsageError, match="--type q2_K: must be one of f32, f16, q8_0, q4_0"):
        export(tied, ggml_type="q2_K")
