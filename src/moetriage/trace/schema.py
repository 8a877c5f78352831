"""The routing trace as a typed table: columns, units, version, and the header that goes with it.

In: nothing but header text or values from the engine. Out: ``TraceMeta``, the polars schema and the ``#`` lines of a file. It knows
no file (``sources``, ``writer``) and no rule that spans rows (``check``). The layout is that of BigMoeOnEdge's ``route_trace v1``
(docs/telemetry.md of that project), whose columns are read by name and only ever appended to; ``dropped`` is such an addition.

One row is one routing: one of the K experts that the router chose for one token in one layer. A *cell* is the K rows of a token in
a layer, a *step* is one token, a *batch* is one evaluation of the graph: all of its tokens in the first MoE layer, then all of them
in the next. The last layer of a prefill batch may hold only the tokens whose output was asked for. A decode batch is one step.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import polars as pl

from moetriage.errors import TraceError

SCHEMA_VERSION = 1
MAGIC = f"# route_trace v{SCHEMA_VERSION}"

#: Column name -> dtype, in file order. Units: expert_bytes in bytes, weight as the router's final weight; the rest are counts or flags.
SCHEMA: dict[str, pl.DataType] = {
    "turn": pl.Int32(),
    "phase": pl.Int8(),
    "step": pl.Int32(),
    "layer": pl.Int16(),
    "slot": pl.Int16(),
    "expert": pl.Int32(),
    "weight": pl.Float32(),
    "residency": pl.Int8(),
    "expert_bytes": pl.Int64(),
    "dropped": pl.Int8(),
}
#: Absent in traces recorded before there was dropping; read as 0.
OPTIONAL_COLUMNS = frozenset({"dropped"})

# Bounds on what a header may claim, so that a hostile one cannot make us allocate: the int16 columns set the first, the rest is far
# above any model.
MAX_LAYERS = 32_767
MAX_EXPERTS = 1_000_000
MAX_BYTES = 2**53

_MODEL_LINE = re.compile(
    r"# model=(?P<model>.*) arch=(?P<arch>\S*) n_layer=(?P<n_layer>\d+) n_expert=(?P<n_expert>\d+) n_expert_used=(?P<used>\d+)$"
)
_LAYER_LINE = re.compile(r"# layer=(\d+) expert_bytes=(\d+) dense_bytes=(\d+)$")
_EXTRA_PREFIX = "# extra="


@dataclass(frozen=True, kw_only=True)
class TraceMeta:
    """What a trace says about its model.

    model: path or name of the recorded model. arch: its ``general.architecture``.
    n_layer: transformer blocks, dense ones included. n_expert: experts per MoE layer. n_expert_used: K, routings per token and layer.
    layer_expert_bytes: MoE layer -> bytes of one expert, all projections together. Its keys are the MoE layers.
    layer_dense_bytes: layer -> bytes of its other weights.
    extra: further facts of the recording (budget, threshold, ...) as text.
    Zero entries of both maps are left out, since the file format writes a zero where there is nothing.
    """

    model: str
    arch: str
    n_layer: int
    n_expert: int
    n_expert_used: int
    layer_expert_bytes: Mapping[int, int]
    layer_dense_bytes: Mapping[int, int] = field(default_factory=dict)
    extra: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("layer_expert_bytes", "layer_dense_bytes"):
            object.__setattr__(self, name, {layer: nbytes for layer, nbytes in sorted(getattr(self, name).items()) if nbytes})

    @property
    def moe_layers(self) -> tuple[int, ...]:
        """The MoE layers in the order in which they are evaluated."""
        return tuple(self.layer_expert_bytes)

    def fault(self) -> str | None:
        """Return why no trace can have this header, or None."""
        if not 1 <= self.n_layer <= MAX_LAYERS:
            return f"n_layer={self.n_layer} is not between 1 and {MAX_LAYERS}"
        if not 1 <= self.n_expert <= MAX_EXPERTS:
            return f"n_expert={self.n_expert} is not between 1 and {MAX_EXPERTS}"
        if not 1 <= self.n_expert_used <= min(self.n_expert, MAX_LAYERS):
            return f"n_expert_used={self.n_expert_used} is not between 1 and the number of experts ({self.n_expert})"
        if not self.layer_expert_bytes:
            return "no layer has experts (no '# layer=' line with expert_bytes above 0)"
        for per_layer in (self.layer_expert_bytes, self.layer_dense_bytes):
            for layer, nbytes in per_layer.items():
                if not 0 <= layer < self.n_layer:
                    return f"layer {layer} is not below n_layer={self.n_layer}"
                if not 0 <= nbytes <= MAX_BYTES:
                    return f"layer {layer} claims {nbytes} bytes"
        return None

    def same_model(self, other: TraceMeta) -> bool:
        """Tell whether two traces are of the same model at the same width (``extra`` may differ)."""
        return all(
            getattr(self, name) == getattr(other, name)
            for name in ("model", "arch", "n_layer", "n_expert", "n_expert_used", "layer_expert_bytes", "layer_dense_bytes")
        )


def header_lines(meta: TraceMeta) -> list[str]:
    """Return the ``#`` lines of a file with this meta, without line ends. Control characters in the model's name become ``?``."""
    model = re.sub(r"[\x00-\x1f\x7f]", "?", meta.model)
    lines = [
        MAGIC,
        f"# model={model} arch={meta.arch} n_layer={meta.n_layer} n_expert={meta.n_expert} n_expert_used={meta.n_expert_used}",
    ]
    for layer in sorted({*meta.layer_expert_bytes, *meta.layer_dense_bytes}):
        expert_bytes, dense_bytes = meta.layer_expert_bytes.get(layer, 0), meta.layer_dense_bytes.get(layer, 0)
        lines.append(f"# layer={layer} expert_bytes={expert_bytes} dense_bytes={dense_bytes}")
    if meta.extra:
        lines.append(_EXTRA_PREFIX + json.dumps(dict(meta.extra), sort_keys=True))
    return lines


