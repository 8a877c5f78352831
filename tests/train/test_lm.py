"""The language model against Hugging Face's, its losses against torch's, and what it promises of routing."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from moetriage.errors import UsageError
from moetriage.train import cross_entropy, model_config
from moetriage.train.cross_entropy import CHUNK, GROUP, linear_cross_entropy
from moetriage.train.lm import NanoMoE
from moetriage.train.model_config import ModelConfig
from moetriage.train.moe_config import MoEConfig
from moetriage.train.norms import RMSNorm
from moetriage.train.train_config import PRESETS, Preset


def qwen3(**changes: Any) -> ModelConfig:
    moe = {"d_model": 64, "d_expert": 48, "num_experts": 8, "top_k": 3, "renormalise": True} | changes.pop("moe", {})
    values = {"style": "qwen3", "vocab_size": 97, "context": 32, "n_layer": 3, "d_model": 64, "n_head": 4, "n_kv_head": 2, "head_dim": 24}
    return ModelConfig(**(values | {"moe": MoEConfig(**moe)} | changes))


def gpt2(**changes: Any) -> ModelConfig:
    moe = {"d_model": 48, "d_expert": 64, "num_experts": 4, "renormalise": False, "policy": "capsel2", "capacity_factor": 1.25}
    moe |= {"margin_threshold": 0.04, "activation": "gelu", "bias": True} | changes.pop("moe", {})
    values = {"style": "gpt2", "vocab_size": 61, "context": 16, "n_layer": 2, "d_model": 48, "n_head": 4, "norm_eps": 1e-5}
    return ModelConfig(**(values | {"moe": MoEConfig(**moe)} | changes))


def spread_out(model: torch.nn.Module) -> None:
    """Give norms and biases values of their own, so that one that is not applied shows; and routers clear favourites."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.2)
            else:
                parameter.mul_(4)


