"""``moetriage.Llama``: llama_cpp.Llama over a model larger than memory.

In: a model path, a StreamConfig and llama_cpp's own arguments. Out: everything llama_cpp.Llama offers (completions, chat, grammars, logits
processors, streaming). Adds the session and tells it which evaluations are prefill and which are decode; writes no text itself.
"""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import llama_cpp
from jinja2 import TemplateError

from moetriage.config import StreamConfig
from moetriage.errors import ModelFileError, UsageError
from moetriage.gguf.layout import read_layout
from moetriage.stream import llama_api
from moetriage.stream.routing import load_routing
from moetriage.stream.session import Session
from moetriage.types import Phase

LogitsProcessor = Callable[[Any, Any], Any]
#: Arguments of llama_cpp.Llama that streaming decides itself.
_OURS = {
    "use_mmap": "use StreamConfig(mmap=True) for a mapped model, or StreamConfig(dense_weights=...)",
    "use_mlock": "the cache is the memory that is kept; size it with StreamConfig(cache_mb=...)",
    "embedding": "embeddings are not supported",
    "vocab_only": "use llama_cpp.Llama to load a vocabulary",
}


class Llama(llama_cpp.Llama):
    """Run a Mixture-of-Experts model, reading from disk only the experts that each token routes to.

    model_path: a GGUF file, or the first shard of a split one.
    stream: how experts are streamed; the default is lossless with an automatically sized cache.
    record_routes: keep routing records for ``session.on_routes`` (costs a few synchronisation points a layer).
    notify: called with one line for each thing the user should know; default: ``warnings.warn``.
    kwargs: llama_cpp.Llama's arguments. ``n_threads`` defaults to the processors this process may use; ``verbose`` to False.

    Raises UsageError and its kinds for settings or files that cannot work, GraphError for a graph that cannot be streamed. A failed read
    raises ReadError from the generation; the object stays usable.
    """

    def __init__(
        self,
        model_path: str | os.PathLike[str],
        *,
        stream: StreamConfig | None = None,
        record_routes: bool = False,
        notify: Callable[[str], None] | None = None,
        **kwargs: Any,
    ) -> None:
        config = stream or StreamConfig()
        config.validate()
        _refuse_ours(kwargs)
        layout = read_layout(Path(model_path))
        threads = len(os.sched_getaffinity(0))
        kwargs.setdefault("n_threads", threads)
        kwargs.setdefault("n_threads_batch", threads)
        kwargs.setdefault("verbose", False)
        overrides = dict(kwargs.pop("kv_overrides", None) or {})
        routing = load_routing(config, layout)
        if routing.top_k is not None:
            overrides[f"{layout.arch}.expert_used_count"] = routing.top_k
        self.session = Session(layout, config, renorm=routing.renorm, record_routes=record_routes, notify=notify or _warn)
        self.phase = Phase.PREFILL
        self.sampled: list[int] = []
        self._raised: BaseException | None = None
        try:
            with llama_api.loading_through(self.session.load_model, self.session.init_context):
                super().__init__(str(model_path), kv_overrides=overrides or None, **kwargs)
        except (UnicodeDecodeError, TemplateError) as error:  # llama_cpp reads all of it, used or not
            raise ModelFileError(str(model_path), f"llama_cpp cannot read its metadata or chat template: {error}") from error
        routing.apply(self.session)
        # llama_cpp evaluates every batch through this one method of its context. Weakly bound: a cycle would keep gigabytes of experts
        # until the garbage collector happens to run.
        owner = weakref.ref(self)

        def decode(batch: Any) -> None:
            llama = owner()
            assert llama is not None, "its own method calls this"
            llama._decode(batch)

        self._ctx.decode = decode  # type: ignore[method-assign]

    def n_ctx(self) -> int:
        """Return the context that was asked for. llama.cpp rounds up what it makes, llama_cpp's own arrays end where it was asked to."""
        return min(int(super().n_ctx()), int(self.context_params.n_ctx))

    def _decode(self, batch: Any) -> None:
        try:
            self.session.decode(self._ctx.ctx, batch.batch, self.phase)
        except BaseException:
            self._forget_failed_batch()
            raise

    def _forget_failed_batch(self) -> None:
        self._requires_eval = True  # the logits of the batch before are gone: the same prompt again must not be sampled from them
        # Tokens of a stopped batch may be in the KV cache; a recurrent state cannot be cut back and starts over.
        if not self._ctx.kv_cache_seq_rm(-1, self.n_tokens, -1):
            llama_api.clear_memory(self._ctx.ctx)
            self.n_tokens = 0

    def generate(self, tokens: Sequence[int], *args: Any, **kwargs: Any) -> Generator[int, Sequence[int] | None, None]:
        """Generate tokens as llama_cpp.Llama does; the evaluations up to the first sampled token are the prefill."""
        self.phase = Phase.PREFILL
        self.sampled = []
        self.session.begin_turn()
        yield from super().generate(tokens, *args, **kwargs)

    def _init_sampler(self, *args: Any, **kwargs: Any) -> Any:
        """Make a sampler whose logits processors may raise. llama_cpp runs them inside a C callback, which only prints an exception."""
        self._raised = None
        if kwargs.get("logits_processor") is not None:
            kwargs["logits_processor"] = [self._guarded(processor) for processor in kwargs["logits_processor"]]
        return super()._init_sampler(*args, **kwargs)

    def _guarded(self, processor: LogitsProcessor) -> LogitsProcessor:
        def guarded(tokens: Any, scores: Any) -> Any:
            if self._raised is None:
                try:
                    return processor(tokens, scores)
                except BaseException as error:
                    self._raised = error
            return scores

        return guarded

    def sample(self, *args: Any, **kwargs: Any) -> int:
        """Sample a token as llama_cpp.Llama does; what is evaluated next is decoding. Raises what a logits processor raised."""
        token = int(super().sample(*args, **kwargs))
        if self._raised is not None:
            raise self._raised
        self.phase = Phase.DECODE
        self.sampled.append(token)
        return token

    def close(self) -> None:
        """Free the model, the expert cache and the files; a second call does nothing, nor does one on an object that was refused."""
        if hasattr(self, "_stack"):
            super().close()
            self.session.close()

    def reset(self) -> None:
        """Forget the sequence; the expert cache stays warm."""
        super().reset()  # type: ignore[no-untyped-call]
        self.phase = Phase.PREFILL


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=3)


def _refuse_ours(kwargs: dict[str, Any]) -> None:
    for name, advice in _OURS.items():
        if kwargs.get(name):
            raise UsageError(f"{name}={kwargs[name]!r} has no place here: {advice}")
    if kwargs.get("n_gpu_layers"):
        raise UsageError(f"n_gpu_layers={kwargs['n_gpu_layers']}: experts are streamed to the CPU's memory; leave it out")