def parse_header(lines: Sequence[str], path: str) -> TraceMeta:
    """Return the meta that ``#`` lines describe; unknown lines are passed over, as newer writers may add some.

    Raises TraceError when they are not those of a route trace of our version, or contradict themselves.
    """
    _check_magic(lines, path)
    model: re.Match[str] | None = None
    expert_bytes: dict[int, int] = {}
    dense_bytes: dict[int, int] = {}
    extra: dict[str, str] = {}
    for row, line in enumerate(lines, start=1):
        if match := _MODEL_LINE.match(line):
            model = match
        elif match := _LAYER_LINE.match(line):
            layer, expert, dense = (_bounded(text, path, row) for text in match.groups())
            if layer in expert_bytes:
                raise TraceError(path, f"layer {layer} is described twice", row=row)
            expert_bytes[layer], dense_bytes[layer] = expert, dense
        elif line.startswith(_EXTRA_PREFIX):
            extra = _parse_extra(line[len(_EXTRA_PREFIX) :], path, row)
    if model is None:
        raise TraceError(path, "the header has no line '# model=... arch=... n_layer=... n_expert=... n_expert_used=...'")
    meta = TraceMeta(
        model=model["model"],
        arch=model["arch"],
        n_layer=_bounded(model["n_layer"], path, 2),
        n_expert=_bounded(model["n_expert"], path, 2),
        n_expert_used=_bounded(model["used"], path, 2),
        layer_expert_bytes=expert_bytes,
        layer_dense_bytes=dense_bytes,
        extra=extra,
    )
    if (fault := meta.fault()) is not None:
        raise TraceError(path, f"header: {fault}")
    return meta


def _check_magic(lines: Sequence[str], path: str) -> None:
    first = lines[0].strip() if lines else ""
    if first == MAGIC:
        return
    if version := re.fullmatch(r"# route_trace v(\d{1,9})", first):
        raise TraceError(path, f"is version {version[1]} of the trace format; this program reads version {SCHEMA_VERSION}", row=1)
    raise TraceError(path, f"is not a route trace: its first line must be {MAGIC!r}", row=1)


def _bounded(text: str, path: str, row: int) -> int:
    # int() of a text of thousands of digits raises (or takes quadratic time); nothing real has more than 16.
    if len(text) > 16:
        raise TraceError(path, f"header: {text[:20]}... is out of range", row=row)
    return int(text)


def _parse_extra(text: str, path: str, row: int) -> dict[str, str]:
    try:
        extra = json.loads(text)
    except (ValueError, RecursionError):
        extra = None
    if not isinstance(extra, dict) or not all(isinstance(value, str) for value in extra.values()):
        raise TraceError(path, "header: 'extra' must be a JSON object of texts", row=row)
    return extra
