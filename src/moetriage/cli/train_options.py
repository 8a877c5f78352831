"""The options of ``moetriage train``, and what they become: ModelConfig and TrainConfig.

In: values as typer parsed them; None is "not given". Out: settings, from a preset where nothing was given. A run that goes on has its own,
so options beside --resume are refused here.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from moetriage.errors import UsageError
from moetriage.train.policies import DROPLESS, ONE_EXPERT_POLICIES, POLICIES, THRESHOLD_POLICIES, TWO_EXPERT_POLICIES

if TYPE_CHECKING:
    from moetriage.train.model_config import ModelConfig
    from moetriage.train.moe_config import MoEConfig
    from moetriage.train.train_config import TrainConfig

_MODEL = "Model"
_TRAINING = "Training"
_DEFAULT_PRESET = "bundled"
_EXPORTABLE = ", ".join((DROPLESS, *TWO_EXPERT_POLICIES))
_WITH_THRESHOLD = ", ".join(policy for policy in POLICIES if policy in THRESHOLD_POLICIES)


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What is trained and how; all of it is recorded in the run's folder."""

    preset: Annotated[
        Literal["bundled", "study", "tiny"] | None,
        typer.Option(
            rich_help_panel=_MODEL,
            help="bundled (default): the model that ships with moetriage. study: that of the admission study. tiny: seconds to train.",
        ),
    ] = None
    policy: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            rich_help_panel=_MODEL,
            help=f"{DROPLESS}, or how experts with a capacity admit tokens (docs/capacity.md): {', '.join(POLICIES)}. Those that give "
            f"every token the same number of experts can be exported: {_EXPORTABLE}.",
        ),
    ] = None
    capacity_factor: Annotated[
        float | None,
        typer.Option(metavar="PHI", rich_help_panel=_MODEL, help="An expert takes ceil(PHI * tokens / experts) tokens a batch."),
    ] = None
    margin_threshold: Annotated[
        float | None,
        typer.Option(
            metavar="TAU",
            rich_help_panel=_MODEL,
            help=f"Ask for a second expert where the two best probabilities are this close: for {_WITH_THRESHOLD}.",
        ),
    ] = None
    top_k: Annotated[int | None, typer.Option(metavar="K", rich_help_panel=_MODEL, help="Experts of a token when dropless.")] = None
    steps: Annotated[int | None, typer.Option(metavar="N", rich_help_panel=_TRAINING, help="Optimizer steps (default: the preset's).")] = (
        None
    )
    minutes: Annotated[
        float | None,
        typer.Option(
            metavar="M",
            rich_help_panel=_TRAINING,
            help="Measure a step first, and take as many as fit into M minutes; measuring and evaluating the held-out text come on top.",
        ),
    ] = None
    batch: Annotated[int | None, typer.Option(metavar="N", rich_help_panel=_TRAINING, help="Sequences of a step.")] = None
    context: Annotated[int | None, typer.Option(metavar="N", rich_help_panel=_TRAINING, help="Tokens of a sequence.")] = None
    lr: Annotated[float | None, typer.Option("--lr", metavar="R", rich_help_panel=_TRAINING, help="Highest learning rate.")] = None
    seed: Annotated[int | None, typer.Option(metavar="N", rich_help_panel=_TRAINING, help="Of the weights and the order of the texts.")] = (
        None
    )
    precision: Annotated[
        Literal["fp32", "bf16"] | None,
        typer.Option(rich_help_panel=_TRAINING, help="bf16 is several times faster where the processor has it."),
    ] = None
    save_every: Annotated[
        int | None, typer.Option(metavar="N", rich_help_panel=_TRAINING, help="Steps between checkpoints (default: the preset's).")
    ] = None

    def refuse_with(self, flag: str) -> None:
        """Raise UsageError if any option was given beside ``flag``."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None:
                raise UsageError(f"--{field.name.replace('_', '-')} {value} does nothing with {flag}: the run has its own; leave it out")

    def configs(self, vocab_size: int) -> tuple[ModelConfig, TrainConfig]:
        """Return the validated settings. With ``minutes`` the number of steps is still the preset's. Raises UsageError."""
        from moetriage.train.train_config import PRESETS

        if self.steps is not None and self.minutes is not None:
            raise UsageError("--steps and --minutes both say how long to train: give one of them")
        if self.minutes is not None and not 0 < self.minutes <= 60 * 24 * 365:
            raise UsageError(f"--minutes {self.minutes}: must be above 0, and at most a year")
        preset = PRESETS[self.preset or _DEFAULT_PRESET]
        train = dataclasses.replace(preset.train, **self._given("steps", "batch", "context", "seed", "precision", "save_every"))
        if self.lr is not None:
            train = dataclasses.replace(train, learning_rate=self.lr)
        train.validate()
        model = preset.model(vocab_size=vocab_size, context=train.context)
        model = dataclasses.replace(model, moe=self._moe(model.moe))
        model.validate()
        return model, train

    def _given(self, *names: str) -> dict[str, Any]:
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def _moe(self, moe: MoEConfig) -> MoEConfig:
        """Return the preset's experts with the options in place of its own; what another policy does not take is left out.

        A token's only gate is not divided by itself, which would make it 1 and tell the router nothing.
        """
        changes = self._given("policy", "capacity_factor", "margin_threshold", "top_k")
        policy = changes.get("policy", moe.policy)
        needed = {"capacity_factor": "--capacity-factor 1.25"} if policy != DROPLESS else {}
        if policy in THRESHOLD_POLICIES:
            needed["margin_threshold"] = "--margin-threshold 0.03 (docs/capacity.md says how to choose)"
        if policy in POLICIES and (missing := [text for name, text in needed.items() if changes.get(name, getattr(moe, name)) is None]):
            raise UsageError(f"--policy {policy} needs {' and '.join(missing)}")
        if policy != DROPLESS:
            changes.setdefault("top_k", 2)  # admission looks at the two best
        if policy not in THRESHOLD_POLICIES:
            changes.setdefault("margin_threshold", None)
        if policy == DROPLESS:
            changes.setdefault("capacity_factor", None)
        if policy in ONE_EXPERT_POLICIES or changes.get("top_k") == 1:
            changes["renormalise"] = False
        return dataclasses.replace(moe, **changes)
