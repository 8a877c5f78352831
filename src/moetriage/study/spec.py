"""What the study runs: conditions, seeds, sizes and optimizer settings, as one frozen value that every result is stored with.

In: a preset's name and options. Out: a ``StudySpec``, its cells, the ``ModelConfig`` of each. Needs no torch. The core design is that of
"Reducing dropped tokens in a small MoE model" (docs/study.md): five conditions that share data, batches and initialisation within a seed.
What that text leaves open is fixed here, for all conditions alike, and was not tuned.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from moetriage.errors import UsageError
from moetriage.train.model_config import ModelConfig
from moetriage.train.moe_config import MoEConfig
from moetriage.train.policies import CAUSAL, ONLINE, THRESHOLD_POLICIES

Precision = Literal["fp32", "bf16"]


@dataclass(frozen=True, kw_only=True)
class Condition:
    """One way to admit tokens, at one capacity factor; ``core``: one of the document's five."""

    policy: str
    capacity_factor: float
    core: bool = False

    @property
    def name(self) -> str:
        return f"{self.policy}@{self.capacity_factor:g}"


CORE = (
    Condition(policy="top1", capacity_factor=1.25, core=True),
    Condition(policy="top1", capacity_factor=2.0, core=True),
    Condition(policy="bpr-top1", capacity_factor=1.25, core=True),
    Condition(policy="fixed-top2", capacity_factor=1.25, core=True),
    Condition(policy="capsel2", capacity_factor=1.25, core=True),
)
EXTRA = tuple(
    Condition(policy=policy, capacity_factor=1.25) for policy in ("primary+rescue", "primary+optional", ONLINE, CAUSAL, "augment")
)
MAX_SEEDS = 1000
#: Beyond this the loss of the text is lost beside it.
MAX_LOAD_BALANCE = 100
#: What the differences per seed are taken against.
BASELINE = "fixed-top2@1.25"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run: a condition and a seed."""

    condition: Condition
    seed: int

    @property
    def name(self) -> str:
        return f"{self.condition.name}-seed{self.seed}"


@dataclass(frozen=True, kw_only=True)
class StudySpec:
    """Everything that decides the numbers, besides the data and the machine.

    steps, batch_size, context: optimizer steps; sequences and tokens a sequence in each batch. heldout_batches, calibration_batches: of the
    same size. calibration happens at the first seed's initialisation, on training text that no step uses.
    learning_rate is reached after ``warmup_steps`` and falls to ``final_lr_fraction`` of it along a cosine. load_balance_weight: factor
    of the auxiliary loss; the document mentions none, so 0. precision: bf16 means autocast; routing stays in float32.
    record_every: steps between two points of the training curves, each a mean over the steps since the last.
    """

    preset: str
    precision: Precision = "fp32"
    load_balance_weight: float = 0.0
    conditions: tuple[Condition, ...] = CORE + EXTRA
    seeds: tuple[int, ...] = (0, 1, 2)
    steps: int = 500
    batch_size: int = 4
    context: int = 128
    heldout_batches: int = 16
    calibration_batches: int = 8
    n_layer: int = 6
    d_model: int = 384
    n_head: int = 6
    num_experts: int = 8
    d_expert: int = 1536
    learning_rate: float = 3e-4
    warmup_steps: int = 25
    final_lr_fraction: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    record_every: int = 10

    def validate(self) -> None:
        """Raise UsageError for a value that cannot work."""
        if self.precision not in ("fp32", "bf16"):
            raise UsageError(f"--precision {self.precision}: must be fp32 or bf16")
        if not 0 <= self.load_balance_weight <= MAX_LOAD_BALANCE:
            raise UsageError(f"--load-balance {self.load_balance_weight}: must be from 0 (off) to {MAX_LOAD_BALANCE}; 0.01 is usual")
        if not self.conditions or not self.seeds:
            raise UsageError("a study needs at least one condition and one seed")

    @property
    def comparable(self) -> bool:
        """Say whether results may stand beside the document's: other conditions, seeds and precision may, other sizes may not."""
        free = {"preset": "full", "conditions": self.conditions, "seeds": self.seeds, "precision": self.precision}
        return dataclasses.replace(self, preset="full") == full(**free)

    @property
    def cells(self) -> list[Cell]:
        """Return the runs in the order they are made: the document's conditions first, seed by seed, then the extra ones."""
        cells = [Cell(condition=condition, seed=seed) for seed in self.seeds for condition in self.conditions]
        return sorted(cells, key=lambda cell: not cell.condition.core)

    def model(self, condition: Condition, *, vocab_size: int, threshold: float) -> ModelConfig:
        """Return the model of a condition; nothing but the admission of tokens differs between two of them."""
        moe = MoEConfig(
            d_model=self.d_model,
            d_expert=self.d_expert,
            num_experts=self.num_experts,
            # Renormalised, a single expert's gate would be 1 and top1's router would learn nothing; so no condition renormalises.
            renormalise=False,
            policy=condition.policy,
            capacity_factor=condition.capacity_factor,
            margin_threshold=threshold if condition.policy in THRESHOLD_POLICIES else None,
            activation="gelu",
            bias=True,
            load_balance_weight=self.load_balance_weight,
        )
        return ModelConfig(
            style="gpt2",
            vocab_size=vocab_size,
            context=self.context,
            n_layer=self.n_layer,
            d_model=self.d_model,
            n_head=self.n_head,
            moe=moe,
            norm_eps=1e-5,
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the settings as JSON-ready values, in field order."""
        return json.loads(json.dumps(dataclasses.asdict(self)))  # type: ignore[no-any-return]

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> StudySpec:
        """Return the settings that ``as_dict`` gave. Raises UsageError if they are not such."""
        try:
            lists = {key: tuple(values[key]) for key in ("seeds", "betas")}
            spec = cls(**{**values, **lists, "conditions": tuple(Condition(**condition) for condition in values["conditions"])})
            _check_types(spec)
        except (TypeError, KeyError, ValueError) as error:
            raise UsageError(f"not the settings of a study: {error}; was it written by another version?") from error
        spec.validate()
        return spec


def _check_types(spec: StudySpec) -> None:
    """Raise ValueError for a value of another type than its default's; settings that come from a file may hold anything."""
    like = full()
    for field in dataclasses.fields(spec):
        value, usual = getattr(spec, field.name), getattr(like, field.name)
        several = isinstance(usual, tuple)
        if not several:
            value, usual = (value,), (usual,)
        for part in value:
            if type(part) is not type(usual[0]) or (isinstance(part, float) and not math.isfinite(part)):
                raise ValueError(f"{field.name} {part!r}")
    for condition in spec.conditions:
        if condition not in CORE + EXTRA:
            raise ValueError(f"condition {condition}")
    if len(spec.betas) != 2:
        raise ValueError(f"betas {spec.betas}")


def full(**options: Any) -> StudySpec:
    """Return the document's design and the extra conditions."""
    return StudySpec(**{"preset": "full", **options})


def smoke(**options: Any) -> StudySpec:
    """Return a study for tests: every condition, in seconds; its numbers mean nothing."""
    sizes: dict[str, Any] = {"steps": 8, "batch_size": 2, "context": 32, "heldout_batches": 2, "calibration_batches": 2}
    model: dict[str, Any] = {"n_layer": 2, "d_model": 32, "n_head": 2, "num_experts": 4, "d_expert": 32}
    return StudySpec(**{"preset": "smoke", "seeds": (0, 1), "warmup_steps": 2, "record_every": 2, **sizes, **model, **options})


def named(names: Sequence[str]) -> tuple[Condition, ...]:
    """Return the conditions of these names, in the study's own order. Raises UsageError for a name that is none."""
    known = {condition.name: condition for condition in CORE + EXTRA}
    for name in names:
        if name not in known:
            raise UsageError(f"--condition {name}: must be one of {', '.join(known)}")
    return tuple(condition for name, condition in known.items() if name in names)


def first_seeds(count: int) -> tuple[int, ...]:
    """Return the seeds 0 to ``count - 1``. Raises UsageError for none, and for more than anybody waits for."""
    if not 1 <= count <= MAX_SEEDS:
        raise UsageError(f"--seeds {count}: must be between 1 and {MAX_SEEDS}")
    return tuple(range(count))


#: What ``--preset`` takes.
PRESETS = {"full": full, "smoke": smoke}
