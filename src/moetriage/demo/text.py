"""Let the bundled model write: streamed in a cache below its experts' size, then the same with experts dropped.

In: the model's file, a prompt, somewhere to send the text. Out: one ``Written`` a cell. Unlike the demo's other cells this one is about
what is said: the model is trained (docs/bundled-model.md), small, and fits into any memory, so its speed shows nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from moetriage.config import DropConfig, StreamConfig
from moetriage.gguf.layout import ModelLayout, read_layout
from moetriage.stream.runner import Runner
from moetriage.stream.sampling import Sampling
from moetriage.stream.telemetry import report_as_dict
from moetriage.types import MIB, RunReport

PROMPT = "def read_lines(path):"
TOKENS = 96
#: Held against all experts; the cache must not hold them all, or nothing could be dropped.
_CACHE_FRACTION = 0.4
THRESHOLDS = (None, 0.75)


@dataclass(frozen=True, kw_only=True)
class Written:
    """What one cell said. threshold: of dropping, None for lossless streaming."""

    threshold: float | None
    text: str
    report: RunReport

    def as_dict(self) -> dict[str, object]:
        """Return an entry of ``text`` in the object of ``demo --json``."""
        return {"cell": cell_name(self.threshold), "text": self.text, **report_as_dict(self.report)}


def bundled_model() -> Path:
    """Return the packaged trained model."""
    return Path(str(resources.files("moetriage") / "data" / "nano-moe-python.q8_0.gguf"))


def cell_name(threshold: float | None) -> str:
    """Return how the demo calls a cell."""
    return "streamed" if threshold is None else f"streamed, F={threshold:g}"


def text_cache_mb(layout: ModelLayout) -> int:
    """Return a cache in MiB that is below the experts' total and not below one token's working set."""
    wanted = max(_CACHE_FRACTION * layout.expert_total_bytes, layout.working_set_bytes())
    return int(-(-wanted // MIB))


def write_text(
    model: Path,
    on_text: Callable[[str], None] = lambda _piece: None,
    *,
    on_cell: Callable[[str], None] = lambda _name: None,
    prompt: str = PROMPT,
    tokens: int = TOKENS,
    n_threads: int | None = None,
) -> Iterator[Written]:
    """Yield each cell when it is done; ``on_cell`` gets its name before, ``on_text`` each piece of its text as it comes.

    Raises ModelFileError for a file that is no model, and what ``Runner`` raises.
    """
    cache_mb = text_cache_mb(read_layout(model))
    # Greedy, so that what differs between the cells is the experts that were dropped and not the dice; the penalty is for a small model.
    sampling = Sampling(max_tokens=tokens, temperature=0.0, repeat_penalty=1.1)
    for threshold in THRESHOLDS:
        on_cell(cell_name(threshold))
        config = StreamConfig(cache_mb=cache_mb, drop=None if threshold is None else DropConfig(threshold=threshold))
        pieces: list[str] = []

        def take(piece: str, pieces: list[str] = pieces) -> None:
            pieces.append(piece)
            on_text(piece)

        with Runner(model, config, sampling=sampling, n_ctx=256, n_threads=n_threads) as runner:
            report = runner.generate(prompt, on_text=take)
            runner.check(report)
        yield Written(threshold=threshold, text="".join(pieces), report=report)
