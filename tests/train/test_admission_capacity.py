"""The capacity is exact in the decimal as it is written, and absurd factors are refused before anything is allocated."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetriage.errors import UsageError
from moetriage.train.admission import capacity


@pytest.mark.parametrize(
    ("factor", "n_tokens", "n_experts", "places"),
    [
        (1.1, 100, 1, 110),  # math.ceil(1.1 * 100) is 111
        ("1.1", 100, 1, 110),
        (1.25, 512, 8, 80),
        (1.25, 513, 8, 81),
        (2, 512, 8, 128),
        (Fraction(1, 3), 9, 3, 1),
        ("1/3", 10, 3, 2),
        (Decimal("1.15"), 20, 1, 23),
        (1e-9, 5, 8, 1),
        (1.0, 3, 8, 1),
        (1.25, 0, 8, 0),
        (1024, 1, 1, 1024),
    ],
)
def test_capacity_is_rounded_up_from_the_exact_value(factor: float, n_tokens: int, n_experts: int, places: int) -> None:
    assert capacity(factor, n_tokens, n_experts) == places


@given(st.integers(1, 10_000), st.integers(0, 10**6), st.integers(1, 512))
def test_capacity_is_the_least_that_is_enough(hundredths: int, n_tokens: int, n_experts: int) -> None:
    places = capacity(hundredths / 100, n_tokens, n_experts)
    assert (places - 1) * 100 * n_experts < hundredths * n_tokens <= places * 100 * n_experts


@pytest.mark.parametrize(
    "factor", [0, -1.25, float("nan"), float("inf"), 16384, 1024.5, "1e999999999", "1e-999999999", "much", "1/0", None, True]
)
def test_an_absurd_factor_is_refused_with_the_limit(factor: float) -> None:
    with pytest.raises(UsageError, match=f"capacity factor {factor!r}: .*above 0 and at most 1024"):
        capacity(factor, 512, 8)


@pytest.mark.parametrize(("n_tokens", "n_experts"), [(-1, 8), (512, 0), (100.0, 8), (512, 8.0)])
def test_capacity_needs_experts_and_no_negative_number_of_tokens(n_tokens: int, n_experts: int) -> None:
    with pytest.raises(UsageError, match=f"{n_experts} experts for {n_tokens} tokens"):
        capacity(1.25, n_tokens, n_experts)
