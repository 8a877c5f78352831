"""The cells of bench_stream on a model larger than its memory: speed, first token, recorded routing, and what memory it takes.

In: a ``Bench`` and the model's file. Out: tables. README.md says what each number is to be held against.
"""

from __future__ import annotations

from pathlib import Path

from harness import Spread, Table
from stream_runs import PHASES, Bench, Record, check_same, speed_ratio

from moetriage.config import DropConfig, StreamConfig
from moetriage.gguf.kv_cache import kv_cache_bytes
from moetriage.gguf.layout import read_layout
from moetriage.stream.memory_plan import compute_bytes
from moetriage.trace.io import read_meta
from moetriage.types import MIB

#: What a process may take beside its budget, dense weights, KV cache and compute buffers.
ALLOWANCE_BYTES = 256 * MIB
RECORDED_CACHE_MB = 4000
_GIB = 1024 * MIB

Runs = dict[str, list[Record]]
PLAIN, STREAMED, WHOLE = "plain mmap", "streamed", "streamed, not staged"


def big(bench: Bench, model: Path) -> list[Table]:
    """Run streaming against plain mmap in the same cgroup, in turns; then, once each, other waiting and what trades quality for reads."""
    pair = {PLAIN: StreamConfig(mmap=True), STREAMED: bench.streamed()}
    once = {
        WHOLE: bench.streamed(staged=False),
        "F=0.75": bench.streamed(drop=DropConfig(threshold=0.75)),
        "F=1.0": bench.streamed(drop=DropConfig(threshold=1.0)),
        "K=5": bench.streamed(n_expert_used=5),
    }
    runs: Runs = {label: [] for label in pair | once}
    rates = []
    for number in range(bench.rounds):
        rates.append(bench.disk_mb_s(model))
        for label in list(pair) if number % 2 == 0 else list(pair)[::-1]:
            runs[label].append(bench.sample(label, model, pair[label]))
        check_same(runs[PLAIN][-1], runs[STREAMED][-1])
    for label, config in once.items():
        runs[label].append(bench.sample(label, model, config))
    check_same(runs[STREAMED][-1], runs[WHOLE][-1])
    return [_decode_table(runs), _first_token_table(runs, rates)]


def _decode_table(runs: Runs) -> Table:
    ratio = Spread.of([speed_ratio(*pair) for pair in zip(runs[PLAIN], runs[STREAMED], strict=True)])
    cache = Spread.of([100 * run["cache_seconds"] * run["tok_per_s"] for run in runs[STREAMED]])
    tokens = Spread.of([run["tokens"] for run in runs[PLAIN]])
    columns = ("cell", "tok/s", *(f"{name.replace('_', ' ')}, ms" for name in PHASES), "MiB/token", "hits", "dropped", "weight dropped")
    notes = [
        f"streamed against plain mmap, pair by pair over the tokens of both: {ratio.text(1)} times as fast (target: at least 6); all "
        "said the same tokens",
        f"plain mmap was cut off after {tokens.text(0)} tokens; its MiB/token is what the kernel read, read-ahead included",
        f"cache management: {cache.text()} % of a streamed token (target: at most 3 %)",
        f"medians (least to largest) of {ratio.n} runs; the rows below 'streamed' ran once",
    ]
    return Table("A model larger than memory: decoding", columns, [_decode_row(*entry) for entry in runs.items()], notes)


def _decode_row(label: str, found: list[Record]) -> tuple[str, ...]:
    def text(name: str, scale: float, digits: int, unit: str = "") -> str:
        values = [scale * run[name] for run in found if run[name] is not None]
        return Spread.of(values).text(digits) + unit if values else "-"

    shares = [text(name, 100, 1, " %") for name in ("hit_fraction", "dropped_fraction", "weight_dropped_fraction")]
    return (label, text("tok_per_s", 1, 2), *(text(f"{name}_seconds", 1e3, 1) for name in PHASES), text("read_mib", 1, 1), *shares)


