"""From a trained model to a folder that Hugging Face transformers loads as Qwen3MoeForCausalLM to the same logits.

In: settings, weights and tokenizer (``export.Trained``). Out: config.json, generation_config.json, model.safetensors and the tokenizer's
files. Weights are named as in the checkpoints on the hub, one matrix an expert, which every version of the class reads. Needs no
transformers; the folder appears under its name only when it is complete.

Legend: E experts.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from moetriage.errors import UsageError
from moetriage.train.export import Trained, check_exportable
from moetriage.train.files import beside, remove_leftovers, replace_folder
from moetriage.train.model_config import ModelConfig
from moetriage.train.tokenizer import END_OF_TEXT, END_OF_TEXT_ID

#: All that an export's folder holds.
_FILES = frozenset({"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors"})


def write_hf(trained: Trained, folder: Path, *, force: bool = False) -> int:
    """Write the folder and return the bytes of its files.

    force: replace a folder that an export wrote. Raises UsageError for a model without such a layout and for a folder that exists already
    or cannot be written; nothing is left behind then.
    """
    check_exportable(trained.config)
    check_folder(folder, force=force)
    remove_leftovers(folder)
    temporary = beside(folder)
    try:
        temporary.mkdir()
        save_file(dict(_weights(trained)), temporary / "model.safetensors", metadata={"format": "pt"})
        for name, content in _texts(trained).items():
            (temporary / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        # The library makes it readable for its owner alone.
        shutil.copymode(temporary / "config.json", temporary / "model.safetensors")
        nbytes = sum(path.stat().st_size for path in temporary.iterdir())
        replace_folder(temporary, folder)
    except (OSError, SafetensorError) as error:
        reason = (isinstance(error, OSError) and error.strerror) or error
        raise UsageError(f"{folder}: writing failed: {reason}; nothing was kept") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return nbytes


def check_folder(folder: Path, *, force: bool) -> None:
    """Raise UsageError for a place that cannot be written to. Only an export and nothing else, or an empty folder, is ever replaced."""
    try:
        if not folder.parent.is_dir():
            raise UsageError(f"{folder}: the folder {folder.parent} does not exist")
        if not folder.exists():
            return
        if not force:
            raise UsageError(f"{folder}: exists already; choose another name, or replace it with --force")
        reason = _not_ours(folder)
    except OSError as error:
        raise UsageError(f"{folder}: cannot be written: {error.strerror or error}") from error
    if reason is not None:
        raise UsageError(f"{folder}: {reason}, so --force does not replace it; choose another name")


def _not_ours(folder: Path) -> str | None:
    """Say what tells a folder from one that ``write_hf`` wrote, None if nothing does."""
    if not folder.is_dir():
        return "is no folder"
    found = {path.name for path in folder.iterdir()}
    for name in sorted(found):
        if name not in _FILES or not (folder / name).is_file():
            return f"holds {name}, which no export wrote"
    return f"has no {min(_FILES - found)}, as an export has" if found and found != _FILES else None


def _weights(trained: Trained) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in trained.weights.items():
        if not name.startswith("model.") and name != "lm_head.weight":
            continue
        if ".mlp.experts." in name:
            prefix, _, projection = name.rpartition(".")
            for expert, matrix in enumerate(tensor):
                yield f"{prefix}.{expert}.{projection}.weight", matrix.T.contiguous().clone()
        else:
            yield name.replace(".mlp.router.", ".mlp.gate."), tensor.contiguous().clone()


def _texts(trained: Trained) -> dict[str, dict[str, Any]]:
    """Return the folder's JSON files."""
    return {
        "config.json": _config(trained.config),
        "generation_config.json": {"bos_token_id": END_OF_TEXT_ID, "eos_token_id": END_OF_TEXT_ID},
        "tokenizer.json": trained.tokenizer,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": trained.config.context,
            "bos_token": END_OF_TEXT,
            "eos_token": END_OF_TEXT,
            "clean_up_tokenization_spaces": False,
        },
    }


def _config(config: ModelConfig) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.context,
        "hidden_size": config.d_model,
        "num_hidden_layers": config.n_layer,
        "num_attention_heads": config.n_head,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_width,
        "num_experts": config.moe.num_experts,
        "num_experts_per_tok": config.moe.top_k,
        "moe_intermediate_size": config.moe.d_expert,
        # Of layers without experts, which there are none of; transformers wants a number.
        "intermediate_size": config.moe.d_expert,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": config.moe.renormalise,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_base,
        "attention_bias": False,
        "tie_word_embeddings": config.tied,
        "initializer_range": config.init_std,
        "bos_token_id": END_OF_TEXT_ID,
        "eos_token_id": END_OF_TEXT_ID,
        "torch_dtype": "float32",
    }
