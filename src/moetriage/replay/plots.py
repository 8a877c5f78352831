"""Draw a replay: hits against cache size, reads avoided against weight discarded, and what each layer does.

In: ``FigureData``. Out: an SVG, PNG or PDF. matplotlib is an extra (``pip install 'moetriage[plot]'``) and imported only here,
when something is drawn.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import numpy as np

from moetriage.errors import UsageError
from moetriage.replay.figure_data import Curve, FigureData
from moetriage.types import MIB

SUFFIXES = (".svg", ".png", ".pdf")

# Okabe and Ito's colours, which people with colour blindness can tell apart; belady, no cache's policy, is black and dashed.
_ORDER_STYLE: dict[str, dict[str, Any]] = {
    "lru": {"color": "#0072B2", "linewidth": 2.4, "zorder": 5},
    "lfu": {"color": "#D55E00"},
    "lfuda": {"color": "#E69F00"},
    "s3fifo": {"color": "#009E73"},
    "partition": {"color": "#CC79A7"},
    "random": {"color": "#999999"},
    "belady": {"color": "black", "linestyle": "--"},
}
_ORDER_NAME = {
    "lru": "LRU (the engine's)",
    "lfu": "LFU",
    "lfuda": "LFU, aged",
    "s3fifo": "S3-FIFO",
    "partition": "LRU, a share per layer",
    "belady": "Belady (knows the future)",
}
_CURVE_STYLE: dict[str, dict[str, Any]] = {
    "drop cold experts": {"color": "#0072B2", "marker": "o", "linewidth": 2.4, "zorder": 5},
    "drop cold experts, static view": {"color": "#56B4E9", "marker": "o", "markersize": 3, "linestyle": ":"},
    "use fewer experts": {"color": "#D55E00", "marker": "s"},
    "bound": {"color": "black", "linestyle": "--"},
    "best schedule found": {"color": "#999999"},
}
_CURVE_NAME = {
    "drop cold experts": "drop cold experts below F (closed loop)",
    "drop cold experts, static view": "the same, static view",
    "use fewer experts": "use only K experts (closed loop)",
    "bound": "bound: nothing is above",
    "best schedule found": "best schedule found, offline",
}
#: Lets a text be read where a curve passes under it.
_BEHIND = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1}
_LABELLED_THRESHOLDS = (0.5, 0.75, 1.0)


def check_path(path: Path) -> None:
    """Raise UsageError for a file that cannot be drawn, before anything is replayed for it."""
    if path.suffix.lower() not in SUFFIXES:
        raise UsageError(f"--plot {path}: must end in one of {', '.join(SUFFIXES)}")
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise UsageError("--plot needs matplotlib: pip install 'moetriage[plot]'") from error


def draw(data: FigureData, path: Path) -> None:
    """Write the figure. Raises UsageError if the file cannot be written."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 11), layout="constrained")
    top, bottom = np.asarray(figure.subfigures(2, 1, hspace=0.03)).flat
    figure.suptitle(
        f"{_model(data.model)}: experts {data.shape.top_k} of {data.shape.n_expert} in {len(data.shape.layers)} layers, decode", fontsize=14
    )
    left, right = top.subplots(1, 2)
    _draw_hits(left, data)
    _draw_trade(right, data)
    _draw_layers(bottom, data)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        figure.savefig(temporary, dpi=150, format=path.suffix[1:].lower())
        temporary.replace(path)
    except OSError as error:
        raise UsageError(f"--plot {path}: cannot be written: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def _model(name: str) -> str:
    return Path(name).name.removesuffix(".gguf") or "model"


def _unit(largest_bytes: int) -> tuple[str, int]:
    return ("GiB", 1024 * MIB) if largest_bytes >= 1024 * MIB else ("MiB", MIB)


def _draw_hits(axes: Any, data: FigureData) -> None:
    shape, (unit, unit_bytes) = data.shape, _unit(data.shape.total_bytes)
    t, cliff, total = (nbytes / unit_bytes for nbytes in (shape.working_set_bytes, shape.cliff_bytes, shape.total_bytes))
    budgets = data.budgets_mib * MIB / unit_bytes
    if cliff > budgets[0]:  # a model of one layer has none
        axes.axvspan(budgets[0], cliff, color="#D55E00", alpha=0.12, linewidth=0)
        axes.text(cliff * 0.97, 79, "below the cliff\nLRU never hits", ha="right", va="center", color="#A34700", fontsize=9, rotation=90)
    for evict, hits in data.hit_fraction.items():
        axes.plot(budgets, 100 * hits, label=_ORDER_NAME.get(evict, evict), **_ORDER_STYLE[evict])
    axes.axvline(t, color="#444444", linewidth=1)
    axes.text(t * 1.02, 97, f"T = {t:.2f} {unit}\none token's experts", va="top", color="#444444", fontsize=9)
    axes.axvline(data.budget_bytes / unit_bytes, color="#0072B2", linewidth=1, linestyle=":")
    axes.text(data.budget_bytes / unit_bytes * 1.03, 42, "cache of the\nother panels", color="#0072B2", fontsize=9, bbox=_BEHIND, zorder=6)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set(
        xlim=(budgets[0], total),
        ylim=(0, 100),
        xlabel=f"expert cache in {unit} (right end: all experts fit)",
        ylabel="hits in % of routed experts",
    )
    axes.set_title("How much cache, and which order of eviction?")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", fontsize=9)


def _draw_trade(axes: Any, data: FigureData) -> None:
    unit, unit_bytes = _unit(data.shape.total_bytes)
    for curve in data.curves:
        axes.plot(100 * curve.weight_dropped, 100 * curve.reads_avoided, label=_CURVE_NAME[curve.name], **_CURVE_STYLE[curve.name])
    _label_points(axes, data.curves)
    most = max(100 * float(curve.weight_dropped.max()) for curve in data.curves if curve.name == "drop cold experts")
    axes.set(xlim=(0, max(1.0, 1.6 * most)), ylim=(0, 100))
    axes.set(xlabel="router weight discarded in % (what is lost)", ylabel="reads avoided in % of LRU's (what is gained)")
    axes.set_title(f"What does dropping buy, at {data.budget_bytes / unit_bytes:.2f} {unit} of cache?")
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", fontsize=9)


def _label_points(axes: Any, curves: tuple[Curve, ...]) -> None:
    for curve in curves:
        letter = {"drop cold experts": "F", "use fewer experts": "K"}.get(curve.name)
        if letter is None:
            continue
        least_apart, last = 0.05 * float(curve.weight_dropped.max()), -1.0
        for x, y, value in zip(curve.weight_dropped, curve.reads_avoided, curve.values, strict=True):
            if not value or x - last < least_apart or (letter == "F" and value not in _LABELLED_THRESHOLDS):
                continue
            last = x
            is_left = letter == "F" and x > 4 * least_apart  # above its line, unless the axis is there
            axes.annotate(
                f"{letter} = {value:g}",
                (100 * x, 100 * y),
                xytext=(-7, 5) if is_left else (12, -7),
                ha="right" if is_left else "left",
                textcoords="offset points",
                fontsize=9,
                color=_CURVE_STYLE[curve.name]["color"],
                annotation_clip=True,
            )


def _draw_layers(figure: Any, data: FigureData) -> None:
    popular, hits, drops = figure.subplots(1, 3, width_ratios=(10, 1.6, 1.6), sharey=True)
    uniform = 1 / data.shape.n_expert
    image = _strip(popular, 100 * data.popularity, "magma_r", (0, 100 * float(np.quantile(data.popularity, 0.995))))
    popular.set(xlabel="experts of the layer, the most popular first", ylabel="layer")
    popular.set_title(f"Which experts are routed to? (all alike would be {100 * uniform:.2f} %)")
    figure.colorbar(image, ax=popular, label="% of the layer's routings", pad=0.01, aspect=30)
    for axes, values, title, colours in (
        (hits, data.hit_of_layer, "hits, %\nnothing dropped", "viridis"),
        (drops, data.dropped_of_layer, f"dropped, %\nF = {data.threshold:g}", "cividis"),
    ):
        strip = _strip(axes, 100 * values[:, None], colours, None)
        axes.set_title(title, fontsize=10)
        axes.set_xticks([])
        figure.colorbar(strip, ax=axes, pad=0.05, aspect=30)
    layers = data.shape.layers
    step = max(1, len(layers) // 12)
    popular.set_yticks(range(0, len(layers), step), [str(layer) for layer in layers[::step]])


def _strip(axes: Any, values: Any, colours: str, limits: tuple[float, float] | None) -> Any:
    low, high = limits or (float(values.min()), float(values.max()))
    return axes.imshow(values, aspect="auto", interpolation="nearest", cmap=colours, vmin=low, vmax=max(high, low + 1e-9))
