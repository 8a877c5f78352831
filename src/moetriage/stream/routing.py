"""Recorded routing on its way into a session: what is forced (``--force-routing``) and what is dropped again (``--replay-drops``).

In: the traces a StreamConfig names. Out: arrays in the native hook, once the graph has told how many MoE layers there are.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from moetriage.config import StreamConfig
from moetriage.errors import ModelFileError, UsageError
from moetriage.gguf.graph_limit import widest_top_k
from moetriage.gguf.layout import ModelLayout

if TYPE_CHECKING:
    from moetriage.stream.session import Session
    from moetriage.trace.reader import Trace
    from moetriage.trace.steps import PhaseSteps

#: Key of a trace's header under which a run keeps how it renormalised; a replayed drop must do the same.
RENORM_KEY = "drop_renorm"
#: No model uses more experts per token. The limit of the graph is an estimate, on which none that may work is refused.
_WIDEST_KNOWN = 32


@dataclass(frozen=True)
class RecordedRouting:
    """Traces that were read before the model is loaded; ``top_k`` is the routing's width to load it with, if it is not its own."""

    top_k: int | None
    forced: Trace | None = None
    replayed: Trace | None = None

    @property
    def renorm(self) -> bool | None:
        """How the run behind the replayed trace renormalised; None without one."""
        return None if self.replayed is None else bool(json.loads(self.replayed.meta.extra.get(RENORM_KEY, "true")))

    def apply(self, session: Session) -> None:
        """Hand the arrays to the session's hook. Raises TraceError for a trace of another model."""
        if session.fixed_blocks and (self.forced or self.replayed):
            blocks = ", ".join(map(str, session.fixed_blocks))
            raise UsageError(
                f"--force-routing, --replay-drops: the routing of this model's layers {blocks} cannot be edited; leave them out"
            )
        shape = {"n_expert": session.layout.n_expert, "n_layers": len(session.layers)}
        if self.forced is not None:
            from moetriage.trace.steps import forced_routing

            forced = forced_routing(self.forced, path=str(session.layout.paths[0]), **shape)
            session.hook.force_routing(len(session.layers), forced.top_k, *_forced(forced.prefill), *_forced(forced.decode))
        if self.replayed is not None:
            from moetriage.trace.steps import dropped_set

            dropped = dropped_set(self.replayed, top_k=session.top_k, **shape)
            session.hook.replay_drops(
                len(session.layers), dropped.top_k, _flags(dropped.prefill.dropped_TLK), _flags(dropped.decode.dropped_TLK)
            )


def load_routing(config: StreamConfig, layout: ModelLayout) -> RecordedRouting:
    """Read the traces that ``config`` names. Raises TraceError for a bad trace, UsageError for a width the model cannot have (beyond
    what llama.cpp can hold it would end the process)."""
    forced = _read(config.force_routing)
    top_k = config.n_expert_used if forced is None else forced.meta.n_expert_used
    flag = f"--n-expert-used {top_k}" if forced is None else f"--force-routing {config.force_routing} (top-k {top_k})"
    if top_k is not None and top_k > layout.n_expert:
        raise UsageError(f"{flag}: the model has {layout.n_expert} experts per layer; use 1 to {layout.n_expert}")
    widest = widest_top_k(layout)
    if top_k is not None and top_k > max(widest, layout.top_k):
        raise UsageError(f"{flag}: llama.cpp's graph of this model has room for {max(widest, layout.top_k)} experts per token; use no more")
    if top_k is None and layout.top_k > max(widest, _WIDEST_KNOWN):
        raise ModelFileError(str(layout.paths[0]), f"uses {layout.top_k} experts per token and llama.cpp's graph has room for {widest}")
    return RecordedRouting(top_k=top_k, forced=forced, replayed=_read(config.replay_drops))


def _read(path: Path | None) -> Trace | None:
    if path is None:
        return None
    from moetriage.trace.reader import read_trace

    return read_trace(path)


def _forced(steps: PhaseSteps) -> tuple[Any, Any, Any]:
    return steps.expert_TLK, steps.weight_TLK, _flags(steps.present_TL)


def _flags(array: npt.NDArray[np.bool_]) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(array, dtype=np.uint8)
