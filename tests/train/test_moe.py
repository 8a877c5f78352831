"""The MoE layer: exact zeros, gradients to the router, masks, checkpointing, autocast and evaluation, under every policy."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from moetriage.errors import UsageError
from moetriage.train.moe import MoELayer, MoEOutput
from moetriage.train.moe_config import MoEConfig
from moetriage.train.policies import DROPLESS, ONE_EXPERT_POLICIES, POLICIES, THRESHOLD_POLICIES
from moetriage.train.router import gates_of

EVERY = (DROPLESS, *POLICIES)


def config(policy: str = DROPLESS, **changes: Any) -> MoEConfig:
    values: dict[str, Any] = {"d_model": 8, "d_expert": 12, "num_experts": 4, "renormalise": False, "policy": policy}
    if policy != DROPLESS:
        values["capacity_factor"] = 0.75
    if policy in THRESHOLD_POLICIES:
        values["margin_threshold"] = 0.1
    return MoEConfig(**(values | changes))


def layer_of(policy: str = DROPLESS, **changes: Any) -> MoELayer:
    """A layer whose router has favourites, so that capacity is scarce."""
    layer = MoELayer(config(policy, **changes), layer=3)
    with torch.no_grad():
        layer.router.weight.mul_(4)
    return layer


def written_out(layer: MoELayer, x_TD: Tensor, gates_TK: Tensor, expert_TK: Tensor) -> Tensor:
    """Run every expert on every token, and take what was granted."""
    y_ETD = layer.experts.padded(x_TD.expand(layer.config.num_experts, *x_TD.shape))
    y_TKD = y_ETD[expert_TK.clamp(min=0), torch.arange(len(x_TD))[:, None]]
    return (y_TKD * (gates_TK * (expert_TK >= 0))[..., None]).sum(1)


def experts_of(layer: MoELayer, x_TD: Tensor, output: MoEOutput) -> tuple[Tensor, Tensor]:
    """Return what was granted, (T, K), and the probabilities."""
    probs_TE = layer.router(x_TD).probs_TE
    return (layer.router.choose(probs_TE, layer.config.top_k) if output.plan is None else output.plan.expert_TK), probs_TE


@pytest.mark.parametrize(
    ("policy", "renormalise"), [(name, flag) for name in EVERY for flag in (False, True) if not flag or name not in ONE_EXPERT_POLICIES]
)
def test_the_branch_is_the_granted_experts_weighted_by_the_routers_probabilities(policy: str, renormalise: bool) -> None:
    layer, x_BSD = layer_of(policy, renormalise=renormalise), torch.randn(2, 16, 8)
    output = layer(x_BSD)
    x_TD = x_BSD.view(-1, 8)
    expert_TK, probs_TE = experts_of(layer, x_TD, output)
    wanted = written_out(layer, x_TD, gates_of(probs_TE, expert_TK, renormalise=renormalise), expert_TK)
    assert torch.allclose(output.y_BSD.view(-1, 8), wanted, atol=1e-6)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_token_that_no_expert_serves_gets_exact_zero(policy: str) -> None:
    layer, x_BSD = layer_of(policy, capacity_factor=0.4, activation="gelu", bias=True), torch.randn(2, 16, 8)
    torch.nn.init.normal_(layer.experts.down_bias)
    output = layer(x_BSD)
    assert output.plan is not None
    served_T = output.plan.covered_T
    assert 0 < int(served_T.sum()) < 32
    assert int(output.stats.uncovered) == int((~served_T).sum())
    assert not output.y_BSD.view(-1, 8)[~served_T].any()
    assert output.y_BSD.view(-1, 8)[served_T].all(dim=1).all()


@pytest.mark.parametrize("policy", EVERY)
def test_gradients_reach_the_router_through_granted_gates(policy: str) -> None:
    layer, x_BSD = layer_of(policy), torch.randn(2, 16, 8)
    layer(x_BSD).y_BSD.square().sum().backward()
    assert layer.router.weight.grad.norm() > 1e-4
    for name, parameter in layer.named_parameters():
        assert parameter.grad.norm() > 0, name


@pytest.mark.parametrize("policy", [DROPLESS, "top1", "capsel2", "augment"])
def test_gradcheck_in_float64(policy: str) -> None:
    layer = layer_of(policy, d_model=4, d_expert=4, z_loss_weight=0.1, load_balance_weight=0.1).double()
    x_BSD = torch.randn(2, 6, 4, dtype=torch.float64, requires_grad=True)
    names, parameters = zip(*layer.named_parameters(), strict=True)

    def branch(x_BSD: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        output = torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), (x_BSD,))
        return output.y_BSD, output.losses["z"], output.losses["load_balance"]

    assert torch.autograd.gradcheck(branch, (x_BSD, *parameters), fast_mode=True)


@pytest.mark.parametrize("policy", EVERY)
def test_masked_positions_change_nothing_whatever_they_hold(policy: str) -> None:
    layer = layer_of(policy, z_loss_weight=0.1, load_balance_weight=0.1)
    real, mask_BS = torch.randn(1, 12, 8), torch.tensor([[True] * 12 + [False] * 8])
    padded = torch.cat((real, torch.full((1, 8, 8), torch.nan)), dim=1)
    alone, output = layer(real), layer(padded, mask_BS)
    assert torch.equal(output.y_BSD[:, :12], alone.y_BSD)
    assert not output.y_BSD[:, 12:].any()
    assert {name: value.item() for name, value in output.losses.items()} == pytest.approx(
        {name: value.item() for name, value in alone.losses.items()}
    )
    for name in ("tokens", "uncovered", "requested", "accepted", "uncertain", "expert_load_E"):
        assert torch.equal(getattr(output.stats, name), getattr(alone.stats, name)), name
    grads = []
    for found in (alone, output):
        layer.zero_grad()
        (found.y_BSD.square().sum() + sum(found.losses.values())).backward()
        grads.append([parameter.grad.clone() for parameter in layer.parameters()])
    assert all(torch.allclose(one, other, atol=1e-6) for one, other in zip(*grads, strict=True))


def test_masked_positions_in_front_take_no_capacity() -> None:
    layer = layer_of("top1", capacity_factor=1.0)
    x_BSD = torch.randn(1, 1, 8).expand(1, 16, 8)  # all want the same expert, which takes ceil(8 / 4) of the 8 real ones
    output = layer(x_BSD, torch.arange(16)[None] >= 8)
    assert output.y_BSD[0].any(dim=1).nonzero()[:, 0].tolist() == [8, 9]


@pytest.mark.parametrize("policy", EVERY)
def test_checkpointing_makes_the_same_plan_and_the_same_gradients(policy: str) -> None:
    layer, x_BSD = layer_of(policy, load_balance_weight=0.1), torch.randn(2, 16, 8, requires_grad=True)
    outputs: list[MoEOutput] = []

    def branch(x_BSD: Tensor) -> tuple[Tensor, Tensor]:
        outputs.append(layer(x_BSD))
        return outputs[-1].y_BSD, outputs[-1].losses["load_balance"]

    grads = []
    for call in (branch, lambda x_BSD: checkpoint(branch, x_BSD, use_reentrant=False)):
        with set_checkpoint_early_stop(False):  # or the recompute would end before the output that is looked at below
            y_BSD, loss = call(x_BSD)
        grads.append(torch.autograd.grad(y_BSD.square().sum() + loss, (x_BSD, *layer.parameters())))
    assert all(torch.equal(one, other) for one, other in zip(*grads, strict=True))
    assert len(outputs) == 3  # plain, checkpointed, recomputed
    for again in outputs[1:]:
        assert torch.equal(again.stats.expert_load_E, outputs[0].stats.expert_load_E)
        if again.plan is not None and outputs[0].plan is not None:
            assert torch.equal(again.plan.slot_TK, outputs[0].plan.slot_TK)


@pytest.mark.parametrize("policy", [DROPLESS, "capsel2"])
def test_a_call_leaves_nothing_behind(policy: str) -> None:
    layer = layer_of(policy, load_balance_weight=0.1)
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    attributes = set(vars(layer)) | set(vars(layer.router)) | set(vars(layer.experts))
    layer(torch.randn(2, 16, 8))
    assert set(vars(layer)) | set(vars(layer.router)) | set(vars(layer.experts)) == attributes
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())


@pytest.mark.parametrize("policy", EVERY)
def test_autocast_routes_in_float32_and_computes_in_bfloat16(policy: str) -> None:
    layer, x_BSD = layer_of(policy), torch.randn(2, 16, 8)
    exact = layer(x_BSD)
    with torch.autocast("cpu", torch.bfloat16):
        output = layer(x_BSD)
    assert output.y_BSD.dtype == torch.bfloat16
    assert torch.equal(output.stats.expert_load_E, exact.stats.expert_load_E)
    assert (output.y_BSD - exact.y_BSD).norm() < 0.02 * exact.y_BSD.norm()
    output.y_BSD.float().square().sum().backward()
    assert {parameter.grad.dtype for parameter in layer.parameters()} == {torch.float32}


def test_evaluation_has_its_own_capacity_and_leaves_the_trainings_alone() -> None:
    layer, x_BSD = layer_of("capsel2", capacity_factor=0.5, eval_capacity_factor=2.0), torch.randn(2, 16, 8)
    capacities = []
    for training in (True, False, True):
        layer.train(training)
        capacities.append(layer(x_BSD).plan.capacity)
    assert capacities == [4, 16, 4]


def test_evaluation_without_a_factor_of_its_own_has_the_trainings() -> None:
    assert layer_of("capsel2", capacity_factor=0.5).eval()(torch.randn(2, 16, 8)).plan.capacity == 4


@pytest.mark.parametrize("policy", POLICIES)
def test_without_drops_every_token_gets_what_its_policy_asks_for(policy: str) -> None:
    layer, x_BSD = layer_of(policy), torch.randn(2, 16, 8)
    output = layer(x_BSD, drop_free=True)
    probs_TK = layer.router(x_BSD.view(-1, 8)).probs_TE.topk(2).values
    uncertain_T = probs_TK[:, 0] - probs_TK[:, 1] <= 0.1
    second = {
        "primary+rescue": 0,
        **dict.fromkeys(ONE_EXPERT_POLICIES, 0),
        **dict.fromkeys(THRESHOLD_POLICIES, int(uncertain_T.sum())),
    }.get(policy, 32)
    assert output.plan is not None
    assert (output.plan.expert_TK >= 0).sum(0).tolist() == [32, second]
    assert int(output.stats.uncovered) == 0
    expert_TK, probs_TE = experts_of(layer, x_BSD.view(-1, 8), output)
    wanted = written_out(layer, x_BSD.view(-1, 8), gates_of(probs_TE, expert_TK, renormalise=False), expert_TK)
    assert torch.allclose(output.y_BSD.view(-1, 8), wanted, atol=1e-6)


def test_without_drops_padding_takes_no_second_expert_away() -> None:
    """Masked positions make the accrued share of capsel2-causal smaller; without drops there is no share."""
    layer, x_BSD = layer_of("capsel2-causal", margin_threshold=1.0), torch.randn(2, 16, 8)
    mask_BS = torch.zeros(2, 16, dtype=torch.bool)
    mask_BS[:, :4] = True
    plan = layer(x_BSD, mask_BS, drop_free=True).plan
    assert plan is not None
    assert ((plan.expert_TK >= 0).sum(1) == 2 * mask_BS.reshape(-1)).all()


def test_the_threshold_is_read_at_each_call() -> None:
    layer, x_BSD = layer_of("capsel2-online", capacity_factor=4.0), torch.randn(2, 16, 8)
    counts = []
    for threshold in (0.0, 0.3, 1.0):
        layer.threshold.fill_(threshold)
        counts.append(int(layer(x_BSD).stats.uncertain))
    assert 0 == counts[0] < counts[1] < counts[2] == 32
    assert "threshold" in layer.state_dict()


@pytest.mark.parametrize("policy", EVERY)
@pytest.mark.parametrize(
    ("shape", "num_experts", "factor", "masked"),
    [((1, 5), 1, 1.0, False), ((2, 0), 4, 1.0, False), ((1, 2), 8, 1.0, False), ((2, 4), 4, 1000.0, False), ((2, 4), 4, 1.0, True)],
    ids=["one-expert", "no-tokens", "fewer-tokens-than-experts", "more-room-than-tokens", "all-masked"],
)
def test_degenerate_sizes_are_defined(policy: str, shape: tuple[int, int], num_experts: int, factor: float, masked: bool) -> None:
    factors = {"capacity_factor": factor} if policy != DROPLESS else {"top_k": min(2, num_experts)}
    layer = layer_of(policy, num_experts=num_experts, load_balance_weight=0.1, z_loss_weight=0.1, **factors)
    x_BSD = torch.randn(*shape, 8, requires_grad=True)
    output = layer(x_BSD, torch.zeros(shape, dtype=torch.bool) if masked else None)
    assert output.y_BSD.shape == x_BSD.shape
    assert int(output.stats.tokens) == (0 if masked else math.prod(shape))
    assert bool(output.y_BSD.any()) == (not masked and math.prod(shape) > 0)
    (output.y_BSD.sum() + sum(output.losses.values())).backward()
    assert all(parameter.grad is not None and torch.isfinite(parameter.grad).all() for parameter in layer.parameters())


def test_equal_scores_go_to_the_first_experts_and_tokens() -> None:
    layer = layer_of("top2", capacity_factor=0.5)
    torch.nn.init.zeros_(layer.router.weight)
    plan = layer(torch.randn(1, 8, 8)).plan
    assert plan.expert_TK.tolist() == [[0, 1]] + [[-1, -1]] * 7


def test_a_huge_capacity_allocates_no_more_than_the_tokens() -> None:
    layer = layer_of("capsel2", capacity_factor=1024, d_model=1024, d_expert=8, num_experts=2)
    assert layer(torch.randn(1, 64, 1024)).plan.capacity == 32768  # rows of 1024 floats each would be 256 MiB


def test_no_capacity_at_all_keeps_the_graph_whole() -> None:
    layer = layer_of("capsel2")
    x_BSD, mask_BS = torch.randn(1, 4, 8, requires_grad=True), torch.zeros(1, 4, dtype=torch.bool)
    output = layer(x_BSD, mask_BS)
    assert output.plan.capacity == 0
    output.y_BSD.sum().backward()
    assert not layer.experts.up_proj.grad.any()
    assert not layer.router.weight.grad.any()


def test_losses_are_returned_with_their_weights_only_if_they_are_on() -> None:
    x_BSD = torch.randn(2, 16, 8)
    assert layer_of()(x_BSD).losses == {}
    layer = layer_of(load_balance_weight=0.5, z_loss_weight=0.25)
    twice = MoELayer(config(load_balance_weight=1.0, z_loss_weight=0.5))
    twice.load_state_dict(layer.state_dict())
    one, other = layer(x_BSD).losses, twice(x_BSD).losses
    assert set(one) == {"load_balance", "z"}
    assert all(other[name].item() == pytest.approx(2 * one[name].item()) for name in one)


def test_the_loss_free_bias_is_part_of_the_state_and_of_the_choice() -> None:
    layer, x_BSD = layer_of(loss_free_bias_rate=0.01), torch.randn(2, 16, 8)
    assert layer.state_dict()["router.bias_E"].tolist() == [0, 0, 0, 0]
    layer.router.add_bias(torch.tensor([0.0, 2.0, 0.0, 0.0]))
    assert layer(x_BSD).stats.expert_load_E[1] == 32


def test_nan_in_a_real_token_names_layer_and_position() -> None:
    x_BSD = torch.randn(2, 16, 8)
    x_BSD[1, 5] = torch.nan
    with pytest.raises(UsageError, match=r"layer 3, token 21 \(sequence 1, position 5\)"):
        layer_of("capsel2")(x_BSD)


@pytest.mark.parametrize(
    ("x_BSD", "mask_BS", "message"),
    [
        (torch.zeros(4, 8), None, r"\(sequences, positions, 8\)"),
        (torch.zeros(1, 4, 7), None, r"\(1, 4, 7\)"),
        (torch.zeros(1, 4, 8), torch.ones(1, 3, dtype=torch.bool), r"must be bool, \(1, 4\)"),
        (torch.zeros(1, 4, 8), torch.ones(1, 4), "torch.float32"),
    ],
)
def test_inputs_of_a_wrong_shape_are_refused(x_BSD: Tensor, mask_BS: Tensor | None, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        layer_of()(x_BSD, mask_BS)
