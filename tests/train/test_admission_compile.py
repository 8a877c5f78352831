"""Admission compiles into one graph, for any number of tokens, and says there what it says outside."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from moetriage.train.admission import POLICIES, Plan, admit

SETTINGS = {"capacity": 9, "margin_threshold": 0.05, "sequence_length": 16}
#: One of each way through the code; tracing each policy takes a second or two.
QUICK = ("top2", "capsel2", "capsel2-causal", "augment")


@pytest.fixture(autouse=True)
def _nothing_compiled_before() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def skewed(n_tokens: int) -> torch.Tensor:
    return (torch.randn(n_tokens, 8) + torch.linspace(0, 1, 8)).softmax(1)


def assert_same(found: Plan, wanted: Plan) -> None:
    for name in ("expert_TK", "slot_TK", "pass_TK", "margin_T", "requested", "accepted"):
        assert torch.equal(getattr(found, name), getattr(wanted, name)), name
    assert int(wanted.accepted[1]) > 0
    assert not wanted.covered_T.all()


@pytest.mark.parametrize("policy", QUICK)
def test_admission_compiles_into_one_graph(policy: str) -> None:
    compiled = torch.compile(admit, backend="eager", fullgraph=True)
    probs_TE, mask_T = skewed(96), torch.rand(96) > 0.1
    assert_same(compiled(probs_TE, policy, mask_T=mask_T, **SETTINGS), admit(probs_TE, policy, mask_T=mask_T, **SETTINGS))


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("policy", POLICIES)
def test_one_graph_serves_any_number_of_tokens(policy: str) -> None:
    compiled = torch.compile(admit, backend="aot_eager", fullgraph=True, dynamic=True)
    for n_tokens in (96, 160):
        probs_TE = skewed(n_tokens)
        found, wanted = compiled(probs_TE, policy, **SETTINGS), admit(probs_TE, policy, **SETTINGS)
        assert torch.equal(found.slot_TK, wanted.slot_TK)
        assert torch.equal(found.requested, wanted.requested)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # importing inductor makes torch warn of itself
@pytest.mark.parametrize("policy", QUICK)
def test_machine_code_of_the_graph_says_the_same(policy: str) -> None:
    compiled = torch.compile(admit, backend="inductor", fullgraph=True)
    probs_TE = skewed(96)
    assert_same(compiled(probs_TE, policy, **SETTINGS), admit(probs_TE, policy, **SETTINGS))
