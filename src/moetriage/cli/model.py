"""``moetriage inspect``, ``iobench`` and ``synth``: what a model asks for, what a disk gives, and models to try both on.

In: options. Out: tables or JSON on standard output. What is measured and computed is the business of ``gguf`` and ``stream``.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moetriage.cli import terminal
from moetriage.cli.models import model_path
from moetriage.cli.options import Json, Model
from moetriage.errors import UsageError
from moetriage.types import MIB

if TYPE_CHECKING:
    from moetriage.gguf.inspect import Floor, Inspection
    from moetriage.gguf.layout import ModelLayout
    from moetriage.stream.budget import Budget
    from moetriage.stream.iobench import LaneResult


def inspect(
    model: Model,
    hit_fraction: Annotated[
        float | None, typer.Option(metavar="H", help="Share of expert bytes found in the cache, 0 to 1 (default: several).")
    ] = None,
    disk_mb_s: Annotated[
        float | None, typer.Option(metavar="N", help="Random read rate in 10^6 bytes a second (default: measured, 0.4 s).")
    ] = None,
    ctx_size: Annotated[
        int | None, typer.Option("--ctx-size", "-c", metavar="N", help="Context in tokens (default: 4096, at most the model's own).")
    ] = None,
    json_output: Json = False,
) -> None:
    """Say what a model asks of memory and disk, what cache --cache-mb auto would choose here, and what reads cost a token at least."""
    from moetriage.gguf.inspect import inspect_model
    from moetriage.gguf.layout import read_layout
    from moetriage.stream.memory_plan import plan_budget

    path = model_path(model)
    layout = read_layout(path)
    rate, why_not = (disk_mb_s, "") if disk_mb_s is not None else _disk_rate(layout)
    found = inspect_model(path, hit_fraction=hit_fraction, disk_mb_s=rate, n_ctx=ctx_size)
    budget = plan_budget(layout, found.n_ctx)
    if json_output:
        auto = {"budget_bytes": budget.bytes, "source": budget.source, "notes": list(budget.notes)}
        terminal.print_json(found.as_dict() | {"disk_measured": disk_mb_s is None and rate is not None, "auto": auto})
        return
    terminal.print_facts(_facts(found, budget, measured=disk_mb_s is None, why_not=why_not))
    if found.floors:
        terminal.print_table(("hits", "s a token, at least", "tok/s, at most"), [_floor_row(floor) for floor in found.floors])


def _disk_rate(layout: ModelLayout) -> tuple[float | None, str]:
    """Return the disk's rate, or why it cannot be measured (a file in memory, for example): all else is known all the same."""
    from moetriage.stream.iobench import quick_disk_rate

    try:
        return quick_disk_rate(layout.paths[0], layout=layout), ""
    except UsageError as error:
        return None, str(error)


def _facts(found: Inspection, budget: Budget, *, measured: bool, why_not: str) -> list[tuple[str, str]]:
    shared = f", {found.n_expert_shared} shared" if found.n_expert_shared else ""
    per_expert = terminal.size(found.expert_bytes_min)
    if found.expert_bytes_max != found.expert_bytes_min:
        per_expert += f" to {terminal.size(found.expert_bytes_max)}"
    rate = f"not measured: {why_not}" if found.disk_mb_s is None else f"{found.disk_mb_s:.0f} MB/s" + (" (measured)" if measured else "")
    parts = "" if len(found.paths) == 1 else f" in {len(found.paths)} files"
    return [
        ("model", found.name or "(no name)"),
        ("file", f"{found.paths[0]} ({terminal.size(found.file_bytes)}{parts})"),
        ("architecture", f"{found.arch}, {found.n_layer} layers, {found.n_moe_layer} with experts"),
        ("experts", f"{found.n_expert} a layer, {found.top_k} used{shared}; {', '.join(found.expert_types)}"),
        ("one expert", per_expert),
        ("all experts", terminal.size(found.expert_total_bytes)),
        ("dense weights", terminal.size(found.dense_total_bytes)),
        ("KV cache", f"{terminal.size(found.kv_bytes)} for {found.n_ctx} tokens (the model's own context is {found.n_ctx_train})"),
        ("working set T", f"{terminal.size(found.working_set_bytes)} a token"),
        ("smallest cache", f"--cache-mb {found.smallest_cache_mib}: below that no read is ever saved"),
        ("--cache-mb auto", _auto(budget)),
        ("disk", rate),
    ]


