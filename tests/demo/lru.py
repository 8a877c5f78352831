"""The table's expectation, from the trace alone: an LRU cache of experts of one size, and the drop rule, in the plainest words."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from moetriage.trace.io import Trace
from moetriage.trace.steps import PhaseSteps, forced_routing


@dataclass
class Expected:
    """Counts of one phase; in prefill of distinct experts a layer, in decode of routings."""

    hits: int = 0
    misses: int = 0
    dropped: int = 0


def simulate(trace: Trace, n_layer: int, capacity: int, threshold: float | None) -> tuple[Expected, Expected]:
    """Return what prefill and decode of the whole trace count with room for ``capacity`` experts."""
    forced = forced_routing(trace, n_expert=trace.meta.n_expert, n_layers=n_layer, path="model")
    cache: OrderedDict[tuple[int, int], None] = OrderedDict()
    prefill, decode = Expected(), Expected()
    for layer in range(n_layer):
        present = forced.prefill.expert_TLK[forced.prefill.present_TL[:, layer], layer]
        _look_up(cache, layer, list(dict.fromkeys(present.ravel().tolist())), capacity, prefill)
    for step in range(forced.decode.n_tokens):
        for layer in range(n_layer):
            wanted = _kept(cache, forced.decode, step, layer, threshold, decode)
            _look_up(cache, layer, wanted, capacity, decode)
    return prefill, decode


def _kept(
    cache: OrderedDict[tuple[int, int], None], steps: PhaseSteps, step: int, layer: int, threshold: float | None, counts: Expected
) -> list[int]:
    experts, weights = steps.expert_TLK[step, layer].tolist(), steps.weight_TLK[step, layer].tolist()
    limit = (threshold or 0.0) * sum(weights) / len(weights)
    kept = [e for e, w in zip(experts, weights, strict=True) if (layer, e) in cache or w >= limit or w == max(weights)]
    counts.dropped += len(experts) - len(kept)
    return kept


def _look_up(cache: OrderedDict[tuple[int, int], None], layer: int, experts: Sequence[int], capacity: int, counts: Expected) -> None:
    # What is found is touched before what is read is put in, so the latter is newer.
    found = [expert for expert in experts if (layer, expert) in cache]
    missing = [expert for expert in experts if (layer, expert) not in cache]
    counts.hits += len(found)
    counts.misses += len(missing)
    for expert in found + missing:
        cache[layer, expert] = None
        cache.move_to_end((layer, expert))
    while len(cache) > max(capacity, len(experts)):
        cache.popitem(last=False)
