"""NanoMoE: a small decoder whose feed-forward branches are MoE layers. Token ids in; loss or logits, and what routing did, out.

Style "qwen3" computes what Hugging Face's Qwen3MoeForCausalLM computes (tested with copied weights) and names its parameters likewise,
except that an expert's matrices lie stacked and as (in, out); style "gpt2" is the study's. Knows no data, optimizer or files.

Legend: B sequences, S positions, T = B * S tokens, D model width, V words of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from moetriage.errors import UsageError
from moetriage.train.admission import Plan
from moetriage.train.attention import Attention, Rotary
from moetriage.train.cross_entropy import linear_cross_entropy
from moetriage.train.metrics import RoutingStats
from moetriage.train.model_config import ModelConfig
from moetriage.train.moe import MoELayer, MoEOutput
from moetriage.train.norms import RMSNorm
from moetriage.train.product_dtype import to_product_dtype


@dataclass(frozen=True, kw_only=True)
class LMOutput:
    """What one call of the model returns.

    logits_BSV: scores of the next token; None where targets were given, as the loss does without them.
    loss: () float32, mean cross entropy in nats per target that counts; None without targets.
    losses: auxiliary losses that are on, weighted and summed over layers; add them to ``loss`` to train.
    stats, plans: what routing did, one entry a layer; a plan is None where nothing limits the experts.
    """

    logits_BSV: Tensor | None
    loss: Tensor | None
    losses: dict[str, Tensor]
    stats: tuple[RoutingStats, ...]
    plans: tuple[Plan | None, ...]


def _norm(config: ModelConfig) -> nn.Module:
    if config.style == "qwen3":
        return RMSNorm(config.d_model, config.norm_eps)
    return nn.LayerNorm(config.d_model, eps=config.norm_eps)


class Layer(nn.Module):
    """Attention and experts, each on a normalised copy of the residual, to which each adds."""

    def __init__(self, config: ModelConfig, number: int) -> None:
        super().__init__()
        self.input_layernorm = _norm(config)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = _norm(config)
        self.mlp = MoELayer(config.moe, layer=number)

    def forward(self, x_BSD: Tensor, rotary: Rotary | None, *, drop_free: bool) -> tuple[Tensor, MoEOutput]:
        x_BSD = x_BSD + self.self_attn(self.input_layernorm(x_BSD), rotary)
        branch = self.mlp(self.post_attention_layernorm(x_BSD), drop_free=drop_free)
        return x_BSD + branch.y_BSD, branch


class Decoder(nn.Module):
    """Embedding, layers and the last norm."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.d_model)
        qwen3 = config.style == "qwen3"
        self.embed_positions = None if qwen3 else nn.Embedding(config.context, config.d_model)
        self.rotary = Rotary(config) if qwen3 else None
        self.layers = nn.ModuleList(Layer(config, number) for number in range(config.n_layer))
        self.norm = _norm(config)

    def forward(self, tokens_BS: Tensor, *, drop_free: bool) -> tuple[Tensor, list[MoEOutput]]:
        x_BSD = self.embed_tokens(tokens_BS)
        if self.embed_positions is not None:
            x_BSD = x_BSD + self.embed_positions.weight[: tokens_BS.shape[1]]
        # The residual has the branches' type: in float32 each addition would move twice the memory and each norm convert its input.
        x_BSD = to_product_dtype(x_BSD)
        branches = []
        for layer in self.layers:
            x_BSD, branch = layer(x_BSD, self.rotary, drop_free=drop_free)
            branches.append(branch)
        return self.norm(x_BSD), branches


class NanoMoE(nn.Module):
    """The language model. Initial weights are drawn from torch's global generator: seed it to have the same ones."""

    def __init__(self, config: ModelConfig) -> None:
        """Raises UsageError if the settings are wrong, before anything is allocated."""
        super().__init__()
        config.validate()
        self.config = config
        self.model = Decoder(config)
        self.lm_head = None if config.tied else nn.Linear(config.d_model, config.vocab_size, bias=False)
        self._draw_weights()

    @property
    def moe_layers(self) -> tuple[MoELayer, ...]:
        return tuple(layer.mlp for layer in self.model.layers)

    @property
    def output_VD(self) -> Tensor:
        """Return the matrix that makes the logits."""
        weight: Tensor = self.model.embed_tokens.weight if self.lm_head is None else self.lm_head.weight
        return weight

    def forward(self, tokens_BS: Tensor, targets_BS: Tensor | None = None, *, drop_free: bool = False) -> LMOutput:
        """Score what follows each position.

        tokens_BS: (B, S) int64 ids, S at most the context. targets_BS: the ids that do follow; those below zero do not count.
        drop_free: give each token the experts that its policy asks for, as if capacity had no end.
        Raises UsageError for a wrong shape, and for NaN or inf in a router.
        """
        if tokens_BS.dim() != 2 or tokens_BS.shape[1] > self.config.context:
            raise UsageError(f"tokens of shape {tuple(tokens_BS.shape)}: must be (sequences, at most {self.config.context} positions)")
        hidden_BSD, branches = self.model(tokens_BS, drop_free=drop_free)
        logits_BSV = loss = None
        if targets_BS is None:
            logits_BSV = F.linear(hidden_BSD, self.output_VD)
        else:
            loss = linear_cross_entropy(to_product_dtype(hidden_BSD).flatten(0, 1), self.output_VD, targets_BS.flatten())
        return LMOutput(
            logits_BSV=logits_BSV,
            loss=loss,
            losses=_summed([branch.losses for branch in branches]),
            stats=tuple(branch.stats for branch in branches),
            plans=tuple(branch.plan for branch in branches),
        )

    @torch.no_grad()
    def _draw_weights(self) -> None:
        """Normal with ``init_std``, less where a branch ends; biases are 0, norms 1."""
        std = self.config.init_std
        residual_std = std / (2 * self.config.n_layer) ** 0.5
        for name, parameter in self.named_parameters():
            if "norm" in name:
                continue
            if name.endswith("bias"):
                parameter.zero_()
            else:
                parameter.normal_(0.0, residual_std if "o_proj" in name or "down_proj" in name else std)


def _summed(losses: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([layer[name] for layer in losses]).sum() for name in losses[0]}
