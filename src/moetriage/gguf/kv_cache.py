"""How many bytes llama.cpp's KV cache of a model takes, from metadata alone.

In: a ``ModelLayout`` and a context length. Out: bytes. It follows ``llama_kv_cache`` and ``llama_hparams`` (llama.cpp) for the settings
llama-cpp-python uses by default: one sequence, no flash attention, full-size caches for windowed layers. State of recurrent layers,
which does not grow with the context, is left out.
"""

from __future__ import annotations

from moetriage.gguf.header import whole
from moetriage.gguf.layout import ModelLayout

#: llama.cpp rounds the context up to this many cells.
CONTEXT_STEP = 256
F16_BYTES = 2


def kv_cache_bytes(layout: ModelLayout, n_ctx: int, *, element_bytes: int = F16_BYTES) -> int:
    """Return the size of the KV cache for ``n_ctx`` tokens with ``element_bytes`` an element (2: f16)."""
    cells = -(-n_ctx // CONTEXT_STEP) * CONTEXT_STEP
    layers = [layer for layer in range(layout.n_layer) if _has_kv(layout, layer)]
    keys = sum(_width(layout, layer, "key") for layer in layers)
    if _number(layout, "attention.key_length_mla") and _number(layout, "attention.value_length_mla"):
        return cells * keys * element_bytes  # latent attention: values are a part of the keys
    # Without flash attention values are stored transposed, all layers as wide as the widest.
    widest = max((_width(layout, layer, "value") for layer in range(layout.n_layer)), default=0)
    return cells * (keys + widest * len(layers)) * element_bytes


def _number(layout: ModelLayout, suffix: str, default: int = 0) -> int:
    value = layout.metadata.get(f"{layout.arch}.{suffix}", default)
    return value if type(value) is int else default


def _has_kv(layout: ModelLayout, layer: int) -> bool:
    interval = _number(layout, "full_attention_interval")
    if interval and (layer + 1) % interval:
        return False  # a layer of linear attention
    return layer < layout.n_layer - _number(layout, "attention.shared_kv_layers") and layout.n_head_kv[layer] > 0


def _width(layout: ModelLayout, layer: int, what: str) -> int:
    """Return the elements of a token's keys or values in one layer."""
    n_head = layout.layer_arrays.get(f"{layout.arch}.attention.head_count", (_number(layout, "attention.head_count"),))
    per_head = _number(layout, f"attention.{what}_length", layout.n_embd // max(1, whole(n_head[0])))
    pattern = layout.layer_arrays.get(f"{layout.arch}.attention.sliding_window_pattern", ())
    if layer < len(pattern) and pattern[layer]:
        per_head = _number(layout, f"attention.{what}_length_swa", per_head)
    return per_head * layout.n_head_kv[layer]
