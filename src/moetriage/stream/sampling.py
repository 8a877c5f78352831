"""How the tokens of a run are chosen and when it stops: settings in, arguments of llama_cpp's completion calls out.

Every argument is passed explicitly, because the defaults of llama_cpp's plain and chat completions differ (a repeat penalty, a
temperature), and a run must not change with the way its prompt is wrapped.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from moetriage.errors import UsageError

#: llama.cpp takes the seed as uint32 and reads the largest as "choose one".
MAX_SEED = 2**32 - 2


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are chosen; the defaults are llama_cpp's for plain completions.

    max_tokens: stop after so many; None goes on to the end of the context.
    temperature: 0 always takes the likeliest token. top_k: choose among so many; 0 is all.
    top_p: smallest set of tokens with at least this probability. min_p: leave out what is less likely than this times the likeliest.
    repeat_penalty: 1 is off. seed: the same seed gives the same tokens on the same build.
    stop: texts that end the answer and are not part of it.
    """

    max_tokens: int | None = 128
    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    repeat_penalty: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()

    def validate(self) -> None:
        """Raise UsageError for a value out of range, with the flag that sets it."""
        if self.max_tokens is not None and self.max_tokens < 1:
            raise UsageError(f"-n {self.max_tokens}: must be at least 1")
        if self.top_k < 0:
            raise UsageError(f"--top-k {self.top_k}: must be at least 1, or 0 for all tokens")
        if not 0 <= self.seed <= MAX_SEED:
            raise UsageError(f"--seed {self.seed}: must be between 0 and {MAX_SEED}")
        for flag, value, allowed, is_right in (
            ("--temp", self.temperature, "at least 0 (0 is greedy)", self.temperature >= 0),
            ("--top-p", self.top_p, "above 0 and at most 1", 0 < self.top_p <= 1),
            ("--min-p", self.min_p, "between 0 and 1", 0 <= self.min_p <= 1),
            ("--repeat-penalty", self.repeat_penalty, "above 0 (1 is off)", self.repeat_penalty > 0),
        ):
            if not (math.isfinite(value) and is_right):
                raise UsageError(f"{flag} {value}: must be {allowed}")
        if "" in self.stop:
            raise UsageError("--stop '': must be at least one character")

    def arguments(self) -> dict[str, Any]:
        """Return the keyword arguments of ``create_completion`` and ``create_chat_completion``."""
        return dataclasses.asdict(self) | {"stop": list(self.stop)}
