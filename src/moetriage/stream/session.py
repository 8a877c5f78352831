"""One model being streamed: from the file's layout to a llama.cpp context whose graph is learned and whose experts are read on demand.

In: a StreamConfig and a ModelLayout. Out: a model and a context for llama_cpp.Llama, then one ``decode`` per batch with its measurements.
Knows how a session is put together; the hot path is native, and text is llama_cpp's business.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moetriage import _native
from moetriage.config import DROP_EVIDENCE_TOP_K, DROP_LOW_TOP_K_WARN, DropConfig, StreamConfig
from moetriage.errors import GraphError, ModelFileError, ReadError, UsageError
from moetriage.gguf import ggml_api
from moetriage.gguf.layout import ModelLayout, TensorSpan
from moetriage.gguf.virtual import virtual_file
from moetriage.stream import llama_api
from moetriage.stream.budget import Budget, resolve_budget
from moetriage.stream.memory_limit import MemoryLimit, memory_limit
from moetriage.types import Phase, TokenMetrics

#: A graph that keeps changing under the plan is not a graph we can stream.
MAX_RELEARN = 3
#: llama_decode's answer when the KV cache has no place left for the batch.
NO_ROOM = 1


@dataclass(frozen=True)
class LearnedLayer:
    """What the graph told about one MoE layer: its number in the model, the routing's width, its tensors by the stage that is waited for
    together, whether its weights can be edited."""

    block: int
    top_k: int
    stages: tuple[tuple[str, ...], ...]
    droppable: bool

    @property
    def tensors(self) -> tuple[str, ...]:
        """The layer's expert tensors, in the order their products run."""
        return tuple(name for stage in self.stages for name in stage)


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
        self.read_seconds_at_load = 0.0
        self._notify = notify
        self._limit: MemoryLimit = memory_limit()
        self._overrides: Any = None
        self._source: Any = None
        self._spans = {e.span.name: e.span for e in layout.experts}
        self._blocks = {e.span.name: e.layer for e in layout.experts}
        self._phase_tokens = {Phase.PREFILL: 0, Phase.DECODE: 0}
        self._last = {
            name: 0.0 for name in ("hits", "misses", "evictions", "reads", "read_bytes", "routed", "dropped", "hook_nanos", "wait_nanos")
        }
        self._last_end: float | None = None
        self._step = 0
        self._n_ctx = 0
        drop = config.drop or DropConfig(threshold=0.0)
        self.hook = _native.EvalHook(
            str(ggml_api.library_path()),
            drop_threshold=drop.threshold,
            drop_raw=drop.raw_weight,
            drop_renorm=drop.renorm if renorm is None else renorm,
            drop_in_prefill=drop.in_prefill,
            stream=not config.mmap,
            record_routes=record_routes,
            prefetch=config.prefetch,
        )

    # Loading, in the order llama_cpp.Llama asks for it.

    def load_model(self, params: Any) -> Any:
        """Load the model without reading an expert (or mapped, as a baseline). Raises ModelFileError if llama.cpp refuses it."""
        first = str(self.layout.paths[0])
        with llama_api.explained() as reasons:
            model = llama_api.load_mapped(params, first.encode()) if self.config.mmap else self._load_streamed(params)
        if model is None:
            read_error = self._source.read_error if self._source is not None else ""
            raise ModelFileError(first, read_error or f"llama.cpp cannot load this model ({_cause(reasons)})")
        return model

    def _load_streamed(self, params: Any) -> Any:
        image = virtual_file(self.layout)
        skip_dense = self.config.dense_weights == "mmap"
        segments = [(s.virtual_offset, s.nbytes, s.shard, s.offset, s.streamed or skip_dense) for s in image.segments]
        shards = [str(path) for path in self.layout.paths]
        try:
            self._source = _native.ModelSource.open(str(ggml_api.library_path()), image.header, image.size, segments, shards)
            self._overrides = llama_api.buffer_overrides(self._placements())
            model = llama_api.load_streamed(params, self._source.file_pointer, self._overrides)
            if model is not None:
                self._source.bind_experts([_place(span) for span in self._spans.values()])
            if model is not None and skip_dense:
                self._source.map_dense([_place(span) for span in self.layout.dense])
        except RuntimeError as error:
            raise ModelFileError(shards[0], str(error)) from error
        return model

    def init_context(self, model: Any, params: Any) -> Any:
        """Make the context, learn its graph without computing it, size the cache and open the readers."""
        before = _private_bytes()
        hook = self.hook
        self._n_ctx = int(params.n_ctx)
        with llama_api.explained() as reasons:
            ctx = llama_api.init_hooked(model, params, on_eval=hook.callback, on_abort=hook.abort_callback, user_data=hook.user_data)
        if ctx is None:
            reason = f"llama.cpp could not make a context ({_cause(reasons)}); try a smaller context size (-c)"
            raise ModelFileError(str(self.layout.paths[0]), reason)
        try:
            plan = self._learn(ctx, llama_api.first_token(model))
            if not self.config.mmap:
                self._arm(plan, context_bytes=max(0, _private_bytes() - before))
            else:
                hook.rearm(plan)
        except BaseException:
            llama_api.free_context(ctx)
            raise
        self._warn_narrow_routing()
        return ctx

    def _placements(self) -> list[tuple[str, int]]:
        """Send expert tensors to our reserved memory and everything else to memory of ours too, where llama.cpp repacks nothing."""
        blocks: dict[str, list[int]] = {}
        for name, block in self._blocks.items():
            blocks.setdefault(name.split(".", 2)[2], []).append(block)
        pairs = [
            (rf"^blk\.(?:{'|'.join(map(str, sorted(numbers)))})\.{re.escape(rest)}$", self._source.expert_buffer_type)
            for rest, numbers in blocks.items()
        ]
        return [*pairs, (".", self._source.dense_buffer_type)]

    def _learn(self, ctx: Any, token: int) -> Any:
        self.hook.begin_learning()
        with llama_api.explained():  # that the evaluation was ended is no news
            llama_api.decode_once(ctx, token)
        plan = self._finish_learning()
        llama_api.clear_memory(ctx)
        return plan

    def _finish_learning(self) -> Any:
        plan: Any = self.hook.finish_learning(self._blocks)
        if isinstance(plan, tuple):
            raise GraphError(*plan)
        self.layers = tuple(LearnedLayer(block, top_k, tuple(map(tuple, stages)), ok) for block, top_k, stages, ok in plan.layers)
        return plan

    def _arm(self, plan: Any, *, context_bytes: int) -> None:
        config = self.config
        used = [name for layer in self.layers for name in layer.tensors]
        pinned = list(plan.pinned)
        self.budget = resolve_budget(
            config,
            layout_expert_total=sum(self._spans[name].nbytes for name in used),
            working_set_bytes=self.working_set_bytes,
            largest_layer_bytes=max(self.layer_expert_bytes(layer) * self.layout.n_expert for layer in self.layers),
            dense_bytes=sum(span.nbytes for span in self.layout.dense) + sum(self._spans[name].nbytes for name in pinned),
            kv_bytes=context_bytes,
            compute_bytes=0,
            limit=self._limit,
        )
        for note in self.budget.notes:
            self._notify(note)
        try:
            self.hook.arm(
                plan,
                self._source,
                [_place(self._spans[name]) for name in used],
                [_place(self._spans[name]) for name in pinned],
                n_expert=self.layout.n_expert,
                lanes=config.io_threads,
                direct=config.odirect,
                in_place=config.in_place,
                staged=config.staged,
            )
        except RuntimeError as error:
            raise ModelFileError(str(self.layout.paths[0]), str(error)) from error
        self.hook.set_budget(self.budget.bytes)

    def layer_expert_bytes(self, layer: LearnedLayer) -> int:
        """Return the bytes of one expert of a learned layer."""
        return sum(self._spans[name].nbytes // self.layout.n_expert for name in layer.tensors)

    @property
    def working_set_bytes(self) -> int:
        """T: the expert bytes one token routes to, with the width the graph really has."""
        return sum(layer.top_k * self.layer_expert_bytes(layer) for layer in self.layers)

    @property
    def top_k(self) -> int:
        """The routing's width in the graph (the widest layer's, should they differ)."""
        return max((layer.top_k for layer in self.layers), default=0)

    def _warn_narrow_routing(self) -> None:
        drop, top_k = self.config.drop, self.top_k
        if drop is None:
            return
        if self.config.prefetch > 0:
            self._notify(
                f"--prefetch {self.config.prefetch} with --drop-cold-experts: what was read ahead is resident and no longer dropped, "
                "so the prefetch depth changes the output"
            )
        if top_k <= DROP_LOW_TOP_K_WARN:
            self._notify(
                f"--drop-cold-experts {drop.threshold} with top-k {top_k}: the threshold is {100 * drop.threshold / top_k:.1f} % of the routing "
                f"here, against {100 / DROP_EVIDENCE_TOP_K:.1f} % at the top-k {DROP_EVIDENCE_TOP_K} this was measured on; expect it to discard "
                "much more, and check the output on your own task"
            )

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
        """Evaluate one llama_batch. Raises ReadError, GraphError, or what a signal handler raised; nothing of the batch is kept then."""
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
        raise ModelFileError(str(self.layout.paths[0]), f"llama.cpp could not evaluate the batch: {_cause(reasons)} (status {status})")

    def _raise(self, stop: str) -> None:
        if stop == "read_failed":
            path, offset, nbytes, layer, expert, reason = self.hook.read_failure()
            raise ReadError(path=path, offset=offset, nbytes=nbytes, layer=layer, expert=expert, reason=reason)
        if stop == "interrupted":
            _native.raise_pending_signal()
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


def _place(span: TensorSpan) -> tuple[str, int, int, int]:
    return span.name, span.shard, span.offset, span.nbytes


def _cause(reasons: list[str]) -> str:
    """Return the first message, which names the fault; later ones only pass it on."""
    return reasons[0].removesuffix(".") if reasons else "it gave no reason"


def _private_bytes() -> int:
    """Return the process's private data in bytes, touched or not: how KV cache and compute buffers are measured without their formulas."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) * 1024
    return 0
