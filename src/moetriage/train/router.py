"""The router of an MoE layer: a linear map, a softmax over all experts, and for dropless layers the choice of the best ones.

In: hidden states. Out: ``Routing`` (logits and probabilities) and gates. Computes in float32 at least, whatever comes in and whatever
autocast says: 16-bit scores tie by the thousand. Knows neither capacity nor what the experts do.

Legend: T tokens (B sequences of S positions), E experts, K choices, D model width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from moetriage.errors import UsageError


@dataclass(frozen=True)
class Routing:
    """What the router says of each token, (T, E) float32 (float64 for float64 input): logits, and their softmax over all experts."""

    logits_TE: Tensor
    probs_TE: Tensor


class Router(nn.Module):
    """Score experts; holds the (E, D) weight and, for loss-free balancing, the selection bias (E,)."""

    bias_E: Tensor | None

    def __init__(self, d_model: int, num_experts: int, *, layer: int = 0, selection_bias: bool = False, check_finite: bool = True) -> None:
        """layer: only for messages. check_finite: refuse NaN and inf by layer and token, unless compiling; waits for the device."""
        super().__init__()
        self.layer = layer
        self.check_finite = check_finite
        self.weight = nn.Parameter(torch.empty(num_experts, d_model))
        self.register_buffer("bias_E", torch.zeros(num_experts) if selection_bias else None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight as nn.Linear does: uniform within 1 / sqrt(D)."""
        bound = self.weight.shape[1] ** -0.5
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(self, x_TD: Tensor, sequence_length: int | None = None) -> Routing:
        """Return logits and probabilities. ``sequence_length`` only names the position in messages. Raises UsageError on NaN or inf."""
        dtype = torch.promote_types(x_TD.dtype, torch.float32)
        with torch.autocast(x_TD.device.type, enabled=False):
            logits_TE = F.linear(x_TD.to(dtype), self.weight.to(dtype))
            if self.check_finite and not torch.compiler.is_compiling():
                require_finite(logits_TE, self.layer, sequence_length)
            return Routing(logits_TE, _softmax(logits_TE))

    def choose(self, probs_TE: Tensor, top_k: int) -> Tensor:
        """Return (T, top_k) int64, the best experts, best first; ties go to the lower index. The bias counts here and nowhere else."""
        scores_TE = probs_TE.detach() if self.bias_E is None else probs_TE.detach() + self.bias_E
        return best(scores_TE, top_k)

    @torch.no_grad()
    def add_bias(self, update_E: Tensor) -> None:
        """Add a ``losses.loss_free_bias_update`` to the selection bias."""
        if self.bias_E is None:
            raise UsageError("the router has no selection bias: set loss_free_bias_rate above 0")
        self.bias_E += update_E


def _softmax(logits_TE: Tensor) -> Tensor:
    # Along rows of fewer than 16 values it takes five times as long as across them: 0.5 ms for 4096 tokens and 8 experts.
    if logits_TE.device.type == "cpu" and logits_TE.shape[1] < 16:
        return logits_TE.t().softmax(dim=0).t().contiguous()
    return logits_TE.softmax(dim=1)


def best(scores_TE: Tensor, top_k: int) -> Tensor:
    """Return the indices of the ``top_k`` largest scores of each row, (T, top_k) int64, largest first; ties go to the lower index."""
    # torch.topk breaks ties as it likes; max takes the first. At 6 of 32 it costs 1.7 ms instead of 1.4 for 4096 rows.
    rest_TE, chosen = scores_TE.clone(), []
    for _ in range(top_k):
        index_T1 = rest_TE.max(dim=1, keepdim=True).indices
        chosen.append(index_T1)
        rest_TE.scatter_(1, index_T1, -torch.inf)
    return torch.cat(chosen, dim=1)


def gates_of(probs_TE: Tensor, expert_TK: Tensor, *, renormalise: bool) -> Tensor:
    """Return (T, K) gates: each granted expert's probability, 0 where ``expert_TK`` is -1; the gradient flows into the probabilities.

    renormalise: divide by their sum over the granted experts of the token.
    """
    granted_TK = expert_TK >= 0
    gates_TK = probs_TE.gather(1, expert_TK.clamp(min=0)).masked_fill(~granted_TK, 0)
    if renormalise:
        # A sum of 0 only occurs where every probability underflowed or nothing was granted.
        gates_TK = gates_TK / gates_TK.sum(dim=1, keepdim=True).clamp(min=torch.finfo(gates_TK.dtype).tiny)
    return gates_TK


def require_finite(logits_TE: Tensor, layer: int, sequence_length: int | None) -> None:
    """Raise UsageError that names layer and token if a logit is NaN or inf."""
    # One sum is the cheapest look; only if it is not finite is the culprit searched, and a mere overflow of the sum is none.
    if bool(torch.isfinite(logits_TE.detach().sum())):
        return
    bad_T = ~torch.isfinite(logits_TE).all(dim=1)
    if not bool(bad_T.any()):
        return
    token = int(bad_T.nonzero()[0, 0])
    value = logits_TE[token][~torch.isfinite(logits_TE[token])][0].item()
    where = f"token {token}"
    if sequence_length:
        where += f" (sequence {token // sequence_length}, position {token % sequence_length})"
    raise UsageError(
        f"layer {layer}, {where}: the router's logit is {value}, {int(bad_T.sum())} of {len(bad_T)} tokens are not finite; "
        "the weights or the input diverged: lower the learning rate, or go back to a checkpoint"
    )