def _auto(budget: Budget) -> str:
    source = budget.source.removeprefix("auto: ")
    chosen = f"about {budget.bytes // MIB} MiB of cache ({source})" if budget.bytes else f"no cache ({source})"
    return "; ".join([chosen, *budget.notes])


def _floor_row(floor: Floor) -> tuple[str, str, str]:
    seconds = floor.seconds_per_token
    return f"{100 * floor.hit_fraction:g}%", f"{seconds:.4f}", f"{1 / seconds:.1f}" if seconds > 0 else "not limited"


def iobench(
    path: Annotated[Path, typer.Argument(metavar="PATH", help="A model, another file, or a directory (a test file is written there).")],
    lanes: Annotated[str, typer.Option(metavar="N,N,...", help="Numbers of reads at the same time.")] = "1,2,4,8,16",
    seconds: Annotated[float, typer.Option(metavar="S", help="How long each number of lanes is measured.")] = 2.0,
    read_kib: Annotated[
        int | None, typer.Option(metavar="N", help="Size of a read in KiB (default: one expert's matrix; 1024 without a model).")
    ] = None,
    json_output: Json = False,
) -> None:
    """Measure random reads of expert size past the page cache: what the disk can give the engine. Never reads from memory."""
    from moetriage.stream.iobench import bench_reads

    counts = _lane_counts(lanes)
    if read_kib is not None and read_kib < 1:
        raise UsageError(f"--read-kib {read_kib}: must be at least 1")
    with terminal.spinner(f"reading {path}") as update:
        results = bench_reads(
            path,
            lanes=counts,
            seconds=seconds,
            expert_bytes=None if read_kib is None else read_kib * 1024,
            progress=lambda result: update(f"{result.lanes} lanes: {result.mb_s:.0f} MB/s"),
        )
    if json_output:
        terminal.print_json({"path": str(path), "results": [dataclasses.asdict(result) for result in results]})
        return
    terminal.print_table(("lanes", "MB/s", "reads/s", "ms, median", "ms, 99%", "O_DIRECT"), [_lane_row(result) for result in results])
    terminal.note(f"reads of {terminal.size(results[0].bytes / results[0].reads)}; MB are 10^6 bytes")


def _lane_counts(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.isascii() and part.isdecimal() and len(part) < 9 for part in parts):
        raise UsageError(f"--lanes {text}: must be numbers with commas between them, such as 1,4,16")
    return [int(part) for part in parts]


def _lane_row(result: LaneResult) -> tuple[str, ...]:
    direct = "on" if result.odirect else "off: evicted before"
    numbers = (f"{result.mb_s:.0f}", f"{result.iops:.0f}", f"{result.latency_ms_p50:.2f}", f"{result.latency_ms_p99:.2f}")
    return (str(result.lanes), *numbers, direct)


def synth(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="File to write; with --split the name that the parts' names begin with.")],
    like: Annotated[str, typer.Option("--like", metavar="SHAPE", help="Shape of the model (docs: tiny-qwen3moe, ..., qwen3-30b-a3b).")],
    layers: Annotated[int | None, typer.Option(metavar="N", help="Layers in place of the shape's own.")] = None,
    ggml_type: Annotated[
        str | None, typer.Option("--type", metavar="TYPE", help="Type of all matrices, such as q4_0, q8_0 or f32 (default: the shape's).")
    ] = None,
    split: Annotated[int, typer.Option(metavar="N", help="Number of files.")] = 1,
    seed: Annotated[int, typer.Option(metavar="N", help="Another seed gives other weights.")] = 0,
    force: Annotated[bool, typer.Option("--force", help="Replace existing files.")] = False,
    json_output: Json = False,
) -> None:
    """Write a model with random weights that llama.cpp loads and runs, for tests and benchmarks."""
    from moetriage.gguf.synth import write_model

    with terminal.byte_bar(f"writing {out.name}") as progress:
        paths = write_model(out, like, layers=layers, ggml_type=ggml_type, split=split, seed=seed, progress=progress, force=force)
    total = sum(path.stat().st_size for path in paths)
    if json_output:
        terminal.print_json({"paths": [str(path) for path in paths], "bytes": total})
        return
    for path in paths:
        print(path)
    terminal.note(f"{terminal.size(total)} written")
