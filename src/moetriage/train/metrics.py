"""What a layer's routing did, as counts.

In: a plan, or the experts of a dropless layer. Out: ``RoutingStats``, which layers return and callers sum. Counts stay tensors on the
layer's device, so that nothing waits for it; read them when a report is due. Knows nothing of losses or logging.

Legend: T tokens, E experts, K choices. The three passes are primary, rescue and optional.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from moetriage.errors import UsageError
from moetriage.train.plan import Plan


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
    expert_load_E: Tensor


def combine(stats: Iterable[RoutingStats]) -> RoutingStats:
    """Sum counts over layers or batches; ``expert_load_E`` then adds up what different layers' experts of one number served."""
    parts = list(stats)
    if not parts:
        raise UsageError("no routing statistics to combine: the model has no MoE layer, or nothing was evaluated")
    return RoutingStats(**{field.name: torch.stack([getattr(part, field.name) for part in parts]).sum(0) for field in fields(RoutingStats)})


def stats_of_plan(plan: Plan, num_experts: int, threshold: Tensor | None) -> RoutingStats:
    """Count what an admission plan did; ``threshold`` is the layer's margin threshold, if it has one."""
    tokens = plan.requested[0]
    # A masked token's margin is infinite, and it is never uncertain.
    uncertain = torch.zeros_like(tokens) if threshold is None else ((plan.margin_T <= threshold) & (plan.margin_T < torch.inf)).sum()
    return RoutingStats(
        tokens=tokens,
        uncovered=tokens - plan.covered_T.sum(),
        requested=plan.requested,
        accepted=plan.accepted,
        uncertain=uncertain,
        expert_load_E=_load(plan.expert_TK, num_experts),
    )


def stats_of_choices(expert_TK: Tensor, num_experts: int) -> RoutingStats:
    """Count a dropless routing; ``expert_TK`` is -1 for masked tokens."""
    tokens = (expert_TK[:, 0] >= 0).sum()
    zero = torch.zeros_like(tokens)
    slots = torch.stack((tokens, zero, tokens * (expert_TK.shape[1] - 1)))
    return RoutingStats(
        tokens=tokens, uncovered=zero, requested=slots, accepted=slots, uncertain=zero, expert_load_E=_load(expert_TK, num_experts)
    )


def _load(expert_TK: Tensor, num_experts: int) -> Tensor:
    group_A = torch.where(expert_TK >= 0, expert_TK, num_experts).flatten()
    load_E = torch.zeros(num_experts + 1, dtype=torch.int64, device=group_A.device).scatter_add_(0, group_A, torch.ones_like(group_A))
    return load_E[:-1]
