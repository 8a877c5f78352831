"""What a model's context and cache would take on this machine, foretold without loading it.

In: a ``ModelLayout``, settings and a context length. Out: a context that fits, and the ``Budget``. The session measures what its context
takes; here it is estimated, so the foretold budget is good to some ten MiB.
"""

from __future__ import annotations

from moetriage.config import StreamConfig
from moetriage.errors import UsageError
from moetriage.gguf.header import whole
from moetriage.gguf.kv_cache import kv_cache_bytes
from moetriage.gguf.layout import ModelLayout
from moetriage.stream.budget import Budget, resolve_budget
from moetriage.stream.memory_limit import MemoryLimit, memory_limit
from moetriage.types import MIB

#: A context nobody asked for; longer ones cost memory that the expert cache then lacks.
DEFAULT_N_CTX = 4096
#: Tokens of the batch that llama.cpp sizes its buffers for (llama_cpp's default n_ubatch), and bytes of a float32.
_BATCH_TOKENS = 512
_F32_BYTES = 4
#: Buffers of top_k x n_embd floats a token that were alive at once in the models measured (Qwen3-30B-A3B: 100 MiB).
_EXPERT_BUFFERS = 3


def plan_budget(layout: ModelLayout, n_ctx: int, *, config: StreamConfig | None = None, limit: MemoryLimit | None = None) -> Budget:
    """Return the budget that a session with these settings would get. Raises BudgetError where it would refuse to start."""
    config = config or StreamConfig()
    return resolve_budget(
        config,
        layout_expert_total=layout.expert_total_bytes,
        working_set_bytes=layout.working_set_bytes(config.n_expert_used),
        largest_layer_bytes=max(layout.expert_bytes(layer) * layout.n_expert for layer in layout.moe_layers),
        dense_bytes=layout.dense_total_bytes,
        kv_bytes=kv_cache_bytes(layout, n_ctx),
        compute_bytes=compute_bytes(layout, n_ctx),
        limit=limit or memory_limit(),
    )


def context_size(layout: ModelLayout, n_ctx: int | None) -> int:
    """Return the context to make for a request of ``n_ctx`` tokens, or for none.

    Raises UsageError for one that does not fit: llama.cpp touches all of its memory at once, and the system might kill us.
    """
    if n_ctx is None:
        return min(DEFAULT_N_CTX, layout.n_ctx_train or DEFAULT_N_CTX)
    if n_ctx < 1:
        raise UsageError(f"-c {n_ctx}: must be at least 1 token")
    needed, limit = kv_cache_bytes(layout, n_ctx), memory_limit()
    if needed > limit.available_bytes:
        raise UsageError(
            f"-c {n_ctx}: the KV cache takes {-(-needed // MIB)} MiB and {limit.available_bytes // MIB} MiB are available "
            f"({limit.source}); give a smaller context"
        )
    return n_ctx


def compute_bytes(layout: ModelLayout, n_ctx: int) -> int:
    """Estimate llama.cpp's compute buffers: a batch's attention scores (no flash attention) or logits, its mask, its experts' outputs."""
    heads = layout.layer_arrays.get(f"{layout.arch}.attention.head_count", (layout.metadata.get(f"{layout.arch}.attention.head_count", 0),))
    widest = max(layout.n_vocab, max(whole(n) for n in heads) * n_ctx)
    return _BATCH_TOKENS * _F32_BYTES * (widest + n_ctx + _EXPERT_BUFFERS * layout.top_k * layout.n_embd)
