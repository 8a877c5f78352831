"""The layer compiles into one graph, forward and backward, and says there what it says outside."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from moetriage.train.moe import MoELayer
from moetriage.train.moe_config import MoEConfig

#: torch warns of what its own compiler does.
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


@pytest.fixture(autouse=True)
def _nothing_compiled_before() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def layer_of(policy: str) -> MoELayer:
    sizes = {"d_model": 16, "d_expert": 24, "num_experts": 8, "load_balance_weight": 0.1, "z_loss_weight": 0.1}
    if policy == "dropless":
        return MoELayer(MoEConfig(**sizes, renormalise=True, top_k=3))
    biased = {"activation": "gelu", "bias": True, "renormalise": False}
    return MoELayer(MoEConfig(**sizes, **biased, policy=policy, capacity_factor=0.75, margin_threshold=0.1))


def assert_same(layer: MoELayer, backend: str) -> None:
    compiled = torch.compile(layer, backend=backend, fullgraph=True)
    x_BSD, dy_BSD = torch.randn(2, 32, 16, requires_grad=True), torch.randn(2, 32, 16)
    grads = []
    for output in (found := compiled(x_BSD), wanted := layer(x_BSD)):
        loss = (output.y_BSD * dy_BSD).sum() + sum(output.losses.values())
        grads.append(torch.autograd.grad(loss, (x_BSD, *layer.parameters())))
    assert torch.allclose(found.y_BSD, wanted.y_BSD, atol=1e-5)
    assert torch.equal(found.stats.expert_load_E, wanted.stats.expert_load_E)
    assert (found.plan is None) == (wanted.plan is None)
    assert found.plan is None or torch.equal(found.plan.slot_TK, wanted.plan.slot_TK)
    assert all(torch.allclose(one, other, atol=1e-5) for one, other in zip(*grads, strict=True))


@pytest.mark.parametrize("policy", ["dropless", "capsel2"])
def test_the_layer_compiles_into_one_graph(policy: str) -> None:
    assert_same(layer_of(policy), "eager")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # importing inductor makes torch warn of itself
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("policy", ["dropless", "capsel2"])
def test_the_compiled_backward_and_machine_code_say_the_same(policy: str, backend: str) -> None:
    assert_same(layer_of(policy), backend)


def test_nan_is_not_looked_for_while_compiling_and_reaches_the_output() -> None:
    compiled = torch.compile(layer_of("dropless"), backend="eager", fullgraph=True)
    assert compiled(torch.full((1, 4, 16), torch.nan)).y_BSD.isnan().all()
