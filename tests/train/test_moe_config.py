"""Settings that cannot work are refused in one line; all that can are accepted and survive JSON."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from moetriage.errors import UsageError
from moetriage.train.moe_config import MoEConfig
from moetriage.train.policies import POLICIES, THRESHOLD_POLICIES

SIZES: dict[str, Any] = {"d_model": 8, "d_expert": 12, "num_experts": 4, "renormalise": False}


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_has_settings_that_survive_json(policy: str) -> None:
    threshold = 0.1 if policy in THRESHOLD_POLICIES else None
    config = MoEConfig(**SIZES, policy=policy, capacity_factor=1.25, eval_capacity_factor=2.0, margin_threshold=threshold)
    config.validate()
    assert MoEConfig(**json.loads(json.dumps(config.as_dict()))) == config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"d_model": 0}, "d_model 0: must be a whole number"),
        ({"num_experts": 2.0}, "num_experts 2.0"),
        ({"top_k": True}, "top_k True"),
        ({"top_k": 5}, "top_k 5 of num_experts 4"),
        ({"activation": "relu"}, "activation 'relu': must be gelu or swiglu"),
        ({"bias": True}, "bias with activation 'swiglu'"),
        ({"z_loss_weight": -1.0}, "z_loss_weight -1.0"),
        ({"load_balance_weight": float("nan")}, "load_balance_weight nan"),
        ({"capacity_factor": 1.25}, "capacity_factor 1.25 does nothing with policy 'dropless'"),
        ({"margin_threshold": 0.1}, "margin_threshold 0.1 does nothing"),
        ({"top_k": 1, "renormalise": True}, "router would learn nothing"),
        ({"policy": "capsel3"}, "policy 'capsel3': must be dropless or one of top1, top2"),
        ({"policy": "top2"}, "needs a capacity_factor"),
        ({"policy": "top2", "capacity_factor": 0.0}, "capacity factor 0.0"),
        ({"policy": "top2", "capacity_factor": 16384}, "at most 1024"),
        ({"policy": "top2", "capacity_factor": 1.0, "eval_capacity_factor": float("nan")}, "capacity factor nan"),
        ({"policy": "top2", "capacity_factor": 1.0, "top_k": 4}, "admission looks at the two best"),
        ({"policy": "top2", "capacity_factor": 1.0, "margin_threshold": 0.1}, "does nothing with policy 'top2'"),
        ({"policy": "top2", "capacity_factor": 1.0, "loss_free_bias_rate": 0.1}, "balances dropless routing only"),
        ({"policy": "top1", "capacity_factor": 1.0, "renormalise": True}, "router would learn nothing"),
        ({"policy": "capsel2", "capacity_factor": 1.0}, "needs a finite margin_threshold from 0 up, not None"),
        (
            {"policy": "capsel2", "capacity_factor": 1.0, "margin_threshold": float("nan")},
            "needs a finite margin_threshold from 0 up, not nan",
        ),
        ({"policy": "capsel2", "capacity_factor": 1.0, "margin_threshold": -0.1}, "margin_threshold from 0 up, not -0.1"),
        ({"policy": "top2", "capacity_factor": "1.25"}, "capacity_factor '1.25': must be a number"),
        ({"renormalise": "yes"}, "renormalise 'yes': must be true or false"),
        ({"num_experts": 10**9}, "num_experts 1000000000: must be a whole number from 1 to 262144"),
    ],
)
def test_settings_that_cannot_work_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        MoEConfig(**(SIZES | changes)).validate()
    assert "\n" not in str(caught.value)


def test_settings_are_checked_without_torch() -> None:
    code = (
        "import sys; from moetriage.train.train_config import PRESETS\n"
        "for preset in PRESETS.values(): preset.model().validate(); preset.train.validate()\n"
        "print([name for name in ('torch', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
