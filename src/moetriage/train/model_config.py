"""Settings of the NanoMoE language model as a frozen dataclass, and the models of the presets.

In: what a caller, a preset or a checkpoint's JSON says. Out: one validated ``ModelConfig`` that ``lm.NanoMoE`` builds from. Needs no torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from moetriage.errors import UsageError
from moetriage.train.moe_config import MAX_SIZE, MoEConfig, is_number

#: Token ids are stored in 16 bits (see ``shards``).
MAX_VOCAB = 65_536
#: Of the presets, and of data that are built for them.
DEFAULT_VOCAB = 4096
#: Layers are built one by one, and sizes beyond these are slips whose products no address reaches.
MAX_LAYERS = 1024
_MAX_NUMBER = 1e12


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Describe a decoder whose feed-forward branches are all MoE layers.

    style: "gpt2" is LayerNorm, learned positions and biases, as in the study; "qwen3" is RMSNorm, rotary positions and a norm on each
        head's queries and keys, as in Hugging Face's Qwen3Moe, and can be exported.
    vocab_size, context: in tokens; the context is the longest sequence the model takes.
    n_layer, d_model, n_head: layers, width, query heads. n_kv_head: key/value heads, a divisor of n_head (None: n_head).
    head_dim: width of a head (None: d_model / n_head); even in style "qwen3", whose rotation works on pairs.
    moe: the experts of each layer; its d_model is the model's.
    tied: the output projection is the embedding itself.
    norm_eps: added to the variance in each norm. rope_base: base of the rotary frequencies, "qwen3" only.
    init_std: standard deviation of the initial weights. What writes into the residual gets it divided by sqrt(2 n_layer), so that the
        residual's variance does not grow with depth.
    """

    style: Literal["gpt2", "qwen3"]
    vocab_size: int
    context: int
    n_layer: int
    d_model: int
    n_head: int
    moe: MoEConfig
    n_kv_head: int | None = None
    head_dim: int | None = None
    tied: bool = True
    norm_eps: float = 1e-6
    rope_base: float = 1e6
    init_std: float = 0.02

    @property
    def kv_heads(self) -> int:
        return self.n_head if self.n_kv_head is None else self.n_kv_head

    @property
    def head_width(self) -> int:
        return self.d_model // self.n_head if self.head_dim is None else self.head_dim

    def validate(self) -> None:
        """Raise UsageError for a value or a combination that cannot work."""
        if self.style not in ("gpt2", "qwen3"):
            raise UsageError(f"style {self.style!r}: must be gpt2 or qwen3")
        for name in ("vocab_size", "context", "n_layer", "d_model", "n_head", "kv_heads", "head_width"):
            value = getattr(self, name)
            most = MAX_LAYERS if name == "n_layer" else MAX_SIZE
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
                raise UsageError(f"{name} {value!r}: must be a whole number from 1 to {most}")
        if self.vocab_size > MAX_VOCAB:
            raise UsageError(f"vocab_size {self.vocab_size}: token ids are stored in 16 bits, so at most {MAX_VOCAB}")
        for name in ("norm_eps", "rope_base", "init_std"):
            if not (is_number(getattr(self, name)) and 0 < getattr(self, name) <= _MAX_NUMBER):
                raise UsageError(f"{name} {getattr(self, name)!r}: must be a number above 0, and at most {_MAX_NUMBER:g}")
        if not isinstance(self.tied, bool):
            raise UsageError(f"tied {self.tied!r}: must be true or false")
        self._validate_heads()
        if self.moe.d_model != self.d_model:
            raise UsageError(f"experts of width {self.moe.d_model} in a model of width {self.d_model}: both d_model must be the same")
        self.moe.validate()

    def _validate_heads(self) -> None:
        if self.head_dim is None and self.d_model % self.n_head:
            raise UsageError(f"d_model {self.d_model} is no multiple of n_head {self.n_head}: give a head_dim, or other numbers")
        if self.n_head % self.kv_heads:
            raise UsageError(f"n_head {self.n_head} is no multiple of n_kv_head {self.kv_heads}: heads share keys in groups of one size")
        if self.style == "qwen3" and self.head_width % 2:
            raise UsageError(f"head_dim {self.head_width}: rotary positions turn pairs, so it must be even")

    def as_dict(self) -> dict[str, Any]:
        """Return the settings as JSON-ready values, in field order."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ModelConfig:
        """Return the validated settings that ``as_dict`` gave. Raises UsageError if they are not such."""
        try:
            config = cls(**{**values, "moe": MoEConfig(**values["moe"])})
        except (TypeError, KeyError) as error:
            raise UsageError(f"not the settings of a NanoMoE model: {error}; was it written by another version?") from error
        config.validate()
        return config


def bundled(*, vocab_size: int = DEFAULT_VOCAB, context: int = 512) -> ModelConfig:
    """Return the model that ships with moetriage: 21 million parameters, 6 million of them active.

    Every row is a multiple of 32 wide, which GGUF's q8_0 and q4_0 need.
    """
    moe = MoEConfig(
        d_model=256,
        d_expert=96,
        num_experts=32,
        top_k=6,
        renormalise=True,
        load_balance_weight=0.01,
        z_loss_weight=1e-3,
        check_finite=False,
    )
    return ModelConfig(
        style="qwen3", vocab_size=vocab_size, context=context, n_layer=8, d_model=256, n_head=4, n_kv_head=2, head_dim=64, moe=moe
    )


def study(*, vocab_size: int = DEFAULT_VOCAB, context: int = 128) -> ModelConfig:
    """Return the study's model: six layers of width 384 with eight GELU experts, under capsel2 at 1.25."""
    moe = MoEConfig(
        d_model=384,
        d_expert=1536,
        num_experts=8,
        renormalise=False,
        policy="capsel2",
        capacity_factor=1.25,
        margin_threshold=0.03658,
        activation="gelu",
        bias=True,
    )
    return ModelConfig(style="gpt2", vocab_size=vocab_size, context=context, n_layer=6, d_model=384, n_head=6, moe=moe, norm_eps=1e-5)


def tiny(*, vocab_size: int = 512, context: int = 64) -> ModelConfig:
    """Return a model for tests and first tries; it trains in seconds and exports."""
    moe = MoEConfig(d_model=64, d_expert=32, num_experts=8, top_k=2, renormalise=True, load_balance_weight=0.01)
    return ModelConfig(
        style="qwen3", vocab_size=vocab_size, context=context, n_layer=2, d_model=64, n_head=2, n_kv_head=1, head_dim=32, moe=moe
    )
