#!/usr/bin/env python3
"""How fast streaming is and what it takes, held against plain llama.cpp on the same file. README.md says how to read it.

Cells: resident (everything in memory), big (a model larger than its memory), recorded (routed as the real model was), memory (peak over 500
tokens), settings (one changed at a time). Prints tables and, last, one JSON line; --save also writes them to results/.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import harness
from harness import Spread, Table
from stream_big import big, memory, recorded
from stream_runs import Bench
from stream_settings import settings

from moetriage import __version__
from moetriage.demo.plan import SHAPE, recorded_routing
from moetriage.errors import MoetriageError
from moetriage.gguf.synth import write_model

CELLS = ("resident", "big", "recorded", "memory", "settings")
HERE = Path(__file__).resolve().parent


def main(argv: Sequence[str]) -> int:
    parser = _parser()
    options = parser.parse_args(argv)
    if unknown := [cell for cell in options.cells if cell not in CELLS]:
        parser.error(f"there is no cell {unknown[0]}; there are: {', '.join(CELLS)}")
    chosen = options.cells or list(CELLS)
    bench = Bench(**{name: getattr(options, name) for name in Bench.__dataclass_fields__ if hasattr(options, name)})
    tables: list[Table] = []
    try:
        for cell in chosen:
            harness.say(f"== {cell}")
            found = _run(cell, bench, options)
            tables += found
            print("\n".join(table.markdown() for table in found), flush=True)
    except MoetriageError as error:
        print(f"bench_stream: {error}", file=sys.stderr)
        return error.exit_code
    summary = {
        "bench": "stream",
        "version": __version__,
        "machine": harness.machine(options.big or options.small or options.dir),
        "cells": chosen,
    }
    if options.save:
        head = f"# bench_stream: {', '.join(chosen)}\n\n{options.hardware or json.dumps(summary['machine'])}. {options.note}\n"
        harness.save(HERE / "results", options.save, options.label, options.date, tables, [summary, *bench.records], head)
    print(json.dumps(summary | {"tables": [harness.plain(table) for table in tables]}))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cells", nargs="*", metavar="CELL", help=f"of {', '.join(CELLS)} (default: all)")
    parser.add_argument("--big", type=Path, help="model of the cells big, recorded, memory (default: 48 layers, 17 GB, written to --dir)")
    parser.add_argument("--small", type=Path, help="model of the cells resident, settings (default: 12 layers, 4.6 GB, written to --dir)")
    parser.add_argument("--dir", type=Path, default=Path("/var/tmp/moetriage-bench"), help="where models are written and kept")
    defaults = Bench()
    for name, help_text in (
        ("threads", "computing threads"),
        ("rounds", "interleaved rounds; medians are over these"),
        ("prompt_tokens", "tokens of the prompt"),
        ("tokens", "tokens decoded after it"),
        ("limit_mb", "memory cgroup of the cells big, recorded, memory, in MiB; 0 for none"),
        ("cache_mb", "expert cache of the cells big and memory, in MiB"),
        ("lanes", "read lanes"),
        ("retries", "runs that others disturbed are repeated so often; the least disturbed counts"),
    ):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(defaults, name), help=f"{help_text} (%(default)s)")
    parser.add_argument("--mmap-seconds", type=float, default=Bench.mmap_seconds, help="cut a plain mmap run off then (%(default)s)")
    parser.add_argument("--patience", type=float, default=Bench.patience, help="wait so many seconds for a calm machine before a run")
    parser.add_argument("--max-others", type=float, default=Bench.max_others, help="others' part of the processors that disturbs a run")
    parser.add_argument("--memory-tokens", type=int, default=500, help="tokens of the cell memory")
    parser.add_argument("--save", metavar="WHAT", help="write results/WHAT_LABEL_DATE.md and .jsonl")
    parser.add_argument("--label", default="unnamed", help="the hardware in a word, for the file name")
    parser.add_argument("--hardware", default="", help="the hardware in a sentence, for the result file")
    parser.add_argument("--note", default="", help="what else a reader of the result file should know")
    parser.add_argument("--date", default=time.strftime("%Y-%m-%d"))
    return parser


def _run(cell: str, bench: Bench, options: argparse.Namespace) -> list[Table]:
    small = cell in ("resident", "settings")
    given = options.small if small else options.big
    model = given or _written(options.dir, 12 if small else 48)
    if cell == "resident":
        return resident(bench, model)
    if cell == "recorded":
        return recorded(bench, model, recorded_routing())
    if cell == "memory":
        return memory(bench, model, options.memory_tokens)
    return {"big": big, "settings": settings}[cell](bench, model)


def _written(folder: Path, layers: int) -> Path:
    """Return the benchmark's model, written the first time and kept."""
    path = folder / f"{SHAPE}-{layers}.gguf"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        harness.say(f"writing {path}")
        write_model(path, SHAPE, layers=layers)
    return path


def resident(bench: Bench, model: Path) -> list[Table]:
    """Decode with all experts in memory: streaming against plain llama.cpp without repacking in turns, and with its default beside it."""
    asked = {"model": str(model), "threads": bench.threads, "prompt_tokens": 32, "tokens": bench.tokens, "rounds": bench.rounds}
    harness.wait_until_calm(bench.patience)
    code, found = _child(asked | {"repacked": False})
    if found is None:
        raise MoetriageError(f"the resident pairs ended with status {code}")
    rounds = found["rounds"]
    bench.records += [{"label": "resident", "cache_mb": found["cache_mb"]} | one for one in rounds]
    rows = [
        _resident_row(name, [one[key] for one in rounds])
        for name, key in (("plain llama.cpp, repacking off", "plain"), ("streamed", "streamed"))
    ]
    code, default = _child(asked | {"repacked": True})
    if default is None:
        how = f"crashed ({signal.Signals(-code).name})" if code < 0 else f"failed (status {code})"
        rows.append(("plain llama.cpp, default (repacking on)", how, "-", "-", "-"))
    else:
        bench.records.append({"label": "resident, repacked"} | default)
        rows.append(_resident_row("plain llama.cpp, default (repacking on)", default["rounds"]))
    ratio = Spread.of([one["streamed"]["token_seconds"] / one["plain"]["token_seconds"] for one in rounds])
    compute = Spread.of([one["streamed"]["phases"]["compute"] / one["plain"]["token_seconds"] for one in rounds])
    notes = [
        f"a streamed token takes {ratio.text(3)} times as long as a plain one, pair by pair (target: at most 1.02); all said the same",
        f"compute of a streamed token is {compute.text(3)} of plain llama.cpp's whole token (target: not above it)",
        f"others used {Spread.of([100 * one['others_cpu'] for one in rounds]).text(0)} % of the processors meanwhile",
    ]
    columns = ("cell", "ms a token, mean", "ms, median token", "tok/s", "prefill of 32 tokens, s")
    return [Table("Everything in memory", columns, rows, notes)]


def _resident_row(name: str, turns: list[dict[str, Any]]) -> tuple[str, ...]:
    def of(key: str, scale: float) -> Spread:
        return Spread.of([scale * one[key] for one in turns])

    rate = Spread.of([1 / one["token_seconds"] for one in turns])
    return (name, of("token_seconds", 1e3).text(1), of("token_seconds_median", 1e3).text(1), rate.text(), of("prefill_seconds", 1).text())


def _child(asked: dict[str, Any]) -> tuple[int, dict[str, Any] | None]:
    done = subprocess.run([sys.executable, HERE / "resident_pairs.py", json.dumps(asked)], stdout=subprocess.PIPE, text=True, check=False)
    return done.returncode, json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
