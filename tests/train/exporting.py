"""A small model with weights that hide nothing (norms that differ from 1, sharp routers) and a tokenizer trained on awkward text."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import torch

from moetriage.train.export import Trained
from moetriage.train.lm import NanoMoE
from moetriage.train.model_config import ModelConfig
from moetriage.train.moe_config import MoEConfig
from moetriage.train.tokenizer import Tokenizer, train_tokenizer

VOCAB = 400
#: What tokenisers differ over: runs of blanks and line ends, contractions, digits, scripts, combining and control characters, emoji.
SAMPLES = (
    "def f(self, x):\n        return {k: v for k, v in x.items()}\n\n\n",
    "  two  three   four    \t\ttabs \t mixed\r\n\r\nend   ",
    "It's we'll they've I'M 'S 12345 3.14e-10 0xFF v2.0",
    "naïve café Ünïcödé ﬁ ½ ² Ⅷ",
    "漢字かな交じり文 한국어 ру́сский ελληνικά عربي हिन्दी ไทย",  # noqa: RUF001
    "🎉👩‍👩‍👧‍👦🇩🇪 e\u0301 \u00a0nbsp\u2003em\u200bzero\u3000wide",
    "\x00\x01\x7f\x85 \ufeffbom �",
    "!!!???...---===[[](){}<>@#$%^&*~`|\\/;:\"'",
    "",
    " ",
    "\n",
)
WORDS = "def return self class import for in if else None True the of and to a is it's we'll   \n    x = y + 12\n"


def config(**changes: Any) -> ModelConfig:
    """Two layers, 8 experts of which 3 are used, two query heads a key head."""
    moe = MoEConfig(d_model=64, d_expert=32, num_experts=8, top_k=3, renormalise=True)
    return replace(
        ModelConfig(
            style="qwen3",
            vocab_size=VOCAB,
            context=128,
            n_layer=2,
            d_model=64,
            n_head=4,
            n_kv_head=2,
            head_dim=32,
            moe=moe,
            init_std=0.15,
            rope_base=5e4,
        ),
        **changes,
    )


def tokenizer() -> Tokenizer:
    return train_tokenizer([WORDS * 20, *SAMPLES * 3], VOCAB)


def model(settings: ModelConfig, *, seed: int = 1) -> NanoMoE:
    """Return a model in which no norm is the identity, so that no two of them can be mixed up."""
    torch.manual_seed(seed)
    made = NanoMoE(settings).eval()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            if "router" in name:
                parameter.mul_(2)
    return made


def trained(made: NanoMoE, of: Tokenizer) -> Trained:
    return Trained(config=made.config, weights=made.state_dict(), tokenizer=json.loads(of.as_json()))
