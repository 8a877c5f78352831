"""Models of Hugging Face through admission: as before where capacity is ample, counted drops where it is not, and back again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moetriage.errors import UsageError
from moetriage.train.admission import POLICIES, THRESHOLD_POLICIES
from moetriage.train.metrics import RoutingStats, combine
from moetriage.train.patch import Patched, patch
from moetriage.train.threshold import MarginMedian

transformers = pytest.importorskip("transformers")

SIZES: dict[str, Any] = {
    "vocab_size": 53,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 6},
    "Olmoe": {"num_experts": 6},
    "Qwen2Moe": {"num_experts": 6, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24, "decoder_sparse_step": 1},
    "Qwen3Moe": {"num_experts": 6, "moe_intermediate_size": 24, "norm_topk_prob": True, "head_dim": 8},
}


def model_of(family: str, **changes: Any) -> nn.Module:
    """A tiny model whose routers have favourites."""
    config = getattr(transformers, f"{family}Config")(**(SIZES | FAMILIES[family] | changes))
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("gate.weight"):
            nn.init.normal_(parameter, std=0.3)
    return model


def tokens_of(*shape: int) -> Tensor:
    return torch.randint(1, 53, shape)


@contextmanager
def counted(handle: Patched) -> Iterator[list[RoutingStats]]:
    """Collect the counts of each block call inside; they are there after it."""
    found: list[RoutingStats] = []
    with handle.record() as calls:
        yield found
    found += [call.stats for call in calls]


def patched(model: nn.Module, policy: str = "top2", factor: float = 1.25, **settings: Any) -> Patched:
    threshold = 0.1 if policy in THRESHOLD_POLICIES else None
    return patch(model, policy=policy, capacity_factor=factor, **({"margin_threshold": threshold} | settings))


@pytest.mark.parametrize("policy", ["top2", "bpr-top2", "fixed-top2"])
@pytest.mark.parametrize("family", FAMILIES)
def test_with_ample_capacity_the_model_computes_what_it_did(family: str, policy: str) -> None:
    model, tokens_BS = model_of(family), tokens_of(3, 12)
    before = model(tokens_BS).logits
    handle = patched(model, policy, 6.0)
    with counted(handle) as records:
        assert torch.allclose(model(tokens_BS).logits, before, atol=1e-5)
    assert [int(stats.accepted.sum()) for stats in records] == [72, 72]


@pytest.mark.parametrize("family", FAMILIES)
def test_scarce_capacity_drops_and_counts_and_removal_brings_the_model_back(family: str) -> None:
    model, tokens_BS = model_of(family), tokens_of(3, 12)
    before = model(tokens_BS).logits
    handle = patched(model, "capsel2", 0.5)
    assert len(handle.blocks) == 2
    with counted(handle) as records:
        assert not torch.allclose(model(tokens_BS).logits, before, atol=1e-3)
    for stats in records:
        assert int(stats.tokens) == 36
        assert stats.expert_load_E.max() <= 3  # ceil(0.5 * 36 / 6)
        assert int(stats.uncovered) >= 36 - 6 * 3
    handle.remove()
    handle.remove()
    assert torch.equal(model(tokens_BS).logits, before)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_trains_the_router_of_a_patched_model(policy: str) -> None:
    model, tokens_BS = model_of("Qwen3Moe").train(), tokens_of(2, 12)
    patched(model, policy, 0.75, renormalise=False)
    model(tokens_BS, labels=tokens_BS).loss.backward()
    for layer in model.model.layers:
        assert layer.mlp.gate.weight.grad.norm() > 0
        assert layer.mlp.experts.down_proj.grad.norm() > 0


def test_padding_takes_no_capacity_and_counts_nowhere() -> None:
    model, tokens_BS = model_of("Mixtral"), tokens_of(1, 10)
    handle = patched(model, "capsel2", 0.75)
    with counted(handle) as alone:
        wanted = model(tokens_BS, attention_mask=torch.ones(1, 10)).logits
    padded_BS, mask_BS = torch.cat((torch.zeros(1, 6, dtype=torch.int64), tokens_BS), 1), torch.tensor([[0] * 6 + [1] * 10])
    with counted(handle) as records:
        found = model(padded_BS, attention_mask=mask_BS, position_ids=(mask_BS.cumsum(1) - 1).clamp(min=0)).logits
    assert torch.allclose(found[:, 6:], wanted, atol=1e-5)
    for one, other in zip(records, alone, strict=True):
        assert int(one.tokens) == 10
        assert torch.equal(one.expert_load_E, other.expert_load_E)


def test_a_mask_holds_for_its_own_forward_whichever_module_is_called() -> None:
    model, tokens_BS = model_of("Qwen3Moe"), tokens_of(2, 7)
    handle, mask_BS = patched(model, "top2", 6.0), torch.ones(2, 7, dtype=torch.int64)
    mask_BS[0, :3] = 0
    calls: list[Any] = [
        lambda: model(tokens_BS, attention_mask=mask_BS),
        lambda: model.model(tokens_BS),
        lambda: model.model(tokens_BS, mask_BS),
        lambda: model(tokens_BS),
    ]
    with counted(handle) as records:
        for call in calls:
            call()
    assert [int(stats.tokens) for stats in records[::2]] == [11, 14, 11, 14]


def test_a_threshold_can_follow_what_the_blocks_recorded() -> None:
    model, tokens_BS = model_of("Mixtral"), tokens_of(3, 12)
    handle, median = patched(model, "capsel2-online", 1.25), MarginMedian()
    assert handle.threshold is not None
    with handle.record() as calls:
        model(tokens_BS)
    median.update(torch.cat([call.plan.margin_T for call in calls]))
    handle.threshold.copy_(median.value)
    with counted(handle) as records:
        model(tokens_BS)
    assert sum(int(stats.uncertain) for stats in records) == 36  # half of 36 tokens in 2 layers


def test_a_mask_that_does_not_tell_padding_is_warned_of() -> None:
    model, tokens_BS = model_of("Mixtral"), tokens_of(2, 6)
    patched(model)
    with pytest.warns(UserWarning, match="attention_mask of 4 dimensions: does not tell padding from tokens"):
        model(tokens_BS, attention_mask=torch.zeros(2, 1, 6, 6))


def test_a_handle_that_was_removed_leaves_the_next_patch_alone() -> None:
    model, tokens_BS = model_of("Mixtral"), tokens_of(2, 6)
    first = patched(model, "top2", 0.25)
    first.remove()
    before = model(tokens_BS).logits
    patched(model, "top2", 0.25)
    first.remove()
    assert not torch.allclose(model(tokens_BS).logits, before)


def test_generation_with_a_cache_goes_through_admission() -> None:
    model = model_of("Mixtral")
    handle = patched(model, "top2", 6.0)
    tokens_BS = tokens_of(2, 5)
    with counted(handle) as records:
        found = model.generate(tokens_BS, attention_mask=torch.ones_like(tokens_BS), max_new_tokens=4, do_sample=False)
    assert [int(stats.tokens) for stats in records] == [10, 10, 2, 2, 2, 2, 2, 2]
    handle.remove()
    assert torch.equal(model.generate(tokens_BS, attention_mask=torch.ones_like(tokens_BS), max_new_tokens=4, do_sample=False), found)


def test_router_logits_of_the_model_still_come_out() -> None:
    model, tokens_BS = model_of("Qwen3Moe"), tokens_of(2, 8)
    before = model(tokens_BS, output_router_logits=True).router_logits
    patched(model, "top2", 6.0)
    after = model(tokens_BS, output_router_logits=True).router_logits
    assert [tuple(logits.shape) for logits in after] == [(16, 6), (16, 6)]
    assert all(torch.allclose(one, other, atol=1e-5) for one, other in zip(before, after, strict=True))


def test_checkpointing_counts_nothing_twice_and_keeps_the_gradients() -> None:
    model, tokens_BS = model_of("Mixtral").train(), tokens_of(2, 12)
    handle = patched(model, "capsel2", 0.75)
    grads, counts = [], []
    for checkpointed in (False, True):
        if checkpointed:
            getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
        model.zero_grad()
        with counted(handle) as records:
            model(tokens_BS, labels=tokens_BS).loss.backward()
        grads.append([parameter.grad.clone() for parameter in model.parameters()])
        counts.append(int(combine(records).tokens))
    assert counts == [48, 48]
    assert all(torch.allclose(one, other, atol=1e-6) for one, other in zip(*grads, strict=True))


def test_evaluation_has_a_capacity_of_its_own() -> None:
    model, tokens_BS, loads = model_of("Mixtral"), tokens_of(3, 12), []
    handle = patched(model, "top2", 0.5, eval_capacity_factor=6.0)
    for training in (True, False, True):
        model.train(training)
        with counted(handle) as records:
            model(tokens_BS)
        loads.append(int(records[0].expert_load_E.sum()))
    assert loads[0] == loads[2] <= 18 < loads[1] == 72


def test_the_threshold_is_read_at_each_call() -> None:
    model, tokens_BS, counts = model_of("Mixtral"), tokens_of(3, 12), []
    handle = patched(model, "capsel2-online", 6.0)
    for threshold in (0.0, 1.0):
        handle.threshold.fill_(threshold)
        with counted(handle) as records:
            model(tokens_BS)
        counts.append(int(records[0].uncertain))
    assert counts == [0, 36]


def test_more_than_two_experts_are_refused_unless_narrowing_is_accepted() -> None:
    model, tokens_BS = model_of("Olmoe", num_experts_per_tok=4), tokens_of(3, 12)
    with pytest.raises(UsageError, match=r"model\.layers\.0\.mlp gives each token 4 experts.*narrow=True"):
        patched(model)
    handle = patched(model, "top2", 6.0, narrow=True)
    with counted(handle) as records:
        model(tokens_BS)
    assert int(records[0].accepted.sum()) == 72


def test_nan_in_the_model_names_layer_and_position() -> None:
    model = model_of("Mixtral")
    patched(model)
    with torch.no_grad():
        model.model.layers[1].mlp.gate.weight[2] = torch.nan
    with pytest.raises(UsageError, match=r"layer 1, token 0 \(sequence 0, position 0\)"):
        model(tokens_of(2, 6))


def test_nan_at_padding_is_nobodys_fault_and_reaches_no_router() -> None:
    model, tokens_BS = model_of("Mixtral").train(), tokens_of(2, 6)
    patched(model, "capsel2", 1.25)
    mask_BS = torch.ones_like(tokens_BS)
    mask_BS[0, :2] = 0
    # In the last layer, as attention would spread it to the others.
    norm = model.model.layers[-1].post_attention_layernorm
    norm.register_forward_hook(lambda _module, _args, x_BSD: x_BSD.masked_fill(mask_BS[..., None] == 0, torch.nan))
    logits_BSV = model(tokens_BS, attention_mask=mask_BS).logits
    logits_BSV[mask_BS == 1].sum().backward()
    for layer in model.model.layers:
        assert torch.isfinite(layer.mlp.gate.weight.grad).all()


def test_bfloat16_models_keep_their_type() -> None:
    model = model_of("Qwen2Moe").bfloat16()
    patched(model, "capsel2", 0.75)
    assert model(tokens_of(2, 6)).logits.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"policy": "capsel3"}, "policy 'capsel3': must be"),
        ({"policy": "dropless"}, "what the model does unpatched"),
        ({"policy": "top1"}, "renormalise with policy 'top1'.*use renormalise=False"),
        ({"policy": "top2", "factor": 0.0}, "capacity factor 0.0"),
        ({"policy": "capsel2", "margin_threshold": None}, "needs a finite margin_threshold"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], message: str) -> None:
    model = model_of("Mixtral")
    with pytest.raises(UsageError, match=message):
        patched(model, **settings)
    assert "forward" not in vars(model.model.layers[0].mlp.gate)


def test_a_model_without_moe_blocks_is_refused_in_one_line() -> None:
    with pytest.raises(
        UsageError, match="Linear has no MoE block that can be patched: the families are Mixtral, Olmoe, Qwen2Moe, Qwen3Moe"
    ) as caught:
        patched(nn.Linear(2, 2))
    assert "\n" not in str(caught.value)


def test_patching_twice_is_refused() -> None:
    model = model_of("Mixtral")
    patched(model)
    with pytest.raises(UsageError, match=r"model\.layers\.0\.mlp is patched already"):
        patched(model)