def hugging_face(config: ModelConfig, model: NanoMoE) -> Any:
    """Return transformers' model of the same settings with the same weights."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    settings = Qwen3MoeConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.d_model,
        num_hidden_layers=config.n_layer,
        num_attention_heads=config.n_head,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_width,
        max_position_embeddings=config.context,
        rms_norm_eps=config.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_base},
        tie_word_embeddings=config.tied,
        num_experts=config.moe.num_experts,
        num_experts_per_tok=config.moe.top_k,
        moe_intermediate_size=config.moe.d_expert,
        norm_topk_prob=config.moe.renormalise,
    )
    other = Qwen3MoeForCausalLM(settings)
    ours = model.state_dict()
    weights = {name.replace("mlp.router.", "mlp.gate."): tensor for name, tensor in ours.items() if "experts" not in name}
    for layer in range(config.n_layer):
        prefix = f"model.layers.{layer}.mlp.experts."
        gate, up, down = (ours[f"{prefix}{name}_proj"].transpose(1, 2) for name in ("gate", "up", "down"))
        weights |= {f"{prefix}gate_up_proj": torch.cat([gate, up], dim=1), f"{prefix}down_proj": down}
    missing = other.load_state_dict(weights, strict=False).missing_keys
    assert missing == (["lm_head.weight"] if config.tied else [])
    other.tie_weights()
    return other.eval()


@pytest.mark.parametrize("changes", [{}, {"tied": False}, {"n_kv_head": None, "moe": {"renormalise": False, "top_k": 1}}], ids=str)
def test_qwen3_logits_equal_those_of_hugging_face(changes: dict[str, Any]) -> None:
    pytest.importorskip("transformers")
    config = qwen3(**changes)
    model = NanoMoE(config).eval()
    spread_out(model)
    other = hugging_face(config, model)
    tokens = torch.randint(0, config.vocab_size, (3, config.context))
    with torch.no_grad():
        ours, theirs = model(tokens).logits_BSV, other(tokens).logits
    assert ours is not None
    assert theirs.abs().max() > 1
    assert (ours - theirs).abs().max() < 1e-5 * theirs.abs().max()


def test_qwen3_gradients_equal_those_of_hugging_face() -> None:
    pytest.importorskip("transformers")
    config = qwen3()
    model = NanoMoE(config)
    spread_out(model)
    other = hugging_face(config, model).train()
    tokens, targets = torch.randint(0, config.vocab_size, (2, 2, config.context))
    loss = model(tokens, targets).loss
    assert loss is not None
    loss.backward()
    F.cross_entropy(other(tokens).logits.flatten(0, 1), targets.flatten()).backward()
    theirs = dict(other.named_parameters())
    for name, parameter in model.named_parameters():
        if "experts" not in name:
            expected = theirs[name.replace("mlp.router.", "mlp.gate.")].grad
            assert torch.allclose(parameter.grad, expected, rtol=1e-3, atol=1e-5 * float(expected.abs().max())), name


@pytest.mark.parametrize("config", [qwen3(), qwen3(tied=False), gpt2()], ids=["tied", "untied", "gpt2"])
def test_the_loss_is_the_cross_entropy_of_the_logits(config: ModelConfig) -> None:
    model = NanoMoE(config).eval()
    spread_out(model)
    tokens, targets = torch.randint(0, config.vocab_size, (2, 4, config.context))
    targets[0, :5] = -1
    logits, loss = model(tokens).logits_BSV, model(tokens, targets).loss
    assert logits is not None
    assert torch.allclose(loss, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1), atol=1e-5)


@pytest.mark.parametrize("n_tokens", [1, CHUNK, 2 * CHUNK + 7, GROUP + CHUNK + 7])
@pytest.mark.parametrize("kept", [0.0, 0.7, 1.0])
def test_chunked_cross_entropy_has_the_value_and_gradients_of_the_plain_one(n_tokens: int, kept: float) -> None:
    hidden, weight = torch.randn(n_tokens, 16, requires_grad=True), torch.randn(50, 16, requires_grad=True)
    targets = torch.randint(0, 50, (n_tokens,)).masked_fill(torch.rand(n_tokens) > kept, -1)
    loss = linear_cross_entropy(hidden, weight, targets)
    (3 * loss).backward()
    found = [hidden.grad, weight.grad]
    hidden.grad = weight.grad = None
    expected = F.cross_entropy(hidden @ weight.T, targets, ignore_index=-1, reduction="sum") / max(1, int((targets >= 0).sum()))
    (3 * expected).backward()
    assert torch.allclose(loss, expected, atol=1e-6)
    assert torch.allclose(found[0], hidden.grad, atol=1e-6)
    assert torch.allclose(found[1], weight.grad, atol=1e-5)


def test_without_gradients_the_logits_gradient_is_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = []

    def spy(*arguments: Any, **options: Any) -> Any:
        kept.append(options["kept"])
        return exponentials(*arguments, **options)

    exponentials = cross_entropy._exponentials
    monkeypatch.setattr(cross_entropy, "_exponentials", spy)
    weight = torch.randn(9, 4, requires_grad=True)
    with torch.no_grad():
        without = linear_cross_entropy(torch.randn(5, 4), weight, torch.arange(5))
    assert not without.requires_grad
    linear_cross_entropy(torch.randn(5, 4), weight, torch.arange(5)).backward()
    assert kept == [False, True]


def test_a_word_that_seemed_impossible_has_its_finite_loss_and_gradient() -> None:
    hidden, weight = torch.eye(2, requires_grad=True), torch.tensor([[400.0, 0.0], [-400.0, 0.0]], requires_grad=True)
    loss = linear_cross_entropy(hidden, weight, torch.tensor([1, -1]))
    loss.backward()
    assert loss.item() == 800
    assert torch.equal(weight.grad, torch.tensor([[1.0, 0.0], [-1.0, 0.0]]))
    assert torch.equal(hidden.grad, torch.tensor([[800.0, 0.0], [0.0, 0.0]]))


def test_rms_norm_is_torchs_with_its_gradients() -> None:
    norm = RMSNorm(24, 1e-3).double()
    with torch.no_grad():
        norm.weight.copy_(torch.randn(24))
    x = torch.randn(2, 5, 24, requires_grad=True)
    expected = F.rms_norm(x, (24,), norm.weight.float(), 1e-3)
    assert torch.allclose(norm(x), expected, atol=1e-6)
    upstream = torch.randn(2, 5, 24)
    ours = torch.autograd.grad(norm(x), (x, norm.weight), upstream)
    theirs = torch.autograd.grad(F.rms_norm(x, (24,), norm.weight.float(), 1e-3), (x, norm.weight), upstream)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.allclose(one.float(), other.float(), atol=1e-5)


@pytest.mark.parametrize("config", [qwen3(), gpt2(moe={"policy": "capsel2-causal"})], ids=["dropless", "capsel2-causal"])
def test_no_logit_depends_on_a_later_token_of_its_sequence(config: ModelConfig) -> None:
    model = NanoMoE(config).eval()
    spread_out(model)
    tokens = torch.randint(0, config.vocab_size, (1, config.context))
    changed = tokens.clone()
    changed[:, config.context // 2 :] = (changed[:, config.context // 2 :] + 1) % config.vocab_size
    first, second = (model(ids).logits_BSV for ids in (tokens, changed))
    assert first is not None
    assert second is not None
    half = config.context // 2
    assert torch.allclose(first[:, :half], second[:, :half], atol=1e-5)
    assert not torch.allclose(first[:, half:], second[:, half:], atol=1e-2)


def test_positions_matter_in_both_styles() -> None:
    for config in (qwen3(), gpt2()):
        model = NanoMoE(config).eval()
        spread_out(model)
        tokens = torch.tensor([[5, 9, 9, 9, 2, 7]])
        logits = model(tokens).logits_BSV
        assert logits is not None
        assert not torch.allclose(logits[0, 1], logits[0, 2], atol=1e-3)
        swapped = model(tokens[:, [1, 0, 2, 3, 4, 5]]).logits_BSV
        assert swapped is not None
        assert not torch.allclose(logits[0, 5], swapped[0, 5], atol=1e-4)


def test_without_drops_every_token_gets_what_its_policy_asks_for() -> None:
    config = gpt2(moe={"capacity_factor": 0.3})
    model = NanoMoE(config).eval()
    spread_out(model)
    tokens, targets = torch.randint(0, config.vocab_size, (2, 4, config.context))
    dropping, free = model(tokens, targets), model(tokens, targets, drop_free=True)
    assert sum(int(stats.uncovered) for stats in dropping.stats) > 0
    assert sum(int(stats.uncovered) for stats in free.stats) == 0
    assert dropping.loss != free.loss
    for stats in free.stats:
        assert torch.equal(stats.requested, stats.accepted)


def test_what_routing_did_comes_layer_by_layer() -> None:
    config = gpt2()
    out = NanoMoE(config)(torch.randint(0, config.vocab_size, (4, config.context)))
    assert len(out.stats) == len(out.plans) == config.n_layer
    assert [int(stats.tokens) for stats in out.stats] == [4 * config.context] * config.n_layer
    assert out.losses == {}
    dropless = qwen3(moe={"load_balance_weight": 0.5, "z_loss_weight": 0.25})
    out = NanoMoE(dropless)(torch.randint(0, dropless.vocab_size, (2, 8)))
    assert out.plans == (None,) * dropless.n_layer
    assert set(out.losses) == {"load_balance", "z"}
    # One layer's is 0.5 when even; three layers are added.
    assert 3 * 0.5 <= out.losses["load_balance"].item() < 3 * 0.5 * 1.5


@pytest.mark.parametrize("config", [qwen3(moe={"load_balance_weight": 0.01}), gpt2()], ids=["qwen3", "gpt2"])
def test_bfloat16_computes_about_the_same_and_every_parameter_gets_a_gradient(config: ModelConfig) -> None:
    model = NanoMoE(config)
    tokens, targets = torch.randint(0, config.vocab_size, (2, 8, config.context))
    exact = model(tokens, targets).loss
    with torch.autocast("cpu", torch.bfloat16):
        out = model(tokens, targets)
    assert out.loss is not None
    assert out.loss.dtype == torch.float32
    assert out.loss.item() == pytest.approx(exact.item(), rel=0.01)
    (out.loss + sum(out.losses.values())).backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None or not parameter.grad.any()] == []


def test_an_untrained_model_knows_nothing() -> None:
    for preset in (model_config.tiny, model_config.study):
        config = preset(vocab_size=512)
        loss = NanoMoE(config)(*torch.randint(0, 512, (2, 2, 64))).loss
        assert loss is not None
        assert loss.item() == pytest.approx(math.log(512), abs=0.3)


def test_the_bundled_model_has_the_size_it_was_planned_for() -> None:
    with torch.device("meta"):
        model = NanoMoE(dataclasses.replace(model_config.bundled()))
    total = sum(parameter.numel() for parameter in model.parameters())
    # q8_0 takes 34 bytes for 32 weights: below 25 MB.
    assert 20e6 < total < 23e6
    assert total * 34 / 32 < 25e6
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            assert all(size % 32 == 0 for size in parameter.shape[-2:]), name


@pytest.mark.parametrize("preset", PRESETS.values())
def test_settings_survive_json(preset: Preset) -> None:
    config = preset.model()
    config.validate()
    assert ModelConfig.from_dict(json.loads(json.dumps(config.as_dict()))) == config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"style": "llama"}, "style 'llama': must be gpt2 or qwen3"),
        ({"n_layer": 0}, "n_layer 0: must be a whole number from 1 to 1024"),
        ({"context": 1.5}, "context 1.5"),
        ({"vocab_size": 70_000}, "at most 65536"),
        ({"norm_eps": float("nan")}, "norm_eps nan"),
        ({"n_kv_head": 3}, "n_head 4 is no multiple of n_kv_head 3"),
        ({"head_dim": None, "n_head": 5, "n_kv_head": None}, "d_model 64 is no multiple of n_head 5"),
        ({"head_dim": 7}, "must be even"),
        ({"d_model": 32}, "experts of width 64 in a model of width 32"),
        ({"moe": {"policy": "capsel3"}}, "policy 'capsel3'"),
        ({"moe": {"policy": "capsel2", "top_k": 2, "capacity_factor": 16384.0, "margin_threshold": 0.1}}, "16384"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_anything_is_built(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        NanoMoE(qwen3(**changes))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_settings_of_another_version_are_refused() -> None:
    values = qwen3().as_dict()
    with pytest.raises(UsageError, match="not the settings of a NanoMoE model"):
        ModelConfig.from_dict(values | {"n_moe": 3})


def test_a_sequence_beyond_the_context_is_refused() -> None:
    with pytest.raises(UsageError, match="at most 32 positions"):
        NanoMoE(qwen3())(torch.zeros(1, 33, dtype=torch.int64))
