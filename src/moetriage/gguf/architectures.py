"""Which tensors and metadata keys the architectures of synthetic models need, after llama.cpp's ``src/models/*.cpp``.

In: a ``Shape``. Out: the plan of its tensors (names, sizes, scale of the random weights) and its keys. Nothing is drawn and nothing
written here.

Scales: with a unit-variance input every matrix keeps the variance (``gain / sqrt(n_in)``), so activations stay finite at any depth;
router logits get a standard deviation of 1.5, which makes routings vary between tokens and unequal within one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from moetriage.gguf.ggml_api import GgufType
from moetriage.gguf.shapes import Shape
from moetriage.gguf.writer import Typed, Value

ROUTER_GAIN = 1.5
#: Attention averages over the context, which shrinks its output; this brings it back to the size of the other branches.
ATTENTION_GAIN = 2.0
#: Sharp attention sees one place of the context rather than the mean of all, which would soon be the same for every token.
SHARPNESS = 2.0
EXPERT_GAIN = 3.0
LOGIT_GAIN = 2.5


@dataclass(frozen=True)
class TensorPlan:
    """One tensor to be made: normal values of ``mean`` and ``std``.

    layer: -1 outside blocks; exact: kept in f32 whatever the type asked for, as converters do with vectors and routers;
    silent_rows: rows at the end that are zero; n_expert: 1, or the number of matrices in an expert tensor; row_spread: sigma of the
    log-normal lengths of the rows (exact tensors only).
    """

    name: str
    ne: tuple[int, ...]
    std: float
    mean: float = 0.0
    layer: int = -1
    exact: bool = False
    silent_rows: int = 0
    n_expert: int = 1
    row_spread: float = 0.0


def _matrix(name: str, n_in: int, n_out: int, layer: int, gain: float = 1.0) -> TensorPlan:
    return TensorPlan(f"blk.{layer}.{name}.weight", (n_in, n_out), gain / math.sqrt(n_in), layer=layer)


def _vector(name: str, n: int, layer: int, mean: float = 1.0, std: float = 0.1) -> TensorPlan:
    suffix = "" if name.endswith((".bias", ".scale")) else ".weight"
    return TensorPlan(f"blk.{layer}.{name}{suffix}", (n,), std, mean=mean, layer=layer, exact=True)


def _experts(shape: Shape, name: str, n_in: int, n_out: int, layer: int) -> TensorPlan:
    ne = (n_in, n_out, shape.n_expert)
    gain = EXPERT_GAIN if "_down_" in name else 1.0
    return TensorPlan(f"blk.{layer}.{name}.weight", ne, gain / math.sqrt(n_in), layer=layer, n_expert=shape.n_expert)


def _router(shape: Shape, layer: int) -> TensorPlan:
    std = ROUTER_GAIN / math.sqrt(shape.n_embd)
    return TensorPlan(
        f"blk.{layer}.ffn_gate_inp.weight", (shape.n_embd, shape.n_expert), std, layer=layer, exact=True, row_spread=shape.popularity
    )


def _split_experts(shape: Shape, layer: int) -> Iterator[TensorPlan]:
    yield _router(shape, layer)
    yield _experts(shape, "ffn_gate_exps", shape.n_embd, shape.n_ff_exp, layer)
    yield _experts(shape, "ffn_up_exps", shape.n_embd, shape.n_ff_exp, layer)
    yield _experts(shape, "ffn_down_exps", shape.n_ff_exp, shape.n_embd, layer)


def _ends(shape: Shape, n_silent: int, embedding_std: float = 1.0) -> Iterator[TensorPlan]:
    yield TensorPlan("token_embd.weight", (shape.n_embd, shape.n_vocab), embedding_std)
    yield TensorPlan("output_norm.weight", (shape.n_embd,), 0.1, mean=1.0, exact=True)
    std = LOGIT_GAIN / math.sqrt(shape.n_embd)
    yield TensorPlan("output.weight", (shape.n_embd, shape.n_vocab), std, silent_rows=n_silent)


def _attention(shape: Shape, layer: int, head_dim: int | None = None) -> Iterator[TensorPlan]:
    n_q = shape.n_head * (head_dim or shape.head_dim)
    n_kv = shape.n_head_kv * (head_dim or shape.head_dim)
    yield _vector("attn_norm", shape.n_embd, layer)
    yield _matrix("attn_q", shape.n_embd, n_q, layer, SHARPNESS)
    yield _matrix("attn_k", shape.n_embd, n_kv, layer, SHARPNESS)
    yield _matrix("attn_v", shape.n_embd, n_kv, layer)
    yield _matrix("attn_output", n_q, shape.n_embd, layer, ATTENTION_GAIN)


def _dense_ffn(shape: Shape, layer: int, n_ff: int, suffix: str = "") -> Iterator[TensorPlan]:
    yield _matrix("ffn_gate" + suffix, shape.n_embd, n_ff, layer)
    yield _matrix("ffn_up" + suffix, shape.n_embd, n_ff, layer)
    yield _matrix("ffn_down" + suffix, n_ff, shape.n_embd, layer)


def _base_keys(shape: Shape) -> dict[str, Value]:
    values: dict[str, Value] = {
        "block_count": shape.n_layer,
        "context_length": shape.n_ctx_train,
        "embedding_length": shape.n_embd,
        "feed_forward_length": shape.n_ff or shape.n_ff_exp,
        "attention.head_count": shape.n_head,
        "attention.head_count_kv": shape.n_head_kv,
        "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": shape.rope_base,
        "rope.dimension_count": shape.head_dim,
        "expert_count": shape.n_expert,
        "expert_used_count": shape.top_k,
        "expert_feed_forward_length": shape.n_ff_exp,
    }
    return values


def _qwen3moe(shape: Shape) -> Iterator[TensorPlan]:
    for layer in range(shape.n_layer):
        yield from _attention(shape, layer)
        yield _vector("attn_q_norm", shape.head_dim, layer, mean=SHARPNESS)
        yield _vector("attn_k_norm", shape.head_dim, layer, mean=SHARPNESS)
        yield _vector("ffn_norm", shape.n_embd, layer)
        yield from _split_experts(shape, layer)


def _olmoe(shape: Shape) -> Iterator[TensorPlan]:
    for layer in range(shape.n_layer):
        yield from _attention(shape, layer)
        yield _vector("attn_q_norm", shape.n_embd, layer, mean=SHARPNESS)
        yield _vector("attn_k_norm", shape.n_embd, layer, mean=SHARPNESS)
        yield _vector("ffn_norm", shape.n_embd, layer)
        yield from _split_experts(shape, layer)


def _olmoe_keys(shape: Shape) -> dict[str, Value]:
    # This architecture sizes its experts by the dense key.
    return _base_keys(shape) | {"feed_forward_length": shape.n_ff_exp}


def _gpt_oss(shape: Shape) -> Iterator[TensorPlan]:
    n_q, n_kv = shape.n_head * shape.head_dim, shape.n_head_kv * shape.head_dim
    for layer in range(shape.n_layer):
        yield from _attention(shape, layer)
        yield _vector("post_attention_norm", shape.n_embd, layer)
        for name, n in (
            ("attn_q", n_q),
            ("attn_k", n_kv),
            ("attn_v", n_kv),
            ("attn_output", shape.n_embd),
            ("ffn_gate_inp", shape.n_expert),
        ):
            yield _vector(f"{name}.bias", n, layer, mean=0.0)
        yield _vector("attn_sinks", shape.n_head, layer, mean=0.0, std=1.0)
        yield from _split_experts(shape, layer)
        for name, n in (("gate", shape.n_ff_exp), ("up", shape.n_ff_exp), ("down", shape.n_embd)):
            yield TensorPlan(f"blk.{layer}.ffn_{name}_exps.bias", (n, shape.n_expert), 0.1, layer=layer, exact=True)


def _gpt_oss_keys(shape: Shape) -> dict[str, Value]:
    return _base_keys(shape) | {"attention.sliding_window": 128}


def _gemma4_window(layer: int) -> bool:
    return layer % 2 == 0


def _gemma4(shape: Shape) -> Iterator[TensorPlan]:
    yield TensorPlan("rope_freqs.weight", (shape.head_dim,), 0.0, mean=1.0, exact=True)
    for layer in range(shape.n_layer):
        # Full attention has heads twice as wide as the windowed layers.
        head_dim = shape.head_dim if _gemma4_window(layer) else 2 * shape.head_dim
        yield from _attention(shape, layer, head_dim)
        yield _vector("attn_q_norm", head_dim, layer)
        yield _vector("attn_k_norm", head_dim, layer)
        for name in ("post_attention_norm", "ffn_norm", "post_ffw_norm", "pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2"):
            yield _vector(name, shape.n_embd, layer)
        yield from _dense_ffn(shape, layer, shape.n_ff)
        yield _router(shape, layer)
        # The graph divides the router's input by sqrt(n_embd); trained files undo that here.
        yield _vector("ffn_gate_inp.scale", shape.n_embd, layer, mean=math.sqrt(shape.n_embd))
        yield _experts(shape, "ffn_gate_up_exps", shape.n_embd, 2 * shape.n_ff_exp, layer)
        yield _experts(shape, "ffn_down_exps", shape.n_ff_exp, shape.n_embd, layer)
        yield _vector("ffn_down_exps.scale", shape.n_expert, layer)
        yield _vector("layer_output_scale", 1, layer)


def _gemma4_keys(shape: Shape) -> dict[str, Value]:
    return _base_keys(shape) | {
        "attention.key_length": 2 * shape.head_dim,
        "attention.value_length": 2 * shape.head_dim,
        "attention.key_length_swa": shape.head_dim,
        "attention.value_length_swa": shape.head_dim,
        "rope.dimension_count": 2 * shape.head_dim,
        "rope.dimension_count_swa": shape.head_dim,
        "rope.freq_base_swa": 10000.0,
        "attention.sliding_window": 128,
        "attention.sliding_window_pattern": Typed(GgufType.BOOL, tuple(_gemma4_window(i) for i in range(shape.n_layer))),
        "attention.shared_kv_layers": 0,
        "embedding_length_per_layer_input": 0,
        "final_logit_softcapping": 30.0,
    }


#: Latent attention: rank of the query and key/value projections, and the split of a head into a plain and a rotated part.
_Q_RANK, _KV_RANK, _NOPE, _ROPE = 96, 64, 32, 32


def _deepseek2(shape: Shape) -> Iterator[TensorPlan]:
    n_head, n_v = shape.n_head, shape.head_dim
    for layer in range(shape.n_layer):
        yield _vector("attn_norm", shape.n_embd, layer)
        yield _matrix("attn_q_a", shape.n_embd, _Q_RANK, layer)
        yield _vector("attn_q_a_norm", _Q_RANK, layer)
        yield _matrix("attn_q_b", _Q_RANK, n_head * (_NOPE + _ROPE), layer, SHARPNESS * SHARPNESS)
        yield _matrix("attn_kv_a_mqa", shape.n_embd, _KV_RANK + _ROPE, layer)
        yield _vector("attn_kv_a_norm", _KV_RANK, layer)
        yield TensorPlan(f"blk.{layer}.attn_k_b.weight", (_NOPE, _KV_RANK, n_head), 1 / math.sqrt(_KV_RANK), layer=layer)
        yield TensorPlan(f"blk.{layer}.attn_v_b.weight", (_KV_RANK, n_v, n_head), 1 / math.sqrt(_KV_RANK), layer=layer)
        yield _matrix("attn_output", n_head * n_v, shape.n_embd, layer, ATTENTION_GAIN)
        yield _vector("ffn_norm", shape.n_embd, layer)
        if layer < shape.lead:
            yield from _dense_ffn(shape, layer, shape.n_ff)
            continue
        yield _vector("exp_probs_b.bias", shape.n_expert, layer, mean=0.0, std=0.05)
        yield from _split_experts(shape, layer)
        yield from _dense_ffn(shape, layer, shape.n_ff_exp, "_shexp")


def _deepseek2_keys(shape: Shape) -> dict[str, Value]:
    return _base_keys(shape) | {
        # What the attention stores and sees is one latent head, see llama_hparams::is_mla.
        "attention.head_count_kv": 1,
        "attention.key_length": _KV_RANK + _ROPE,
        "attention.value_length": _KV_RANK,
        "attention.key_length_mla": _NOPE + _ROPE,
        "attention.value_length_mla": shape.head_dim,
        "attention.q_lora_rank": _Q_RANK,
        "attention.kv_lora_rank": _KV_RANK,
        "rope.dimension_count": _ROPE,
        "leading_dense_block_count": shape.lead,
        "expert_shared_count": 1,
        "expert_weights_scale": 2.5,
        "expert_weights_norm": True,
        "expert_gating_func": 2,
        "expert_group_count": 4,
        "expert_group_used_count": 2,
    }


_ARCHITECTURES: dict[str, tuple[Callable[[Shape], Iterator[TensorPlan]], Callable[[Shape], dict[str, Value]]]] = {
    "qwen3moe": (_qwen3moe, _base_keys),
    "olmoe": (_olmoe, _olmoe_keys),
    "gemma4": (_gemma4, _gemma4_keys),
    "gpt-oss": (_gpt_oss, _gpt_oss_keys),
    "deepseek2": (_deepseek2, _deepseek2_keys),
}


def tensor_plan(shape: Shape, n_silent: int) -> list[TensorPlan]:
    """Return all tensors of a model of this shape in file order; ``n_silent`` output rows at the end are zero."""
    embedding_std = 1 / math.sqrt(shape.n_embd) if shape.arch == "gemma4" else 1.0  # this graph multiplies by sqrt(n_embd)
    return [*_ends(shape, n_silent, embedding_std), *_ARCHITECTURES[shape.arch][0](shape)]


def architecture_keys(shape: Shape) -> dict[str, Value]:
    """Return the ``ARCH.*`` keys of a model of this shape."""
    return {f"{shape.arch}.{key}": value for key, value in _ARCHITECTURES[shape.arch][1](shape).items()}
