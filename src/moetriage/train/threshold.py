"""The margin threshold below which a token counts as uncertain: a median over batches, or one that follows training.

Comes in: ``Plan.margin_T`` of batches. Goes out: a threshold for ``admit``. Deliberately unknown here: models, and when to update. The
training loop does that, once a step; no forward pass does, or recomputing one under activation checkpointing would count it twice.

Legend: T tokens, of one layer or of all.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moetriage.errors import UsageError


def median_margin(margin_T: Tensor) -> Tensor:
    """Return the lower median of the finite margins, 0-d float32: at least half of them are at most this. NaN if there is none.

    Masked tokens have an infinite margin and do not count.
    """
    margin_T = margin_T.detach().float()
    if margin_T.numel() == 0:  # nanmedian refuses it
        return margin_T.new_full((), torch.nan)
    return margin_T.masked_fill(margin_T == torch.inf, torch.nan).nanmedian()


class MarginMedian:
    """Follow the median margin over training: the threshold of ``capsel2-online``.

    An exponential mean of the batches' medians: a batch has hundreds of margins, so its own median is little noise, and nothing but two
    numbers has to be kept and saved. ``value``: 0-d float32; 0 before the first update, when only exact ties are uncertain.
    decay: share of the old value that an update keeps, 0 up to below 1; 0.9 follows about the last ten batches.
    """

    def __init__(self, decay: float = 0.9, *, device: torch.device | str | None = None) -> None:
        if not 0 <= decay < 1:
            raise UsageError(f"decay {decay} of the running median: must be from 0 up to below 1; 0.9 follows about the last ten batches")
        self.decay = decay
        self.value = torch.zeros((), dtype=torch.float32, device=device)
        self.updates = torch.zeros((), dtype=torch.int64, device=device)

    def update(self, margin_T: Tensor) -> None:
        """Take in the margins of one batch; one without a finite margin changes nothing. Waits for no device."""
        median = median_margin(margin_T).to(self.value.device)
        known = ~median.isnan()
        followed = torch.where(self.updates == 0, median, self.decay * self.value + (1 - self.decay) * median)
        self.value = torch.where(known, followed, self.value)
        self.updates = self.updates + known

    def state_dict(self) -> dict[str, Tensor]:
        """Return what has to be saved."""
        return {"value": self.value, "updates": self.updates}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Go on from a saved state."""
        self.value, self.updates = state["value"].to(self.value), state["updates"].to(self.updates)
