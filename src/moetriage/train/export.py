"""From a trained model to a GGUF file that llama.cpp, and so ``moetriage run``, computes the same logits from.

In: settings and weights of a NanoMoE of style "qwen3", and its tokenizer. Out: one file in llama.cpp's qwen3moe layout. The file is
written, and quantised, by ``moetriage.gguf``; this module knows what our parameters are called there (llama.cpp's
``src/models/qwen3moe.cpp``). Which models have no such layout is said here for ``hf_export``, too.

Legend: V words, D model width, H expert width, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from moetriage.errors import UsageError
from moetriage.gguf.architectures import architecture_keys
from moetriage.gguf.bpe import tokenizer_keys
from moetriage.gguf.hparams import MAX_EXPERTS, MAX_LAYERS
from moetriage.gguf.shapes import Shape
from moetriage.gguf.weights_file import Weight, write_weights
from moetriage.gguf.writer import Value
from moetriage.train.checkpoint import load_model, open_checkpoint
from moetriage.train.files import damaged
from moetriage.train.model_config import ModelConfig
from moetriage.train.policies import DROPLESS, TWO_EXPERT_POLICIES
from moetriage.train.tokenizer import END_OF_TEXT

ARCHITECTURE = "qwen3moe"
#: What ``--type`` takes, and the number of general.file_type (llama_ftype) for each, which other tools show.
FILE_TYPES = {"f32": 0, "f16": 1, "q8_0": 7, "q4_0": 2}
DEFAULT_TYPE = "q8_0"
_F32 = "f32"
#: Names within a layer, here and in the file. Vectors and the router stay in f32, as llama.cpp's converters leave them: they are small,
#: and a rounded router chooses other experts.
_EXACT = {
    "input_layernorm": "attn_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.router": "ffn_gate_inp",
}
_MATRICES = {f"self_attn.{ours}_proj": f"attn_{theirs}" for ours, theirs in (("q", "q"), ("k", "k"), ("v", "v"), ("o", "output"))}
#: (E, in, out) here, (E, out, in) there.
_EXPERTS = {"gate_proj": "ffn_gate_exps", "up_proj": "ffn_up_exps", "down_proj": "ffn_down_exps"}


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A trained model as exports take it: settings, parameters by NanoMoE's names, the parsed ``tokenizer.json``."""

    config: ModelConfig
    weights: Mapping[str, Tensor]
    tokenizer: dict[str, Any]


def open_trained(path: Path) -> Trained:
    """Read a checkpoint, or the newest one of a run. Raises UsageError if there is none, or its weights do not fit or diverged."""
    checkpoint = open_checkpoint(path)
    check_exportable(checkpoint.config)
    with damaged(checkpoint.folder, hint="take an earlier one"):
        _check_tokenizer(checkpoint.tokenizer, checkpoint.config.vocab_size)
    return Trained(config=checkpoint.config, weights=load_model(checkpoint).state_dict(), tokenizer=checkpoint.tokenizer)


def _check_tokenizer(tokenizer: dict[str, Any], vocab_size: int) -> None:
    """Raise UsageError for a tokenizer with other ids than the model has rows: it would read and write other texts than were learned."""
    ids = {*tokenizer["model"]["vocab"].values(), *(token["id"] for token in tokenizer.get("added_tokens") or ())}
    if ids != set(range(vocab_size)):
        raise UsageError(f"the tokenizer's {len(ids)} tokens are not the {vocab_size} of the model: they do not belong together")


def check_exportable(config: ModelConfig) -> None:
    """Raise UsageError, saying what does export, for a model that computes what neither llama.cpp's nor Hugging Face's Qwen3-MoE does."""
    moe = config.moe
    if config.style != "qwen3":
        raise UsageError(
            f"a model of style {config.style!r} cannot be exported: style qwen3 can (moetriage train --preset bundled or tiny)"
        )
    if moe.activation != "swiglu":
        raise UsageError(f"experts with {moe.activation} cannot be exported: those with swiglu can")
    # Without a limit of capacity these give every token two experts, so the limit is all that the engine leaves out.
    if not moe.dropless and moe.policy not in TWO_EXPERT_POLICIES:
        raise UsageError(
            f"a model trained with policy {moe.policy!r} cannot be exported, as an engine gives every token the same number of experts: "
            f"{', '.join((DROPLESS, *TWO_EXPERT_POLICIES))} can"
        )
    if moe.top_k > moe.num_experts:
        raise UsageError(
            f"a model with policy {moe.policy!r} and num_experts {moe.num_experts} cannot be exported, as an engine gives every token "
            f"{moe.top_k} experts: one with {moe.top_k} or more can"
        )
    if moe.loss_free_bias_rate:
        raise UsageError("a router with a selection bias (loss_free_bias_rate) cannot be exported: one with a load-balancing loss can")


