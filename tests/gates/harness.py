"""What every gate is made of: the two ways to run a tiny model, a sampled text with its logits, and the recording of its routing.

A gate compares what two configurations *say*: the tokens and, bit by bit, the logits that they were sampled from. Sampling is hot (random
weights under greedy decoding loop after a few tokens) and seeded, so equal logits give equal tokens and the routing wanders.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import llama_cpp
import llama_cpp.llama_cpp as lib
import numpy as np
import numpy.typing as npt
import polars as pl

from moetriage.config import StreamConfig
from moetriage.stream.llama import Llama
from moetriage.stream.routing import RENORM_KEY
from moetriage.trace.reader import read_trace
from moetriage.trace.schema import TraceMeta
from moetriage.trace.writer import RouteWriter
from moetriage.types import Phase, TokenMetrics

FAMILIES = ("tiny-qwen3moe", "tiny-olmoe", "tiny-gemma4", "tiny-gpt-oss", "tiny-deepseek2", "tiny-mixed")
#: What G1 and G2 are asked for; the variations on them say less.
N_TOKENS = 64
N_SHORT = 24
SEED = 20
#: 24 tokens without pattern, so that the prefill's tokens route apart.
PROMPT = tuple(np.random.default_rng(3).integers(10, 500, 24).tolist())
# One thread: with more, a loaded machine spends its time in ggml's spinning barriers. test_g01 runs with two as well.
_ARGUMENTS: dict[str, Any] = {"n_ctx": 256, "n_threads": 1, "n_threads_batch": 1, "verbose": False}
_HOT: dict[str, Any] = {"temp": 1.3, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


@dataclass
class Said:
    """tokens sampled; logits: float32 [n, n_vocab], each token's; steps: the session's metrics (none for plain llama.cpp)."""

    tokens: list[int]
    logits: npt.NDArray[np.float32]
    steps: list[TokenMetrics] = field(default_factory=list)

    def decode_sum(self, name: str) -> int:
        return sum(getattr(step, name) for step in self.steps if step.phase is Phase.DECODE)


def assert_same(said: Said, expected: Said) -> None:
    """Compare bit by bit (so that 0 differs from -0) all that was said with the beginning of ``expected``."""
    n = len(said.tokens)
    assert n > 0
    apart = (said.logits[:n].view(np.uint32) != expected.logits[:n].view(np.uint32)).any(axis=1).nonzero()[0]
    assert not len(apart), f"logits differ from token {apart[0]} on ({len(apart)} of {n})"
    assert said.tokens == expected.tokens[:n]
    assert np.isfinite(said.logits).all()


@contextlib.contextmanager
def resident(path: Path, **kwargs: Any) -> Iterator[llama_cpp.Llama]:
    """Give plain llama.cpp with the whole model in memory and the kernels that streaming uses (no repacking)."""
    defaults = lib.llama_model_default_params

    def unpacked() -> Any:
        params = defaults()
        params.use_extra_bufts = False
        return params

    lib.llama_model_default_params = unpacked
    try:
        llm = llama_cpp.Llama(str(path), **_ARGUMENTS | kwargs)
    finally:
        lib.llama_model_default_params = defaults
    with contextlib.closing(llm):
        yield llm


@contextlib.contextmanager
def streamed(
    path: Path, *, share: float | None = None, record_routes: bool = False, llama: dict[str, Any] | None = None, **config: Any
) -> Iterator[Llama]:
    """Give a streaming session. ``config`` is StreamConfig's; ``llama`` goes to llama_cpp.

    share: cache budget as a share of T (tiny models are below the MiB that --cache-mb counts in): below 1 an LRU cache cannot hit.
    """
    if share is not None:
        config |= {"cache_mb": 1, "force_cache": True}
    llm = Llama(path, stream=StreamConfig(**config), record_routes=record_routes, notify=lambda _: None, **_ARGUMENTS | (llama or {}))
    with contextlib.closing(llm):
        if share is not None:
            llm.session.hook.set_budget(int(share * llm.session.working_set_bytes))
        yield llm


def say(llm: llama_cpp.Llama, n_tokens: int = N_SHORT, prompt: Sequence[int] = PROMPT, seed: int = SEED) -> Said:
    """Sample ``n_tokens`` after ``prompt`` from an empty sequence (the expert cache stays as it is)."""
    llm.reset()
    said = Said([], np.empty((n_tokens, llm.n_vocab()), np.float32))
    for token in speaking(llm, said, prompt, seed):
        said.tokens.append(token)
        if len(said.tokens) == n_tokens:
            break
    for step in said.steps:
        assert step.phase is Phase.PREFILL or step.hits + step.misses + step.dropped == step.routed > 0
    return said


def speaking(llm: llama_cpp.Llama, said: Said, prompt: Sequence[int] = PROMPT, seed: int = SEED) -> Iterator[int]:
    """Yield sampled tokens, keeping their logits and the steps' metrics in ``said``; the caller keeps the tokens and stops."""
    if isinstance(llm, Llama) and not llm.session.config.mmap:
        llm.session.on_step = said.steps.append
    llm.set_seed(seed)
    with contextlib.closing(llm.generate(prompt, **_HOT)) as tokens:
        for i, token in enumerate(tokens):
            said.logits[i] = logits(llm)
            yield token


def logits(llm: llama_cpp.Llama) -> npt.NDArray[np.float32]:
    """Return a copy of the last output's logits."""
    return np.ctypeslib.as_array(lib.llama_get_logits_ith(llm.ctx, -1), shape=(llm.n_vocab(),)).copy()


def counters(llm: Llama) -> dict[str, int]:
    return {name: int(value) for name, value in llm.session.hook.stats().items()}


def meta_of(llm: Llama, *, renorm: bool = True) -> TraceMeta:
    session = llm.session
    return TraceMeta(
        model=str(session.layout.paths[0]),
        arch=session.layout.arch,
        n_layer=session.layout.n_layer,
        n_expert=session.layout.n_expert,
        n_expert_used=session.top_k,
        layer_expert_bytes={layer.block: session.layer_expert_bytes(layer) for layer in session.layers},
        extra={RENORM_KEY: "true" if renorm else "false"},
    )


@contextlib.contextmanager
def recording(llm: Llama, path: Path, *, renorm: bool = True) -> Iterator[None]:
    """Write the routing of one turn to ``path`` (the session must have been made with ``record_routes``)."""
    with RouteWriter(path, meta_of(llm, renorm=renorm)) as writer:
        llm.session.on_routes = lambda columns: writer.append(columns | {"turn": np.zeros(len(columns["step"]), np.int32)})
        try:
            yield
        finally:
            llm.session.on_routes = None


def rewrite(path: Path, out: Path, frame: pl.DataFrame, *, top_k: int | None = None) -> Path:
    """Write ``frame`` as a trace of the same model as the one at ``path``, at another width if asked for."""
    meta = read_trace(path).meta
    if top_k is not None:
        meta = TraceMeta(**{**vars(meta), "n_expert_used": top_k})
    with RouteWriter(out, meta) as writer:
        writer.append({name: frame[name].to_numpy() for name in frame.columns})
    return out
