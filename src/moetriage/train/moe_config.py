"""Settings of one MoE layer as a frozen dataclass; validated without a model.

In: what a caller or a checkpoint's JSON says. Out: one ``MoEConfig`` that ``moe.MoELayer`` builds from. Knows nothing of the model around
the layer, and needs no torch.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal, TypeGuard

from moetriage.errors import UsageError
from moetriage.train.policies import DROPLESS, ONE_EXPERT_POLICIES, POLICIES, THRESHOLD_POLICIES, capacity

#: Beyond this a width or a number of experts is a slip: the product of three such sizes is still an address.
MAX_SIZE = 1 << 18


def is_number(value: object) -> TypeGuard[float]:
    """Say whether a setting, which a file may have held, is a number; NaN is one."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Describe one MoE layer: sizes, experts, and who decides which token reaches which expert.

    d_model, d_expert, num_experts: D, H and E, each at least 1.
    renormalise: divide the granted experts' probabilities by their sum; if not, a token's gates sum to less than 1. No default: it
        changes what the layer computes. With a single granted expert the gate becomes 1 and tells the router nothing, so no policy
        that grants one expert alone (top1, bpr-top1, or top_k=1) allows it.
    policy: "dropless", or one of ``policies.POLICIES``.
    top_k: experts of a token when dropless, 1 to num_experts; admission policies look at the two best and need it to be 2.
    capacity_factor: phi of capacity = ceil(phi * N / E); for admission policies only, where it is required.
    eval_capacity_factor: phi in evaluation mode; None is the training one.
    margin_threshold: a token whose two best probabilities lie this close asks for both; for ``policies.THRESHOLD_POLICIES``.
    activation: "swiglu" (gate, up and down matrices) or "gelu" (two matrices). bias: biases in the experts, "gelu" only.
    load_balance_weight, z_loss_weight: factors of the auxiliary losses; 0 leaves the loss out.
    loss_free_bias_rate: step of the selection bias that balances the load without a loss, dropless only; 0 leaves it out.
    check_finite: look for NaN and inf in the router, which costs a wait for the device in each layer; a compiled layer never looks.
    """

    d_model: int
    d_expert: int
    num_experts: int
    renormalise: bool
    policy: str = DROPLESS
    top_k: int = 2
    capacity_factor: float | None = None
    eval_capacity_factor: float | None = None
    margin_threshold: float | None = None
    activation: Literal["gelu", "swiglu"] = "swiglu"
    bias: bool = False
    load_balance_weight: float = 0.0
    z_loss_weight: float = 0.0
    loss_free_bias_rate: float = 0.0
    check_finite: bool = True

    @property
    def dropless(self) -> bool:
        """Say whether tokens are routed without a capacity."""
        return self.policy == DROPLESS

    def factor(self, *, training: bool) -> float:
        """Return the capacity factor that counts in training or in evaluation; for admission policies only."""
        factor = self.capacity_factor if training or self.eval_capacity_factor is None else self.eval_capacity_factor
        assert factor is not None
        return factor

    def validate(self) -> None:
        """Raise UsageError for a value or a combination that cannot work."""
        for name in ("d_model", "d_expert", "num_experts", "top_k"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_SIZE:
                raise UsageError(f"{name} {value!r}: must be a whole number from 1 to {MAX_SIZE}")
        if self.activation not in ("gelu", "swiglu"):
            raise UsageError(f"activation {self.activation!r}: must be gelu or swiglu")
        if self.bias and self.activation != "gelu":
            raise UsageError(f"bias with activation {self.activation!r}: only gelu experts have biases; leave it out")
        for name in ("load_balance_weight", "z_loss_weight", "loss_free_bias_rate"):
            value = getattr(self, name)
            if not (is_number(value) and 0 <= value < math.inf):
                raise UsageError(f"{name} {value!r}: must be 0 (off) or a positive number")
        for name in ("renormalise", "bias", "check_finite"):
            if not isinstance(getattr(self, name), bool):
                raise UsageError(f"{name} {getattr(self, name)!r}: must be true or false")
        if self.dropless:
            self._validate_dropless()
        else:
            self._validate_policy()

    def _validate_dropless(self) -> None:
        if self.top_k > self.num_experts:
            raise UsageError(f"top_k {self.top_k} of num_experts {self.num_experts}: a token cannot reach more experts than there are")
        for name in ("capacity_factor", "eval_capacity_factor", "margin_threshold"):
            if getattr(self, name) is not None:
                raise UsageError(f"{name} {getattr(self, name)} does nothing with policy {DROPLESS!r}: leave it out, or name a policy")
        if self.renormalise and self.top_k == 1:
            raise UsageError("renormalise with top_k 1: every gate would be 1 and the router would learn nothing; use renormalise=False")

    def _validate_policy(self) -> None:
        if self.policy not in POLICIES:
            raise UsageError(f"policy {self.policy!r}: must be {DROPLESS} or one of {', '.join(POLICIES)}")
        if self.top_k != 2:
            raise UsageError(f"top_k {self.top_k} with policy {self.policy!r}: admission looks at the two best; use 2, or {DROPLESS}")
        if self.renormalise and self.policy in ONE_EXPERT_POLICIES:
            raise UsageError(
                f"renormalise with policy {self.policy!r}: all gates would be 1, the router would learn nothing; use renormalise=False"
            )
        if self.capacity_factor is None:
            raise UsageError(f"policy {self.policy!r} needs a capacity_factor, for instance 1.25")
        if self.loss_free_bias_rate:
            raise UsageError(
                f"loss_free_bias_rate {self.loss_free_bias_rate} with policy {self.policy!r}: balances {DROPLESS} routing only"
            )
        self._validate_capacity_and_threshold()

    def _validate_capacity_and_threshold(self) -> None:
        for factor in (self.capacity_factor, self.eval_capacity_factor):
            if factor is not None:
                if not is_number(factor):
                    raise UsageError(f"capacity_factor {factor!r}: must be a number, for instance 1.25")
                capacity(factor, 1, 1)  # raises for a factor that admission refuses
        takes_threshold = self.policy in THRESHOLD_POLICIES
        if takes_threshold and (not is_number(self.margin_threshold) or not 0 <= self.margin_threshold < math.inf):
            raise UsageError(f"policy {self.policy!r} needs a finite margin_threshold from 0 up, not {self.margin_threshold}")
        if not takes_threshold and self.margin_threshold is not None:
            raise UsageError(f"margin_threshold {self.margin_threshold} does nothing with policy {self.policy!r}: leave it out")

    def as_dict(self) -> dict[str, object]:
        """Return the settings as JSON-ready values, in field order."""
        return dataclasses.asdict(self)
