"""Where a session's weights live: experts in reserved memory that is filled on demand, everything else loaded or mapped.

In: a ModelLayout and a StreamConfig. Out: a llama.cpp model that was loaded without reading an expert, and a hook armed to read them.
Knows files, tensors and budgets; knows nothing of evaluations. What it leans on in llama.cpp is listed in docs/seam.md.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from moetriage import _native
from moetriage.config import StreamConfig
from moetriage.errors import ModelFileError
from moetriage.gguf import ggml_api
from moetriage.gguf.layout import ModelLayout, TensorSpan
from moetriage.gguf.virtual import virtual_file
from moetriage.stream import llama_api
from moetriage.stream.budget import Budget, resolve_budget
from moetriage.stream.memory_limit import MemoryLimit


@dataclass(frozen=True)
class LearnedLayer:
    """What the graph told about one MoE layer: its number in the model, the routing's width, its tensors by the stage that is waited for
    together, whether its router weights can be edited."""

    block: int
    top_k: int
    stages: tuple[tuple[str, ...], ...]
    droppable: bool

    @property
    def tensors(self) -> tuple[str, ...]:
        """The layer's expert tensors, in the order their products run."""
        return tuple(name for stage in self.stages for name in stage)


class Weights:
    """The weights of one streamed model. ``source`` is the native object that owns their memory; it must outlive the model."""

    def __init__(self, layout: ModelLayout, config: StreamConfig) -> None:
        self.layout = layout
        self.config = config
        self.source: Any = None
        self.blocks = {e.span.name: e.layer for e in layout.experts}
        self._spans = {e.span.name: e.span for e in layout.experts}
        self._overrides: Any = None

    def load(self, params: Any) -> Any:
        """Load the model without reading an expert. Raises ModelFileError if llama.cpp refuses it or a file cannot be read."""
        image = virtual_file(self.layout)
        skip_dense = self.config.dense_weights == "mmap"
        segments = [(s.virtual_offset, s.nbytes, s.shard, s.offset, s.streamed or skip_dense) for s in image.segments]
        shards = [str(path) for path in self.layout.paths]
        with llama_api.explained() as reasons:
            try:
                self.source = _native.ModelSource.open(str(ggml_api.library_path()), image.header, image.size, segments, shards)
                self._overrides = llama_api.buffer_overrides(self._placements())
                model = llama_api.load_streamed(params, self.source.file_pointer, self._overrides)
                if model is None:
                    raise ModelFileError(
                        shards[0], self.source.read_error or f"llama.cpp cannot load this model ({llama_api.cause(reasons)})"
                    )
                self.source.bind_experts([_place(span) for span in self._spans.values()])
                if skip_dense:
                    self.source.map_dense([_place(span) for span in self.layout.dense])
            except RuntimeError as error:
                raise ModelFileError(shards[0], str(error)) from error
        if self.config.odirect and not skip_dense:
            self._leave_page_cache()
        return model

    def _leave_page_cache(self) -> None:
        """Give back what loading read through the page cache: it is in memory of our own now, and experts are read past the cache.

        Measured on a 17 GB file: 1.4 GB, with what the kernel read ahead, that a memory cgroup would count as ours.
        """
        for path in self.layout.paths:
            with path.open("rb", buffering=0) as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    def _placements(self) -> list[tuple[str, int]]:
        """Send expert tensors to our reserved memory and everything else to memory of ours too, where llama.cpp repacks nothing."""
        blocks: dict[str, list[int]] = {}
        for name, block in self.blocks.items():
            blocks.setdefault(name.split(".", 2)[2], []).append(block)
        pairs = [
            (rf"^blk\.(?:{'|'.join(map(str, sorted(numbers)))})\.{re.escape(rest)}$", self.source.expert_buffer_type)
            for rest, numbers in blocks.items()
        ]
        return [*pairs, (".", self.source.dense_buffer_type)]

    def arm(
        self,
        hook: Any,
        plan: Any,
        layers: Sequence[LearnedLayer],
        *,
        limit: MemoryLimit,
        context_bytes: int,
        notify: Callable[[str], None],
    ) -> Budget:
        """Size the cache, open the readers and hand both to the hook.

        limit: what memory there was before loading; context_bytes: KV cache and compute buffers. Raises BudgetError, ModelFileError.
        """
        used = [self._spans[name] for layer in layers for name in layer.tensors]
        pinned = [self._spans[name] for name in plan.pinned]
        budget = resolve_budget(
            self.config,
            layout_expert_total=sum(span.nbytes for span in used),
            working_set_bytes=self.working_set_bytes(layers),
            largest_layer_bytes=max(self.expert_bytes(layer) * self.layout.n_expert for layer in layers),
            dense_bytes=sum(span.nbytes for span in (*self.layout.dense, *pinned)),
            kv_bytes=context_bytes,
            compute_bytes=0,
            limit=limit,
        )
        for note in budget.notes:
            notify(note)
        try:
            hook.arm(
                plan,
                self.source,
                [_place(span) for span in used],
                [_place(span) for span in pinned],
                n_expert=self.layout.n_expert,
                lanes=self.config.io_threads,
                direct=self.config.odirect,
                in_place=self.config.in_place,
                staged=self.config.staged,
            )
        except RuntimeError as error:
            raise ModelFileError(str(self.layout.paths[0]), str(error)) from error
        hook.set_budget(budget.bytes)
        return budget

    def close(self) -> None:
        """Give memory and files back; llama.cpp's model must be freed and no lane be running."""
        if self.source is not None:
            self.source.close()

    def expert_bytes(self, layer: LearnedLayer) -> int:
        """Return the bytes of one expert of a layer, all its tensors together."""
        return sum(self._spans[name].nbytes // self.layout.n_expert for name in layer.tensors)

    def working_set_bytes(self, layers: Sequence[LearnedLayer]) -> int:
        """Return T: the expert bytes one token routes to, with the width the graph really has."""
        return sum(layer.top_k * self.expert_bytes(layer) for layer in layers)


def _place(span: TensorSpan) -> tuple[str, int, int, int]:
    return span.name, span.shard, span.offset, span.nbytes
