"""The sizes of synthetic models. Plain data: what tensors a shape has is up to its architecture (``architectures``)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One synthetic model. ``expert_types``: (all but down, down) tensor types of the expert tensors, repeated over the layers; empty:
    ``ggml_type``. ``lead``: leading blocks without experts. ``popularity``: how unevenly experts are chosen (0: alike)."""

    arch: str
    about: str
    n_layer: int
    n_expert: int
    top_k: int
    n_ff_exp: int
    n_embd: int = 256
    n_head: int = 4
    n_head_kv: int = 2
    head_dim: int = 64
    n_ff: int = 0
    lead: int = 0
    n_vocab: int = 512
    n_ctx_train: int = 4096
    rope_base: float = 10000.0
    ggml_type: str = "q4_0"
    expert_types: tuple[tuple[str, str], ...] = ()
    pre: str = "gpt-2"
    popularity: float = 0.0


SHAPES: dict[str, Shape] = {
    "tiny-qwen3moe": Shape(
        arch="qwen3moe",
        about="normalised gates",
        n_layer=4,
        n_expert=16,
        top_k=4,
        n_ff_exp=192,
        pre="qwen2",
    ),
    "tiny-olmoe": Shape(
        arch="olmoe",
        about="unnormalised gates",
        n_layer=3,
        n_expert=16,
        top_k=4,
        n_ff_exp=128,
        n_head_kv=4,
        ggml_type="q8_0",
    ),
    "tiny-gemma4": Shape(
        arch="gemma4",
        about="fused gate and up projections, a shared expert, sliding window",
        n_layer=4,
        n_expert=8,
        top_k=2,
        n_ff_exp=256,
        n_ff=512,
        ggml_type="q4_K",
    ),
    "tiny-gpt-oss": Shape(
        arch="gpt-oss",
        about="per-expert biases, attention sinks, softmax over the selected experts",
        n_layer=4,
        n_expert=8,
        top_k=2,
        n_ff_exp=256,
        ggml_type="q8_0",
        expert_types=(("mxfp4", "mxfp4"),),
    ),
    "tiny-deepseek2": Shape(
        arch="deepseek2",
        about="latent attention, a leading dense layer, a shared expert, grouped sigmoid gates scaled by 2.5",
        n_layer=4,
        n_expert=16,
        top_k=4,
        n_ff_exp=128,
        n_head=16,
        n_head_kv=1,
        n_ff=512,
        lead=1,
        ggml_type="q5_0",
    ),
    "tiny-mixed": Shape(
        arch="qwen3moe",
        about="quantisation differs between layers and between projections",
        n_layer=4,
        n_expert=8,
        top_k=2,
        n_ff_exp=256,
        ggml_type="q8_0",
        pre="qwen2",
        expert_types=(("q4_0", "q6_K"), ("q8_0", "q8_0"), ("q6_K", "q4_0"), ("f16", "f16")),
    ),
    "qwen3-30b-a3b": Shape(
        arch="qwen3moe",
        about="the size of Qwen3-30B-A3B, for benchmarks; some experts are as popular as in the recorded routing of the real model",
        n_layer=48,
        n_expert=128,
        top_k=8,
        n_ff_exp=768,
        n_embd=2048,
        n_head=32,
        n_head_kv=4,
        head_dim=128,
        n_ff=6144,
        n_vocab=151936,
        n_ctx_train=40960,
        rope_base=1e6,
        pre="qwen2",
        # Random routers would spread the load evenly and make every cache look useless: at 4000 MiB, 57 % hits against 80 % recorded.
        popularity=1.0,
    ),
}
