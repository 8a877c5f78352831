"""The median margin, and the one that follows training."""

from __future__ import annotations

import pytest
import torch

from moetriage.errors import UsageError
from moetriage.train.admission import admit
from moetriage.train.threshold import MarginMedian, median_margin


def test_the_median_leaves_masked_tokens_out_and_makes_half_of_the_others_uncertain() -> None:
    probs_TE, mask_T = torch.randn(101, 8).softmax(1), torch.arange(101) < 80
    margin_T = admit(probs_TE, "top1", capacity=101, mask_T=mask_T).margin_T
    threshold = median_margin(margin_T)
    assert (threshold.dtype, threshold.shape) == (torch.float32, ())
    assert int((margin_T <= threshold).sum()) == 40


def test_the_running_median_starts_at_the_first_batch_and_follows_the_later_ones() -> None:
    running = MarginMedian(decay=0.5)
    assert float(running.value) == 0.0
    running.update(torch.tensor([0.1, 0.2, 0.4]))
    assert float(running.value) == pytest.approx(0.2)
    running.update(torch.tensor([0.3, 0.4, 0.4, torch.inf]))
    assert float(running.value) == pytest.approx(0.3)


@pytest.mark.parametrize("margins", [[], [torch.inf, torch.inf]])
def test_a_batch_without_margins_changes_nothing(margins: list[float]) -> None:
    running = MarginMedian()
    running.update(torch.tensor(margins))
    assert (float(running.value), int(running.updates)) == (0.0, 0)
    running.update(torch.tensor([0.25]))
    running.update(torch.tensor(margins))
    assert (float(running.value), int(running.updates)) == (0.25, 1)


def test_a_saved_median_goes_on_as_if_never_stopped() -> None:
    margins = torch.rand(6, 50)
    whole, first, second = MarginMedian(), MarginMedian(), MarginMedian()
    for batch in margins:
        whole.update(batch)
    for batch in margins[:3]:
        first.update(batch)
    second.load_state_dict(first.state_dict())
    for batch in margins[3:]:
        second.update(batch)
    assert torch.equal(whole.value, second.value)


@pytest.mark.parametrize("decay", [-0.1, 1.0, float("nan")])
def test_a_decay_that_keeps_nothing_or_everything_wrong_is_refused(decay: float) -> None:
    with pytest.raises(UsageError, match=f"decay {decay} "):
        MarginMedian(decay)
