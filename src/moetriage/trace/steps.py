"""Turn a trace into dense arrays that the engine indexes by (token, layer, slot).

In: a ``Trace`` and the shape of the model that will follow it. Out: ``ForcedRouting`` (ids and weights that replace the router's) or
``DroppedSet`` (which routings a run dropped), prefill and decode apart. It knows no cache and no file.

Legend: T tokens of one phase in the order in which they were evaluated, over all turns; L MoE layers, L index i being the i-th MoE
layer of the model; K slots. All arrays are C-contiguous. Where a token has no row for a layer (the last layer of a prefill holds only
the tokens whose output was asked for) ``present_TL`` is false, the expert is -1, the weight 0 and nothing is dropped.
"""

# ruff: noqa: N806, N815 (arrays are named after their axes, see the legend)

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import polars as pl

from moetriage.errors import TraceError
from moetriage.trace.reader import Trace
from moetriage.types import Phase


@dataclass(frozen=True, kw_only=True)
class PhaseSteps:
    """The routings of one phase.

    expert_TLK: int32 [T, L, K], the router's choice. weight_TLK: float32 [T, L, K], its final weights. dropped_TLK: bool [T, L, K].
    present_TL: bool [T, L].
    """

    expert_TLK: npt.NDArray[np.int32]
    weight_TLK: npt.NDArray[np.float32]
    dropped_TLK: npt.NDArray[np.bool_]
    present_TL: npt.NDArray[np.bool_]

    @property
    def n_tokens(self) -> int:
        return len(self.present_TL)


@dataclass(frozen=True, kw_only=True)
class ForcedRouting:
    """Ids and weights to force. ``layers`` are the trace's layer numbers behind L. A phase may have no token, but not both."""

    top_k: int
    n_expert: int
    layers: tuple[int, ...]
    prefill: PhaseSteps
    decode: PhaseSteps


@dataclass(frozen=True, kw_only=True)
class DroppedSet:
    """Which routings to drop again. The experts are there too, so that a run that routes differently can be told apart."""

    top_k: int
    n_expert: int
    layers: tuple[int, ...]
    prefill: PhaseSteps
    decode: PhaseSteps


def forced_routing(trace: Trace, *, n_expert: int, n_layers: int, path: str) -> ForcedRouting:
    """Return the routing of ``trace`` for a model of ``n_layers`` MoE layers with ``n_expert`` experts each; ``path`` names that model.

    The first ``n_layers`` MoE layers of the trace are taken, further ones left out. The width becomes the trace's.
    Raises TraceError when the trace has another number of experts or fewer MoE layers.
    """
    meta = trace.meta
    if meta.n_expert != n_expert:
        raise TraceError(trace.path, f"has {meta.n_expert} experts per layer and cannot drive {path}, which has {n_expert}")
    if len(meta.moe_layers) < n_layers:
        raise TraceError(trace.path, f"has {len(meta.moe_layers)} layers with experts and cannot drive {path}, which has {n_layers}")
    layers = meta.moe_layers[:n_layers]
    prefill, decode = (_phase_steps(trace, layers, phase) for phase in Phase)
    return ForcedRouting(top_k=meta.n_expert_used, n_expert=n_expert, layers=layers, prefill=prefill, decode=decode)


def dropped_set(trace: Trace, *, n_expert: int, n_layers: int, top_k: int) -> DroppedSet:
    """Return what the run behind ``trace`` dropped, for a run of the same model at the same width.

    Raises TraceError when the trace has no ``dropped`` column, or another number of experts, MoE layers or slots.
    """
    meta = trace.meta
    if not trace.has_dropped:
        raise TraceError(trace.path, "has no 'dropped' column, so it does not say what was dropped; record it with --route-trace")
    for what, ours, model in (
        ("experts per layer", meta.n_expert, n_expert),
        ("layers with experts", len(meta.moe_layers), n_layers),
        ("experts per token (top-k)", meta.n_expert_used, top_k),
    ):
        if ours != model:
            raise TraceError(trace.path, f"has {ours} {what}, the model {model}: drops can be replayed only on the model that made them")
    prefill, decode = (_phase_steps(trace, meta.moe_layers, phase) for phase in Phase)
    return DroppedSet(top_k=top_k, n_expert=n_expert, layers=meta.moe_layers, prefill=prefill, decode=decode)


def _phase_steps(trace: Trace, layers: tuple[int, ...], phase: Phase) -> PhaseSteps:
    rows = trace.frame.filter((pl.col("phase") == int(phase)) & pl.col("layer").is_in(layers))
    # Turns and steps only count up (trace.check), so the order of these keys is the order of evaluation.
    token = rows["turn"].to_numpy().astype(np.int64) << 32 | rows["step"].to_numpy()
    tokens, t = np.unique(token, return_inverse=True)
    index_of_layer = np.zeros(trace.meta.n_layer, np.int64)
    index_of_layer[list(layers)] = np.arange(len(layers))
    i, k = index_of_layer[rows["layer"].to_numpy()], rows["slot"].to_numpy()
    shape = (len(tokens), len(layers), trace.meta.n_expert_used)
    expert_TLK, weight_TLK = np.full(shape, -1, np.int32), np.zeros(shape, np.float32)
    dropped_TLK, present_TL = np.zeros(shape, np.bool_), np.zeros(shape[:2], np.bool_)
    expert_TLK[t, i, k] = rows["expert"].to_numpy()
    weight_TLK[t, i, k] = rows["weight"].to_numpy()
    dropped_TLK[t, i, k] = rows["dropped"].to_numpy() == 1
    present_TL[t, i] = True
    return PhaseSteps(expert_TLK=expert_TLK, weight_TLK=weight_TLK, dropped_TLK=dropped_TLK, present_TL=present_TL)
