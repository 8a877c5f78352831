"""One model being streamed: from the file's layout to a llama.cpp context whose graph is learned and whose experts are read on demand.

In: a StreamConfig and a ModelLayout. Out: a model and a context for llama_cpp.Llama, then one ``decode`` per batch with its measurements.
Knows how a session is put together; the hot path is native, and text is llama_cpp's business.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moetriage import _native
from moetriage.config import DropConfig, StreamConfig, dropping_caveats
from moetriage.errors import GraphError, ModelFileError, OutOfMemoryError, ReadError, UsageError
from moetriage.gguf import ggml_api
from moetriage.gguf.layout import ModelLayout
from moetriage.stream import llama_api
from moetriage.stream.budget import Budget
from moetriage.stream.memory_limit import MemoryLimit, memory_limit
from moetriage.stream.weights import LearnedLayer, Weights
from moetriage.types import Phase, TokenMetrics

_COUNTERS = ("hits", "misses", "evictions", "reads", "read_bytes", "routed", "dropped", "hook_nanos", "wait_nanos")
#: A graph that keeps changing under the plan is not a graph we can stream.
MAX_RELEARN = 3
#: llama_decode's answer when the KV cache has no place left for the batch.
NO_ROOM = 1


class Session:
    """The engine behind one ``moetriage.Llama``; used by one thread at a time."""

    def __init__(
        self, layout: ModelLayout, config: StreamConfig, *, renorm: bool | None, record_routes: bool, notify: Callable[[str], None]
    ) -> None:
        self.layout = layout
        self.config = config
        self.layers: tuple[LearnedLayer, ...] = ()
        self.budget = Budget(0, "not streamed")
        self.on_step: Callable[[TokenMetrics], None] | None = None
        self.on_routes: Callable[[dict[str, Any]], None] | None = None
        self._notify = notify
        self._limit: MemoryLimit = memory_limit()
        self.weights = Weights(layout, config)
        self._phase_tokens = {Phase.PREFILL: 0, Phase.DECODE: 0}
        self._last = dict.fromkeys(_COUNTERS, 0.0)
        self._last_end: float | None = None
        self._step = 0
        self._n_ctx = 0
        self.closed = False
        drop = config.drop or DropConfig(threshold=0.0)
        self.hook = _native.EvalHook(
            str(ggml_api.library_path()),
            drop_threshold=drop.threshold,
            drop_raw=drop.raw_weight,
            drop_renorm=drop.renorm if renorm is None else renorm,
            drop_in_prefill=drop.in_prefill,
            stream=not config.mmap,
            record_routes=record_routes,
            prefetch=min(config.prefetch, layout.n_layer),  # farther is the same, and may be no C int
        )

    # Loading, in the order llama_cpp.Llama asks for it.

    def load_model(self, params: Any) -> Any:
        """Load the model without reading an expert (or mapped, as a baseline). Raises ModelFileError if llama.cpp refuses it."""
        if not self.config.mmap:
            return self.weights.load(params)
        first = str(self.layout.paths[0])
        with llama_api.explained() as reasons:
            model = llama_api.load_mapped(params, first.encode())
        if model is None:
            raise ModelFileError(first, f"llama.cpp cannot load this model ({llama_api.cause(reasons)})")
        return model

    def init_context(self, model: Any, params: Any) -> Any:
        """Make the context, learn its graph without computing it, size the cache and open the readers."""
        before = _private_bytes()
        hook = self.hook
        self._n_ctx = int(params.n_ctx)
        with llama_api.explained() as reasons:
            ctx = llama_api.init_hooked(model, params, on_eval=hook.callback, on_abort=hook.abort_callback, user_data=hook.user_data)
        if ctx is None:
            reason = f"llama.cpp could not make a context ({llama_api.cause(reasons)}); try a smaller context size (-c)"
            raise ModelFileError(str(self.layout.paths[0]), reason)
        try:
            plan = self._learn(ctx, llama_api.first_token(model))
            if self.config.mmap:
                hook.rearm(plan)
            else:
                context_bytes = max(0, _private_bytes() - before)
                self.budget = self.weights.arm(hook, plan, self.layers, limit=self._limit, context_bytes=context_bytes, notify=self._notify)
        except BaseException:
            llama_api.free_context(ctx)
            raise
        for caveat in dropping_caveats(self.config, self.top_k, self.fixed_blocks):
            self._notify(caveat)
        return ctx

    def _learn(self, ctx: Any, token: int) -> Any:
        self.hook.begin_learning()
        with llama_api.explained():  # that the evaluation was ended is no news
            llama_api.decode_once(ctx, token)
        plan = self._finish_learning()
        llama_api.clear_memory(ctx)
        return plan

    def _finish_learning(self) -> Any:
        plan: Any = self.hook.finish_learning(self.weights.blocks)
        if isinstance(plan, tuple):
            raise GraphError(*plan)
        self.layers = tuple(LearnedLayer(block, top_k, tuple(map(tuple, stages)), ok) for block, top_k, stages, ok in plan.layers)
        return plan

    def layer_expert_bytes(self, layer: LearnedLayer) -> int:
        """Return the bytes of one expert of a learned layer."""
        return self.weights.expert_bytes(layer)

    @property
    def working_set_bytes(self) -> int:
        """T: the expert bytes one token routes to."""
        return self.weights.working_set_bytes(self.layers)

    @property
    def top_k(self) -> int:
        """The routing's width in the graph (the widest layer's, should they differ)."""
        return max((layer.top_k for layer in self.layers), default=0)

    @property
    def fixed_blocks(self) -> tuple[int, ...]:
        """The layers whose routing can be read but not edited."""
        return tuple(layer.block for layer in self.layers if not layer.droppable)

    def close(self) -> None:
        """Give memory, lanes and files back once llama.cpp's context and model are freed. What was counted can still be asked for."""
        if self.closed:
            return
        self.closed = True
        self.hook.close()
        self.weights.close()

    # Evaluating.

    @property
    def evaluated_at(self) -> float | None:
        """When the turn's last evaluation ended, on the clock of ``time.perf_counter``; None before the first."""
        return self._last_end

    def begin_turn(self) -> None:
        """Start counting steps anew; the cache stays as it is. What an ended evaluation or read-ahead counted since belongs to no step."""
        self._step = 0
        self._last_end = None
        self._last = self._counters()

    def decode(self, ctx: Any, batch: Any, phase: Phase) -> None:
        """Evaluate one llama_batch; where it raises, nothing of the batch is kept.

        Raises ReadError, GraphError, OutOfMemoryError, or what a signal handler raised.
        """
        if self.closed:
            raise UsageError(f"{self.layout.paths[0]}: this session was closed; load the model again")
        n_tokens = int(batch.n_tokens)
        began = time.perf_counter()
        try:
            status, stop, reasons = self._evaluate(ctx, batch, phase)
            if stop:
                self._raise(stop)
            if status != 0:
                self._refuse(status, n_tokens, reasons)
        except BaseException:
            # Also after Ctrl-C, which Python raises behind an evaluation that was too short to be stopped in the middle.
            self.hook.end_batch()
            self._discard()
            raise
        self._account(phase, n_tokens, began, time.perf_counter())

    def _evaluate(self, ctx: Any, batch: Any, phase: Phase) -> tuple[int, str, list[str]]:
        """Decode, learning the graph again if it left the plan. Returns llama.cpp's status, why the hook stopped it, and messages."""
        status, stop = 0, "moved"
        with llama_api.explained() as reasons:
            for _ in range(MAX_RELEARN):
                self.hook.begin_batch(int(phase), self._step, self._phase_tokens[phase])
                status = llama_api.decode_batch(ctx, batch)
                stop = self.hook.end_batch()
                if stop != "moved" or not llama_api.forget_batch(ctx, batch):
                    break
                self._discard()
                self._learn_again(ctx, batch)
        return status, stop, reasons

    def _learn_again(self, ctx: Any, batch: Any) -> None:
        known = self.layers
        self.hook.begin_learning()
        llama_api.decode_batch(ctx, batch)
        plan = self._finish_learning()
        if [(layer.block, sorted(layer.tensors)) for layer in self.layers] != [(layer.block, sorted(layer.tensors)) for layer in known]:
            self.layers = known
            raise GraphError("MUL_MAT_ID", "this graph runs other experts than the one that the session was made for")
        self.hook.rearm(plan)

    def _discard(self) -> None:
        """Forget what a stopped evaluation recorded and counted: it belongs to no step."""
        self.hook.take_routes()
        self._last = self._counters()

    def _counters(self) -> dict[str, float]:
        stats = self.hook.stats()
        return {name: stats.get(name, 0.0) for name in self._last}

    def _refuse(self, status: int, n_tokens: int, reasons: list[str]) -> None:
        if status == NO_ROOM:
            raise UsageError(
                f"the context of {self._n_ctx} tokens has no room for {n_tokens} more: shorten the text, or give a larger context (-c)"
            )
        raise ModelFileError(
            str(self.layout.paths[0]), f"llama.cpp could not evaluate the batch: {llama_api.cause(reasons)} (status {status})"
        )

    def _raise(self, stop: str) -> None:
        if stop == "read_failed":
            path, offset, nbytes, layer, expert, reason = self.hook.read_failure()
            raise ReadError(path=path, offset=offset, nbytes=nbytes, layer=layer, expert=expert, reason=reason)
        if stop == "interrupted":
            _native.raise_pending_signal()
        if stop == "out_of_memory":
            raise OutOfMemoryError
        raise GraphError(self.hook.fault_node, self.hook.fault_reason)

    def _account(self, phase: Phase, n_tokens: int, began: float, ended: float) -> None:
        stats = self.hook.stats()
        diff = {name: stats.get(name, 0.0) - self._last[name] for name in self._last}
        self._last = {name: stats.get(name, 0.0) for name in self._last}
        wall = ended - (self._last_end if self._last_end is not None else began)
        wait = diff["wait_nanos"] * 1e-9
        cache = diff["hook_nanos"] * 1e-9 - wait
        metrics = TokenMetrics(
            step=self._step,
            phase=phase,
            n_tokens=n_tokens,
            wall_seconds=wall,
            compute_seconds=(ended - began) - wait - cache,
            read_wait_seconds=wait,
            cache_seconds=cache,
            other_seconds=wall - (ended - began),
            hits=int(diff["hits"]),
            misses=int(diff["misses"]),
            dropped=int(diff["dropped"]),
            routed=self._routed(phase, n_tokens, diff),
            evictions=int(diff["evictions"]),
            reads=int(diff["reads"]),
            read_bytes=int(diff["read_bytes"]),
            resident_bytes=int(stats.get("resident_bytes", 0)),
        )
        self._step += n_tokens
        self._phase_tokens[phase] += n_tokens
        self._last_end = ended
        if self.on_routes is not None:
            self.on_routes(self.hook.take_routes())
        if self.on_step is not None:
            self.on_step(metrics)

    def _routed(self, phase: Phase, n_tokens: int, diff: dict[str, float]) -> int:
        if self.config.mmap or phase is Phase.PREFILL:
            return int(diff["routed"])
        return n_tokens * sum(layer.top_k for layer in self.layers)


def _private_bytes() -> int:
    """Return the process's private data in bytes, touched or not: how KV cache and compute buffers are measured without their formulas."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    return 0
