"""What ``moetriage replay`` prints: rows, what the static view misses, bounds and advice as tables and sentences.

In: rows and results of ``moetriage.replay``. Out: text on standard output, or the JSON form of what is no row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from moetriage.cli import terminal
from moetriage.types import MIB

if TYPE_CHECKING:
    from moetriage.replay.advice import Advice, Machine, Setting
    from moetriage.replay.routes import RouteFile
    from moetriage.replay.rows import Row

#: Of decode, but for the hits of the whole run, which start from a cold cache.
_COLUMNS = (
    "mode",
    "policy",
    "order",
    "cache MiB",
    "hits",
    "of whole run",
    "reads avoided",
    "weight lost",
    "dropped",
    "experts",
    "MB a token",
)


def print_rows(file: RouteFile, rows: Sequence[Row]) -> None:
    """Print one line for each outcome, of decode where the trace has any, and what the cache's size means for this model."""
    shape = file.shape
    phase = "decode" if any(row["phase"] == "decode" for row in rows) else "all"
    terminal.print_facts(
        [
            ("trace", f"{file.path}: top-{shape.top_k} of {shape.n_expert} experts in {len(shape.layers)} layers, {phase}"),
            ("cache", f"T = {shape.working_set_bytes / MIB:.1f} MiB; LRU never hits below {shape.cliff_bytes / MIB:.1f} MiB"),
        ]
    )
    whole = [row for row in rows if row["phase"] == "all"]
    lines = [_line(row, of_run) for row, of_run in zip((row for row in rows if row["phase"] == phase), whole, strict=True)]
    empty = [index for index in range(len(_COLUMNS)) if not any(line[index] for line in lines)]
    terminal.print_table(_without(_COLUMNS, empty), [_without(line, empty) for line in lines])


def _without(cells: Sequence[str], left_out: Sequence[int]) -> list[str]:
    return [cell for index, cell in enumerate(cells) if index not in left_out]


def _line(row: Row, of_run: Row) -> tuple[str, ...]:
    cache = "" if row["cache_mb"] is None else f"{row['cache_mb']:.6g}"
    ahead = f", {row['prefetch']} ahead" if row["prefetch"] else ""
    return (
        str(row["mode"]),
        _policy(row),
        f"{row['evict'] or ''}{ahead}",
        cache,
        _percent(row["hit_fraction"]),
        _percent(of_run["hit_fraction"]),
        _percent(row["reads_avoided_fraction"]),
        _percent(row["weight_dropped_fraction"]),
        _percent(row["dropped_fraction"]),
        f"{row['experts_per_routing']:.2f}",
        f"{_number(row['read_bytes_per_token']) / 1e6:.1f}",
    )


def _policy(row: Row) -> str:
    letter = {"drop-cold-experts": "F", "n-expert-used": "K"}.get(str(row["policy"]))
    return "none" if letter is None else f"{letter} = {row['value']:g}"


def _percent(value: Any) -> str:
    return f"{100 * value:.2f} %"


def static_views(rows: Sequence[Row]) -> list[Row]:
    """Return, for decode and each lossy policy in closed loop, what the views that leave the cache as it was say instead."""
    decode = [row for row in rows if row["phase"] == "decode"]
    found: list[Row] = []
    for row in decode:
        if row["mode"] != "closed-loop":
            continue
        same = [other for other in decode if (other["policy"], other["value"]) == (row["policy"], row["value"])]
        recorded = next((other for other in same if other["mode"] == "recorded"), None)
        static = next(
            other for other in same if other["mode"] == "simulate" and all(other[key] == row[key] for key in ("evict", "cache_mb"))
        )
        found.append(
            {
                **{key: row[key] for key in ("trace", "phase", "policy", "value", "evict", "cache_mb")},
                "recorded_reads_avoided_fraction": None if recorded is None else recorded["reads_avoided_fraction"],
                "static_reads_avoided_fraction": static["reads_avoided_fraction"],
                "closed_loop_reads_avoided_fraction": row["reads_avoided_fraction"],
                "missed_fraction": _number(row["reads_avoided_fraction"]) - _number(static["reads_avoided_fraction"]),
            }
        )
    return found


def print_static_views(views: Sequence[Row]) -> None:
    """Print the comparison if there is one."""
    if not views:
        return
    terminal.print_table(
        ("policy", "order", "cache MiB", "recorded run, static", "this cache, static", "closed loop", "static view misses"),
        [
            (
                _policy(view),
                str(view["evict"]),
                f"{view['cache_mb']:.6g}",
                "" if view["recorded_reads_avoided_fraction"] is None else _percent(view["recorded_reads_avoided_fraction"]),
                _percent(view["static_reads_avoided_fraction"]),
                _percent(view["closed_loop_reads_avoided_fraction"]),
                f"{100 * _number(view['missed_fraction']):+.2f} points",
            )
            for view in views
        ],
        title="Reads avoided in decode: what a view misses in which dropping does not change the cache",
    )