def _first_token_table(runs: Runs, rates: list[float]) -> Table:
    columns = ("cell", "s to the first token", "loading", "prompt: computing", "waiting for reads", "GiB read")
    names = ("first_token_seconds", "load_seconds", "prefill_compute_seconds", "prefill_read_wait_seconds")
    rows = [
        (
            label,
            *(Spread.of([run[name] for run in runs[label]]).text(1) for name in names),
            f"{Spread.of([run['prefill_read_bytes'] / _GIB for run in runs[label]]).median:.2f}",
        )
        for label in (PLAIN, STREAMED, WHOLE)
    ]
    disk = Spread.of(rates)
    floors = [run["prefill_read_bytes"] / rate / 1e6 for run, rate in zip(runs[STREAMED], rates, strict=True)]
    over = Spread.of([run["prefill_seconds"] / floor for run, floor in zip(runs[STREAMED], floors, strict=True)])
    waiting = Spread.of([run["prefill_read_bytes"] / run["prefill_read_wait_seconds"] / 1e6 for run in runs[WHOLE]])
    notes = [
        f"iobench, random expert reads on as many lanes: {disk.text(0)} MB/s",
        f"read rate while waiting for whole experts, so that no read hides behind computing ({WHOLE}, prompt): "
        f"{waiting.text(0)} MB/s, {100 * waiting.median / disk.median:.0f} % of iobench (target: at least 90 %)",
        f"streamed: the prompt took {over.text(1)} times as long as iobench would need for what it read, {Spread.of(floors).text(1)} s "
        "(target: at most 1.15 times)",
    ]
    return Table("A model larger than memory: first token", columns, rows, notes)


def recorded(bench: Bench, model: Path, trace: Path) -> list[Table]:
    """Route the file as the real model was recorded; the budget is scaled from the recording's bytes to the file's."""
    meta, layout = read_meta(trace), read_layout(model)
    of_recording = sum(meta.layer_expert_bytes.values()) / len(meta.layer_expert_bytes)
    ours = layout.expert_total_bytes / layout.n_expert / len(layout.moe_layers)
    cache_mb = round(RECORDED_CACHE_MB * ours / of_recording)
    cells = {"streamed": None, "F=0.75": DropConfig(threshold=0.75), "F=1.0": DropConfig(threshold=1.0)}
    rows = []
    for label, drop in cells.items():
        config = bench.streamed(cache_mb=cache_mb, force_routing=trace, drop=drop)
        run = bench.sample(f"recorded routing, {label}", model, config, prompt_tokens=28, tokens=128)
        shares = [f"{100 * run[name]:.1f} %" for name in ("run_hit_fraction", "hit_fraction", "dropped_fraction")]
        rows.append((label, f"{run['tok_per_s']:.2f}", *shares, f"{100 * run['weight_dropped_fraction']:.2f} %", f"{run['read_mib']:.1f}"))
    notes = [
        f"budget {cache_mb} MiB: the recording's {RECORDED_CACHE_MB} MiB scaled by {ours:.0f} / {of_recording:.0f} bytes an expert",
        "hits of the whole run are of lookups, in the prompt one for each distinct expert and layer (target: within 1 point of the "
        "recording's 74.9 %); hits of decode are of routed experts",
    ]
    columns = ("cell", "tok/s", "hits, whole run", "hits, decode", "dropped", "weight dropped", "MiB/token")
    return [Table("Driven by the recorded routing", columns, rows, notes)]


def memory(bench: Bench, model: Path, tokens: int) -> list[Table]:
    """Take the largest memory over many tokens, by the cgroup's own count, and hold it against what is allowed."""
    run = bench.sample("memory", model, bench.streamed(), tokens=tokens)
    layout, n_ctx = read_layout(model), bench.prompt_tokens + tokens + 1
    parts = {
        "expert cache": bench.cache_mb * MIB,
        "dense weights": layout.dense_total_bytes,
        "KV cache": kv_cache_bytes(layout, n_ctx),
        "compute buffers, estimated": compute_bytes(layout, n_ctx),
        "allowance": ALLOWANCE_BYTES,
    }
    counted = {
        "allowed: their sum": sum(parts.values()),
        "held at most (anonymous and shared memory, looked at every 50 ms)": run["cgroup_held_peak_bytes"],
        "the cgroup's own peak, page cache included": run["cgroup_peak_bytes"],
        "resident at most, as the process counts": run["peak_rss_bytes"],
    }
    rows = [(name, f"{nbytes / MIB:.0f}") for name, nbytes in (parts | counted).items() if nbytes is not None]
    notes = [f"{run['tokens']} tokens at {run['tok_per_s']:.2f} tok/s in a cgroup of {bench.limit_mb} MiB"]
    return [Table(f"Memory over {tokens} tokens", ("what", "MiB"), rows, notes)]
