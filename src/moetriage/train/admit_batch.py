"""One batch of one layer through its policy: router probabilities and the layer's settings in, a plan out.

For layers of ours (``moe``) and of other people's models (``patch``) alike. Deliberately unknown here: weights, gates, and where a
threshold comes from.

Legend: T tokens, E experts.
"""

from __future__ import annotations

from torch import Tensor

from moetriage.train.admission import admit
from moetriage.train.moe_config import MoEConfig
from moetriage.train.plan import Plan
from moetriage.train.policies import capacity


def admit_batch(
    probs_TE: Tensor,
    config: MoEConfig,
    *,
    threshold: Tensor | None,
    mask_T: Tensor | None,
    sequence_length: int,
    training: bool,
    drop_free: bool = False,
) -> Plan:
    """Return what the policy of ``config`` grants; probabilities that are not finite are the caller's to refuse.

    threshold: 0-d, for policies with one. mask_T: (T,) bool, True = a real token. training: which capacity factor counts. drop_free: every
    token gets what it asks for, as if capacity had no end.
    """
    n_tokens, num_experts = probs_TE.shape
    if mask_T is not None and not drop_free:
        n_tokens = int(mask_T.sum())  # shapes depend on it: the one place that waits for the device
    return admit(
        probs_TE,
        config.policy,
        capacity=n_tokens if drop_free else capacity(config.factor(training=training), n_tokens, num_experts),
        margin_threshold=threshold,
        mask_T=mask_T,
        sequence_length=max(sequence_length, 1),
        check_values=False,
    )
