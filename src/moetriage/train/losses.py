"""Auxiliary losses that spread tokens over experts, and the step of the bias that does it without a loss.

In: what the router computed. Out: scalars and updates that the caller adds where it wants them; nothing is stored. Sources: load
balancing of Switch Transformer (Fedus et al. 2021, section 2.2), for more than one choice as in GShard (Lepikhin et al. 2020, section
2.2); z-loss of ST-MoE (Zoph et al. 2022, section 2.2); the bias of loss-free balancing (Wang et al. 2024, algorithm 1).

Legend: T tokens, E experts, K choices.
"""

from __future__ import annotations

import torch
from torch import Tensor


def load_balancing_loss(probs_TE: Tensor, expert_TK: Tensor, mask_T: Tensor | None = None) -> Tensor:
    """Return E * sum over experts of (their part of the choices) * (their mean probability): 1 when even, E when one expert takes all.

    probs_TE: router probabilities, through which the gradient flows. expert_TK: the experts chosen, before any capacity; give the first
    choices alone, (T, 1), to have the losses of Switch and GShard. mask_T: True = a real token; no other counts. 0 without tokens.
    """
    num_experts = probs_TE.shape[1]
    weight_T = _weights(probs_TE, mask_T)
    chosen_E = probs_TE.new_zeros(num_experts).scatter_add(0, expert_TK.flatten(), weight_T.repeat_interleave(expert_TK.shape[1]))
    # No matrix product: autocast would round the probabilities to 16 bits.
    return num_experts * (chosen_E / expert_TK.shape[1] * (weight_T[:, None] * probs_TE).sum(dim=0)).sum()


def z_loss(logits_TE: Tensor, mask_T: Tensor | None = None) -> Tensor:
    """Return the mean of logsumexp(logits)**2 over the real tokens, which keeps logits small; 0 without tokens."""
    return (_weights(logits_TE, mask_T) * logits_TE.logsumexp(dim=1).square()).sum()


def loss_free_bias_update(expert_load_E: Tensor, rate: float) -> Tensor:
    """Return what to add to the selection bias, (E,) float32: ``rate`` up for experts below the mean load, as much down for those above.

    expert_load_E: assignments per expert of one batch, or summed over the batches of an optimizer step. Apply it with ``Router.add_bias``,
    after the step.
    """
    load_E = expert_load_E.float()
    return rate * torch.sign(load_E.mean() - load_E)


def _weights(values_TE: Tensor, mask_T: Tensor | None) -> Tensor:
    """Return (T,) weights that make a sum a mean over the real tokens."""
    if mask_T is None:
        return values_TE.new_full((len(values_TE),), 1 / max(len(values_TE), 1))
    return mask_T.to(values_TE.dtype) / mask_T.sum().clamp(min=1)
