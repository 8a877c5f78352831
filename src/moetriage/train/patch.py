"""Route the experts of somebody else's model through an admission policy, and take that back.

In: a Hugging Face Mixtral, OLMoE, Qwen2-MoE or Qwen3-MoE model with stacked experts (transformers 5; it is not imported here). Out: a
handle. The model's router, weights, shared experts and outputs stay as they are; between router and experts, ``admission`` now decides.
Knows the four families by the names of their blocks: others choose experts by rules that probabilities alone do not tell.

Legend: B sequences of S positions, T = B * S tokens, E experts, K = 2 choices, C capacity, D model width, H expert width.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from moetriage.errors import UsageError
from moetriage.train.admit_batch import admit_batch
from moetriage.train.dispatch import combine, gather, padded_slots
from moetriage.train.metrics import RoutingStats, stats_of_plan
from moetriage.train.moe_config import MoEConfig
from moetriage.train.plan import Plan
from moetriage.train.router import gates_of, require_finite

FAMILIES = ("MixtralSparseMoeBlock", "OlmoeSparseMoeBlock", "Qwen2MoeSparseMoeBlock", "Qwen3MoeSparseMoeBlock")


def patch(
    model: nn.Module,
    *,
    policy: str,
    capacity_factor: float,
    eval_capacity_factor: float | None = None,
    margin_threshold: float | None = None,
    renormalise: bool | None = None,
    narrow: bool = False,
) -> Patched:
    """Route every MoE block of ``model`` through an admission policy until the handle's ``remove()``.

    policy: one of ``admission.POLICIES``. capacity_factor, eval_capacity_factor, margin_threshold: as in ``MoEConfig``; the threshold is
    the same in all layers. renormalise: whether gates are divided by their sum over the granted experts; None does what the model does.
    narrow: accept a model whose tokens have more than two experts: from then on they have at most their two best, which changes what the
    model computes even where capacity is ample. Positions that a two-dimensional ``attention_mask`` leaves out take no capacity, and their
    values reach no expert. Raises UsageError for a model without such blocks, a patched one, and settings that cannot work.
    """
    found = [(name, module) for name, module in model.named_modules() if _is_block(module)]
    if not found:
        families = ", ".join(name.removesuffix("SparseMoeBlock") for name in FAMILIES)
        raise UsageError(f"{type(model).__name__} has no MoE block that can be patched: the families are {families}, with stacked experts")
    settings = {
        "policy": policy,
        "capacity_factor": capacity_factor,
        "eval_capacity_factor": eval_capacity_factor,
        "margin_threshold": margin_threshold,
    }
    for name, module in found:
        _require_patchable(name, module, narrow=narrow)
    return Patched(model, [_Block(name, i, module, _config(module, settings, renormalise)) for i, (name, module) in enumerate(found)])


def _require_patchable(name: str, module: nn.Module, *, narrow: bool) -> None:
    if "forward" in vars(module.gate):
        raise UsageError(f"{name} is patched already: call remove() on the handle of the first patch")
    if module.gate.top_k > 2 and not narrow:
        raise UsageError(
            f"{name} gives each token {module.gate.top_k} experts, admission two at most: pass narrow=True if that is what you want"
        )


def _config(module: nn.Module, settings: dict[str, Any], renormalise: bool | None) -> MoEConfig:
    if renormalise is None:
        renormalise = getattr(module.gate, "norm_topk_prob", True)  # Mixtral's router always does and has no such setting
    num_experts, d_expert = module.experts.down_proj.shape[0], module.experts.down_proj.shape[2]
    config = MoEConfig(d_model=module.gate.weight.shape[1], d_expert=d_expert, num_experts=num_experts, renormalise=renormalise, **settings)
    if config.dropless:
        raise UsageError(f"policy {config.policy!r} is what the model does unpatched: name one of admission's policies")
    config.validate()
    return config


@dataclass(frozen=True)
class BlockCall:
    """What one call of a patched block did: its counts, and who was admitted where (``plan.margin_T`` moves a MarginMedian)."""

    stats: RoutingStats
    plan: Plan


class Patched:
    """Undo, observe and steer a patched model.

    blocks: names of the patched modules, in order. threshold: 0-d float32 tensor that all layers read at each call, or None;
    with capsel2-online the training loop sets it.
    """

    def __init__(self, model: nn.Module, blocks: list[_Block]) -> None:
        self.blocks = tuple(block.name for block in blocks)
        margin_threshold = blocks[0].config.margin_threshold
        self.threshold = None if margin_threshold is None else torch.tensor(margin_threshold, dtype=torch.float32)
        self._blocks = blocks
        self._mask_BS: Tensor | None = None
        self._records: list[BlockCall] | None = None
        stacks = {_stack(model, block.name) for block in blocks}
        self._hooks = [model.get_submodule(name).register_forward_pre_hook(self._note_mask, with_kwargs=True) for name in stacks]
        for block in blocks:
            block.attach(self)

    def remove(self) -> None:
        """Give the model its own forward functions back; may be called twice."""
        for hook in self._hooks:
            hook.remove()
        for block in self._blocks:
            block.detach()
        self._hooks, self._blocks = [], []  # the model may be patched again, which a second call must leave alone

    @contextmanager
    def record(self) -> Iterator[list[BlockCall]]:
        """Collect what each block call inside the ``with`` did, in order; a recompute in a backward is left out."""
        outer, self._records = self._records, []
        try:
            yield self._records
        finally:
            self._records = outer

    def mask_for(self, shape: tuple[int, int]) -> Tensor | None:
        """Return the (T,) mask of the running forward for tokens of shape (B, S), or None; a cache makes S shorter than the mask."""
        mask_BS = self._mask_BS
        if mask_BS is None or mask_BS.shape[0] != shape[0] or mask_BS.shape[1] < shape[1]:
            return None
        return mask_BS[:, mask_BS.shape[1] - shape[1] :].reshape(-1)

    def note(self, call: BlockCall) -> None:
        """Record one call, unless it is a recompute of a running backward."""
        if self._records is not None and torch._C._current_graph_task_id() == -1:
            self._records.append(call)

    def _note_mask(self, _model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # Kept until the next forward, because a checkpointed backward calls the blocks again.
        mask = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)
        self._mask_BS = mask.bool() if isinstance(mask, Tensor) and mask.dim() == 2 else None
        if mask is not None and self._mask_BS is None:
            what = f"of {mask.dim()} dimensions" if isinstance(mask, Tensor) else f"in a {type(mask).__name__}"
            warnings.warn(f"attention_mask {what}: does not tell padding from tokens, so padding takes capacity", stacklevel=2)


class _Block:
    """One MoE block whose router and experts are replaced. ``plan`` lives from the router's call to that of the experts."""

    def __init__(self, name: str, layer: int, module: nn.Module, config: MoEConfig) -> None:
        self.name, self.layer, self.module, self.config = name, layer, module, config
        self.shape, self.mask_T, self.plan = (0, 0), None, None

    shape: tuple[int, int]
    mask_T: Tensor | None
    plan: Plan | None

    def attach(self, owner: Patched) -> None:
        self.owner = owner
        self.route, self.run = self.module.gate.forward, self.module.experts.forward
        self.hook = self.module.register_forward_pre_hook(self._prepare)
        self.module.gate.forward, self.module.experts.forward = self._route, self._run

    def detach(self) -> None:
        self.hook.remove()
        for part in (self.module.gate, self.module.experts):
            vars(part).pop("forward", None)

    def _prepare(self, _module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Give the block 0 at padding, where attention may have left NaN, which would reach the gradients of every weight."""
        x_BSD, *rest = args
        self.shape = (x_BSD.shape[0], x_BSD.shape[1])
        self.mask_T = self.owner.mask_for(self.shape)
        return args if self.mask_T is None else (x_BSD.masked_fill(~self.mask_T.view(*self.shape, 1), 0), *rest)

    def _route(self, x_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Stand in for the router: (logits, gates, experts); experts that were not granted have the number E, which is nobody's."""
        logits_TE, own_gates, _ = self.route(x_TD)
        require_finite(logits_TE, self.layer, self.shape[1])
        probs_TE = logits_TE.float().softmax(dim=1)
        self.plan = admit_batch(
            probs_TE,
            self.config,
            threshold=self.owner.threshold,
            mask_T=self.mask_T,
            sequence_length=self.shape[1],
            training=self.module.training,
        )
        self.owner.note(BlockCall(stats_of_plan(self.plan, probs_TE.shape[1], self.owner.threshold), self.plan))
        gates_TK = gates_of(probs_TE, self.plan.expert_TK, renormalise=self.config.renormalise)
        return logits_TE, gates_TK.to(own_gates.dtype), self.plan.expert_TK.masked_fill(self.plan.expert_TK < 0, probs_TE.shape[1])

    def _run(self, x_TD: Tensor, expert_TK: Tensor, gates_TK: Tensor) -> Tensor:
        """Stand in for the experts: two bmm over buffers of ``plan.room`` rows."""
        plan, self.plan = self.plan, None
        if plan is None:  # not called by its block
            return self.run(x_TD, expert_TK, gates_TK)
        experts = self.module.experts
        slots = padded_slots(plan.expert_TK, plan.slot_TK, self.config.num_experts, plan.room)
        x_ECD = gather(x_TD, slots).view(self.config.num_experts, plan.room, -1)
        gate_ECH, up_ECH = torch.bmm(x_ECD, experts.gate_up_proj.transpose(1, 2)).chunk(2, dim=2)
        y_ECD = torch.bmm(experts.act_fn(gate_ECH) * up_ECH, experts.down_proj.transpose(1, 2))
        return combine(y_ECD.flatten(0, 1), gates_TK, slots).to(x_TD.dtype)


def _stack(model: nn.Module, block: str) -> str:
    """Return the name of the module that runs the layers, which is what is given the mask: the one whose list holds the block."""
    parts = block.split(".")
    lists = (i for i in range(1, len(parts)) if isinstance(model.get_submodule(".".join(parts[:i])), nn.ModuleList))
    return ".".join(parts[: next(lists, 1) - 1])


def _is_block(module: nn.Module) -> bool:
    """Say whether this is a block of a known family with stacked experts; older transformers keep a list of networks instead."""
    if not any(base.__name__ in FAMILIES for base in type(module).__mro__):
        return False
    experts = getattr(module, "experts", None)
    return all(getattr(getattr(experts, name, None), "ndim", 0) == 3 for name in ("gate_up_proj", "down_proj"))
