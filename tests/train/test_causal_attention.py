"""Attention in blocks against torch's own, values and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from moetriage.train import causal_attention as module
from moetriage.train.causal_attention import BLOCK, causal_attention

SHAPES = [(2, 4, 2, 2 * BLOCK + 44, 64), (1, 3, 3, BLOCK, 32), (2, 6, 1, 5, 8), (1, 1, 1, 1, 4)]


def inputs(shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    """Queries, keys, values and the gradient of the result; strides are those of heads cut out of rows."""
    batch, n_head, n_kv, length, width = shape
    made = [torch.randn(batch, length, heads, width, dtype=dtype).transpose(1, 2) for heads in (n_head, n_kv, n_kv, n_head)]
    return [x.requires_grad_() for x in made[:3]] + made[3:]


@pytest.mark.parametrize("shape", SHAPES)
def test_blocks_are_exact(shape: tuple[int, ...]) -> None:
    *qkv, upstream = inputs(shape, torch.float64)
    ours, theirs = module._Blocks.apply(*qkv), F.scaled_dot_product_attention(*qkv, is_causal=True, enable_gqa=True)
    assert torch.allclose(ours, theirs, atol=1e-12)
    for one, other in zip(torch.autograd.grad(ours, qkv, upstream), torch.autograd.grad(theirs, qkv, upstream), strict=True):
        assert torch.allclose(one, other, atol=1e-12)


@pytest.mark.parametrize("shape", SHAPES[:2])
def test_sixteen_bits_go_through_blocks_and_lose_no_more_than_torch(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    *qkv, upstream = inputs(shape, torch.bfloat16)
    exact = [x.detach().double().requires_grad_() for x in qkv]
    expected = torch.autograd.grad(F.scaled_dot_product_attention(*exact, is_causal=True, enable_gqa=True), exact, upstream.double())
    called: list[Any] = []
    apply = module._Blocks.apply
    monkeypatch.setattr(module._Blocks, "apply", lambda *arguments: called.append(1) or apply(*arguments))
    ours = torch.autograd.grad(causal_attention(*qkv), qkv, upstream)
    theirs = torch.autograd.grad(F.scaled_dot_product_attention(*qkv, is_causal=True, enable_gqa=True), qkv, upstream)
    assert called == [1]
    for one, other, right in zip(ours, theirs, expected, strict=True):
        assert (one - right).norm() < 2 * (other - right).norm() + 1e-3 * right.norm()


def test_without_a_gradient_or_in_32_bits_torchs_kernel_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module._Blocks, "apply", lambda *_arguments: pytest.fail("blocks were used"))
    for dtype in (torch.float32, torch.bfloat16):
        *qkv, _ = inputs(SHAPES[1], dtype)
        with torch.set_grad_enabled(dtype == torch.float32):
            assert causal_attention(*qkv).shape == qkv[0].shape
