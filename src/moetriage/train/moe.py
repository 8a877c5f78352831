"""The MoE layer: router -> plan -> dispatch -> experts -> combine, as one module that returns everything and stores nothing.

In: hidden states and a mask. Out: ``MoEOutput`` (the branch's values, the plan, auxiliary losses, counts). Knows nothing of the residual
around it, of optimizers or logging. As nothing is kept between calls, a recompute under activation checkpointing counts nothing twice,
and with the same input it makes the same plan.

Legend: B sequences of S positions, T = B * S tokens, E experts, K choices, C capacity, D model width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moetriage.errors import UsageError
from moetriage.train import expert_loop
from moetriage.train.admit_batch import admit_batch
from moetriage.train.dispatch import ROW_MULTIPLE, combine, gather, padded_slots, sorted_slots
from moetriage.train.experts import Experts
from moetriage.train.losses import load_balancing_loss, z_loss
from moetriage.train.metrics import RoutingStats, stats_of_choices, stats_of_plan
from moetriage.train.moe_config import MoEConfig
from moetriage.train.plan import Plan
from moetriage.train.policies import THRESHOLD_POLICIES
from moetriage.train.product_dtype import to_product_dtype
from moetriage.train.router import Router, Routing, gates_of


@dataclass(frozen=True)
class MoEOutput:
    """What one call of an MoE layer returns.

    y_BSD: the branch's values, of the dtype a linear layer would give; exactly 0 for tokens that no expert served, and masked ones.
    plan: who was admitted where; None when dropless. losses: the auxiliary losses that are on ("load_balance", "z"), each times its
    weight, to be added to the loss. stats: counts of this call.
    """

    y_BSD: Tensor
    plan: Plan | None
    losses: dict[str, Tensor]
    stats: RoutingStats


class MoELayer(nn.Module):
    """Replace a feed-forward branch by E experts, of which each token gets those that its policy grants.

    ``threshold`` (float32, a buffer; policies with an optional pass only) is read by each call and changed by nobody but the caller:
    with capsel2-online the training loop sets it after each step.
    """

    threshold: Tensor | None

    def __init__(self, config: MoEConfig, layer: int = 0) -> None:
        """layer: number of the layer, for messages. Raises UsageError if the settings are wrong."""
        super().__init__()
        config.validate()
        self.config = config
        biased = config.loss_free_bias_rate > 0
        self.router = Router(config.d_model, config.num_experts, layer=layer, selection_bias=biased, check_finite=config.check_finite)
        self.experts = Experts(config.num_experts, config.d_model, config.d_expert, config.activation, bias=config.bias)
        has_threshold = config.policy in THRESHOLD_POLICIES
        self.register_buffer("threshold", torch.tensor(config.margin_threshold, dtype=torch.float32) if has_threshold else None)

    def forward(self, x_BSD: Tensor, mask_BS: Tensor | None = None, *, drop_free: bool = False) -> MoEOutput:
        """Run the branch. mask_BS: bool, True = a real token; the others take no capacity, count nowhere and get 0, whatever they hold.

        drop_free: give every token the experts that its policy asks for, as if capacity had no end (admission looks at later tokens of a
        batch, so a loss without drops belongs beside one with them). Raises UsageError for a wrong shape, and for NaN or inf in the router.
        """
        self._check(x_BSD, mask_BS)
        x_TD = x_BSD.reshape(-1, x_BSD.shape[-1])
        mask_T = None if mask_BS is None else mask_BS.reshape(-1)
        if mask_T is not None:
            x_TD = x_TD.masked_fill(~mask_T[:, None], 0)  # also keeps NaN in padding out of every gradient
        routing = self.router(x_TD, x_BSD.shape[1])
        if self.config.dropless:
            expert_TK = self.router.choose(routing.probs_TE, self.config.top_k)
            losses = self._losses(routing, mask_T, expert_TK)
            granted_TK = expert_TK if mask_T is None else expert_TK.masked_fill(~mask_T[:, None], -1)
            y_TD = self._dropless(x_TD, routing, granted_TK)
            plan, stats = None, stats_of_choices(granted_TK, self.config.num_experts)
        else:
            plan = self._admit(routing, mask_T, x_BSD.shape[1], drop_free=drop_free)
            losses = self._losses(routing, mask_T)
            y_TD = self._dropless(x_TD, routing, plan.expert_TK) if drop_free else self._padded(x_TD, routing, plan)
            stats = stats_of_plan(plan, self.config.num_experts, self.threshold)
        return MoEOutput(y_TD.view(x_BSD.shape), plan, losses, stats)

    def _check(self, x_BSD: Tensor, mask_BS: Tensor | None) -> None:
        if x_BSD.dim() != 3 or x_BSD.shape[-1] != self.config.d_model:
            raise UsageError(f"input of shape {tuple(x_BSD.shape)}: the layer takes (sequences, positions, {self.config.d_model})")
        if mask_BS is not None and (mask_BS.shape != x_BSD.shape[:2] or mask_BS.dtype != torch.bool):
            raise UsageError(f"mask of shape {tuple(mask_BS.shape)}, {mask_BS.dtype}: must be bool, {tuple(x_BSD.shape[:2])}")

    def _admit(self, routing: Routing, mask_T: Tensor | None, sequence_length: int, *, drop_free: bool) -> Plan:
        return admit_batch(
            routing.probs_TE,
            self.config,
            threshold=self.threshold,
            mask_T=mask_T,
            sequence_length=sequence_length,
            training=self.training,
            drop_free=drop_free,
        )

    def _padded(self, x_TD: Tensor, routing: Routing, plan: Plan) -> Tensor:
        """Run the experts on buffers of ``plan.room`` rows: bmm over all, or on a CPU over some at a time."""
        num_experts = self.config.num_experts
        slots = padded_slots(plan.expert_TK, plan.slot_TK, num_experts, plan.room)
        gates_TK = gates_of(routing.probs_TE, plan.expert_TK, renormalise=self.config.renormalise)
        x_TD = to_product_dtype(x_TD)
        if x_TD.device.type == "cpu":
            return expert_loop.run(self.experts, x_TD, gates_TK, slots)
        y_ECD = self.experts.padded(gather(x_TD, slots).view(num_experts, plan.room, -1))
        return combine(y_ECD.flatten(0, 1), gates_TK, slots)

    def _dropless(self, x_TD: Tensor, routing: Routing, expert_TK: Tensor) -> Tensor:
        """Run each expert on as many rows as it was given; -1 in ``expert_TK`` is nothing."""
        gates_TK = gates_of(routing.probs_TE, expert_TK, renormalise=self.config.renormalise)
        x_TD = to_product_dtype(x_TD)
        if _use_grouped(x_TD, self.config):
            slots, load_E = sorted_slots(expert_TK, self.config.num_experts)
            return combine(self.experts.grouped(gather(x_TD, slots), load_E), gates_TK, slots)
        slots, rows_E = sorted_slots(expert_TK, self.config.num_experts, multiple=ROW_MULTIPLE)
        return expert_loop.run(self.experts, x_TD, gates_TK, slots, rows_E)

    def _losses(self, routing: Routing, mask_T: Tensor | None, expert_TK: Tensor | None = None) -> dict[str, Tensor]:
        """Return the losses that are on; ``expert_TK``: the choices to balance, by default the first ones."""
        losses = {}
        if self.config.load_balance_weight:
            if expert_TK is None:
                expert_TK = self.router.choose(routing.probs_TE, 1)
            losses["load_balance"] = self.config.load_balance_weight * load_balancing_loss(routing.probs_TE, expert_TK, mask_T)
        if self.config.z_loss_weight:
            losses["z"] = self.config.z_loss_weight * z_loss(routing.logits_TE, mask_T)
        return losses


def _use_grouped(x_TD: Tensor, config: MoEConfig) -> bool:
    """Say whether F.grouped_mm runs this: off the CPU, on the type and the strides (whole 16 bytes) that it takes in every setting."""
    aligned = all(width * x_TD.element_size() % 16 == 0 for width in (config.d_model, config.d_expert))
    return x_TD.device.type != "cpu" and x_TD.dtype == torch.bfloat16 and aligned
