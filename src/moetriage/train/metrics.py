"""What a layer's routing did, as counts.

In: a plan, or the experts of a dropless layer. Out: ``RoutingStats``, which layers return and callers sum.
Counts stay tensors on the layer's device, so that nothing waits for it; read them when a report is due. Knows nothing of losses or logging.

Legend: T tokens, E experts, K choices. The three passes are primary, rescue and optional.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from moetriage.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class RoutingStats:
    """Counts of one layer and one batch, or sums of them (see ``combine``); int64, detached, on the layer's device.

    tokens, uncovered: (), unmasked tokens, and those of them that no expert served.
    requested, accepted: (3,), slots asked for and granted by the primary, rescue and optional pass. Dropless first choices count as
        primary, all further ones as optional.
    uncertain: (), tokens whose margin is at most the layer's threshold; 0 where there is none.
    expert_load_E: (E,), assignments that each expert served.
    """

    tokens: Tensor
    uncovered: Tensor
    requested: Tensor
    accepted: Tensor
    uncertain: Tensor
    expert_load_E: Tensor  # noqa: N815


def combine(stats: Iterable[RoutingStats]) -> RoutingStats:
    """Sum counts over layers or batches; ``expert_load_E`` then adds up what different layers' experts of one number served."""
    parts = list(stats)
    if not parts:
        raise UsageError("no routing statistics to combine: the model has no MoE layer, or nothing was evaluated")
    return RoutingStats(**{field.name: torch.stack([getattr(part, field.name) for part in parts]).sum(0) for field in fields(RoutingStats)})