def print_bounds(rows: Sequence[Row]) -> None:
    """Print where each policy stands between LRU and the bound."""
    terminal.print_table(
        ("policy", "order", "cache MiB", "weight lost", "read MB", "best found MB", "bound MB", "of what is possible", "hits", "bound"),
        [
            (
                _policy(row),
                str(row["evict"]),
                f"{row['cache_mb']:.6g}",
                _percent(row["weight_dropped_fraction"]),
                *(f"{_number(row[key]) / 1e6:.1f}" for key in ("read_bytes", "schedule_read_bytes", "bound_read_bytes")),
                f"{100 * _number(row['possible_fraction_at_least']):.1f} to {100 * _number(row['possible_fraction_at_most']):.1f} %",
                _percent(row["hit_fraction_all"]),
                "" if row["hit_fraction_all_bound"] is None else _percent(row["hit_fraction_all_bound"]),
            )
            for row in rows
        ],
        title="Decode's reads beside the fewest possible with the same weight lost; hits of the whole run beside the most possible",
    )


def print_advice(advice: Advice, machine: Machine) -> None:
    """Print what to set, the formula behind it, and the alternatives."""
    best = advice.best
    dropped = "no dropping" if best.threshold is None else f"--drop-cold-experts {best.threshold:g}"
    ceiling = f"{machine.memory_mb:g} MiB less {advice.dense_bytes / MIB:.0f} MiB of dense weights that the trace lists"
    terminal.print_facts(
        [
            ("take", f"--cache-mb {best.budget_bytes // MIB}, {dropped}"),
            ("expected", f"{best.expected_seconds:.4f} s a token ({_per_second(best.expected_seconds)})"),
            ("formula", best.formula()),
            ("loses", f"{_percent(best.weight_dropped_fraction)} of the router weight (allowed: {_percent(advice.max_weight_dropped)})"),
            ("without loss", f"--cache-mb {advice.lossless.budget_bytes // MIB}: {advice.lossless.expected_seconds:.4f} s a token"),
            ("cache at most", f"{advice.cache_ceiling_bytes // MIB} MiB ({ceiling}; KV cache, embeddings and buffers come on top)"),
        ]
    )
    terminal.print_table(
        ("F", "s a token", "tok/s", "compute s", "reads s", "floor s", "floor", "hits", "weight lost"),
        [_setting_line(setting) for setting in advice.by_threshold],
        title="At the largest cache (estimates)",
    )
    for note in advice.notes:
        terminal.note(note)


def _setting_line(setting: Setting) -> tuple[str, ...]:
    seconds = (setting.expected_seconds, setting.compute_seconds, setting.read_seconds, setting.floor_seconds)
    expected, compute, read, floor = (f"{value:.4f}" for value in seconds)
    name = "off" if setting.threshold is None else f"{setting.threshold:g}"
    hits, lost = _percent(setting.outcome.decode.hit_fraction), _percent(setting.weight_dropped_fraction)
    return (name, expected, _per_second(setting.expected_seconds), compute, read, floor, setting.floor, hits, lost)


def _per_second(seconds: float) -> str:
    return f"{1 / seconds:.1f} tok/s" if seconds > 0 else "not limited"


def advice_as_dict(advice: Advice) -> dict[str, object]:
    """Return the advice as JSON-ready values under the keys of docs/replay.md."""
    return {
        "best": _setting_as_dict(advice.best),
        "lossless": _setting_as_dict(advice.lossless),
        "by_threshold": [_setting_as_dict(setting) for setting in advice.by_threshold],
        "cache_ceiling_mb": advice.cache_ceiling_bytes / MIB,
        "dense_bytes": advice.dense_bytes,
        "max_weight_dropped_fraction": advice.max_weight_dropped,
        "notes": list(advice.notes),
    }


def _setting_as_dict(setting: Setting) -> dict[str, object]:
    return {
        "cache_mb": setting.budget_bytes / MIB,
        "drop_cold_experts": setting.threshold,
        "seconds_per_token": setting.expected_seconds,
        "floor_seconds_per_token": setting.floor_seconds,
        "floor": setting.floor,
        "compute_seconds": setting.compute_seconds,
        "read_seconds": setting.read_seconds,
        "hit_fraction": setting.outcome.decode.hit_fraction,
        "weight_dropped_fraction": setting.weight_dropped_fraction,
        "read_bytes_per_token": setting.outcome.decode.read_bytes_per_token,
        "formula": setting.formula(),
    }


def _number(value: Any) -> float:
    return float(value)