def check_gguf(config: ModelConfig) -> None:
    """Raise UsageError for a model that cannot be exported as GGUF."""
    check_exportable(config)
    if not config.moe.renormalise:
        raise UsageError("a model with renormalise=False cannot be exported as GGUF: qwen3moe divides a token's gates by their sum")
    for what, value, most in (("n_layer", config.n_layer, MAX_LAYERS), ("num_experts", config.moe.num_experts, MAX_EXPERTS)):
        if value > most:
            raise UsageError(f"a model with {what} {value} cannot be exported as GGUF: llama.cpp reads at most {most}; --hf can")


def write_gguf(trained: Trained, out: Path, *, ggml_type: str = DEFAULT_TYPE, name: str = "moetriage", force: bool = False) -> int:
    """Write a trained model as GGUF and return the file's size in bytes.

    ggml_type: f32, f16, q8_0 or q4_0, for all matrices except routers (f32) and the one that makes the logits (q8_0 at least, as
    llama.cpp's own quantiser keeps it above the rest). name: what the file calls the model. force: replace an existing file.
    Raises UsageError for a model without such a layout and for a file that cannot be written; nothing is left behind then.
    """
    if ggml_type not in FILE_TYPES:
        raise UsageError(f"--type {ggml_type}: must be one of {', '.join(FILE_TYPES)}")
    check_gguf(trained.config)
    keys = _keys(trained, name) | {"general.file_type": FILE_TYPES[ggml_type]}
    return write_weights(out, keys, list(_weights(trained, ggml_type)), force=force)


def _keys(trained: Trained, name: str) -> dict[str, Value]:
    config = trained.config
    shape = Shape(
        arch=ARCHITECTURE,
        about="",
        n_layer=config.n_layer,
        n_expert=config.moe.num_experts,
        top_k=config.moe.top_k,
        n_ff_exp=config.moe.d_expert,
        n_embd=config.d_model,
        n_head=config.n_head,
        n_head_kv=config.kv_heads,
        head_dim=config.head_width,
        n_vocab=config.vocab_size,
        n_ctx_train=config.context,
        rope_base=config.rope_base,
    )
    general: dict[str, Value] = {
        "general.architecture": ARCHITECTURE,
        "general.type": "model",
        "general.name": name.encode(errors="replace").decode(),  # a file's name may hold bytes that are no UTF-8
        "general.quantization_version": 2,
        f"{ARCHITECTURE}.vocab_size": config.vocab_size,
    }
    keys = general | architecture_keys(shape) | {f"{ARCHITECTURE}.attention.layer_norm_rms_epsilon": config.norm_eps}
    return keys | tokenizer_keys(trained.tokenizer, vocab_size=config.vocab_size, eos_token=END_OF_TEXT)


def _weights(trained: Trained, ggml_type: str) -> Iterator[Weight]:
    """Yield the tensors in file order."""
    weights = trained.weights
    logits_type = "q8_0" if ggml_type == "q4_0" else ggml_type
    tied = trained.config.tied
    yield Weight("token_embd.weight", _array(weights["model.embed_tokens.weight"]), logits_type if tied else ggml_type)
    yield Weight("output_norm.weight", _array(weights["model.norm.weight"]), _F32)
    if not tied:
        yield Weight("output.weight", _array(weights["lm_head.weight"]), logits_type)
    for layer in range(trained.config.n_layer):
        ours, theirs = f"model.layers.{layer}", f"blk.{layer}"
        for names, kind in ((_EXACT, _F32), (_MATRICES, ggml_type)):
            for name, there in names.items():
                yield Weight(f"{theirs}.{there}.weight", _array(weights[f"{ours}.{name}.weight"]), kind)
        for name, there in _EXPERTS.items():
            yield Weight(f"{theirs}.{there}.weight", _array(weights[f"{ours}.mlp.experts.{name}"].transpose(1, 2)), ggml_type)


def _array(tensor: Tensor) -> npt.NDArray[np.float32]:
    array: npt.NDArray[np.float32] = tensor.detach().float().contiguous().cpu().numpy()
    return array
