"""``moetriage inspect``, ``iobench`` and ``synth``, and what the command says of itself."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from cli.support import Command

from moetriage import __version__
from moetriage.gguf.layout import read_layout
from moetriage.stream import iobench, memory_plan
from moetriage.stream.iobench import LaneResult
from moetriage.stream.memory_limit import MemoryLimit
from moetriage.types import MIB

ROOM = MemoryLimit(1024 * MIB, "/sys/fs/cgroup/memory.max", 2048 * MIB)


@pytest.fixture
def room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_plan, "memory_limit", lambda: ROOM)


def test_inspect_says_what_the_model_asks_and_what_auto_would_choose(command: Command, model: Path, room: None) -> None:
    found = command("inspect", model, "--disk-mb-s", "1000", "--hit-fraction", "0.75", "--json").json
    assert (found["arch"], found["n_moe_layer"], found["n_expert"], found["top_k"]) == ("qwen3moe", 4, 16, 4)
    assert found["expert_bytes_min"] == found["expert_bytes_max"] == 82_944
    assert found["expert_total_bytes"] == 4 * 16 * 82_944
    assert found["working_set_bytes"] == 4 * 4 * 82_944
    assert found["smallest_cache_mib"] == 2
    assert found["floors"] == [{"hit_fraction": 0.75, "seconds_per_token": pytest.approx(0.25 * 4 * 4 * 82_944 / 1e9)}]
    assert found["disk_measured"] is False
    assert found["auto"] == {"budget_bytes": 4 * 16 * 82_944, "source": "auto: all experts fit", "notes": []}


def test_inspect_prints_the_same_for_people(command: Command, tiny: Callable[..., Path], room: None) -> None:
    result = command("inspect", tiny("tiny-deepseek2"), "--disk-mb-s", "1000")
    assert result.code == 0
    for part in (
        "deepseek2, 4 layers, 3 with experts",
        "16 a layer, 4 used, 1 shared",
        "q5_0",
        "--cache-mb",
        "1000 MB/s",
        "all experts fit",
    ):
        assert part in result.out
    for share in ("0%", "50%", "75%", "90%"):
        assert f" {share} " in result.out


def test_inspect_says_where_a_cache_finds_no_room(command: Command, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_plan, "memory_limit", lambda: MemoryLimit(20 * MIB, "/sys/fs/cgroup/memory.max", 64 * MIB))
    result = command("inspect", model, "--disk-mb-s", "1000")
    assert result.code == 0
    assert "no cache" in result.out
    assert command("inspect", model, "--disk-mb-s", "1000", "--json").json["auto"]["budget_bytes"] == 0


def test_inspect_goes_on_where_the_disk_cannot_be_measured(command: Command, model: Path, room: None) -> None:
    def refuse(*_args: object, **_kwargs: object) -> float:
        raise iobench.UsageError("this file is memory")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(iobench, "quick_disk_rate", refuse)
        result = command("inspect", model)
        found = command("inspect", model, "--json").json
    assert result.code == 0
    assert "not measured: this file is memory" in result.out
    assert (found["disk_mb_s"], found["floors"], found["disk_measured"]) == (None, [], False)


def test_inspect_measures_the_disk_that_holds_the_model(command: Command, model: Path, room: None) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(iobench, "quick_disk_rate", lambda path, *, layout: 1234.0 if path == model else 0.0)
        found = command("inspect", model, "--json").json
    assert found["disk_mb_s"] == 1234.0
    assert found["disk_measured"] is True


#: Prints what the session of a model (first argument) in a context (second) measures for it, in bytes.
_MEASURE = """
import sys
from pathlib import Path
from moetriage.config import StreamConfig
from moetriage.stream import weights
from moetriage.stream.runner import Runner

original = weights.resolve_budget

def watch(*args, **kwargs):
    print(kwargs["kv_bytes"] + kwargs["compute_bytes"])
    return original(*args, **kwargs)

weights.resolve_budget = watch
with Runner(Path(sys.argv[1]), StreamConfig(), n_ctx=int(sys.argv[2]), n_threads=1):
    pass
"""


@pytest.mark.parametrize(("shape", "n_ctx"), [("tiny-qwen3moe", 16_384), ("tiny-deepseek2", 8_192), ("tiny-gemma4", 16_384)])
def test_the_plan_is_about_what_a_session_then_measures(shape: str, n_ctx: int, tiny: Callable[..., Path]) -> None:
    """What the session measures has some 20 to 60 MiB more in it, thread stacks and the like.

    In a process of its own: memory that earlier tests freed and the C library kept would be taken first and not be counted.
    """
    layout = read_layout(tiny(shape))
    command = [sys.executable, "-c", _MEASURE, str(tiny(shape)), str(n_ctx)]
    (measured,) = map(int, subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.split())
    foretold = memory_plan.kv_cache_bytes(layout, n_ctx) + memory_plan.compute_bytes(layout, n_ctx)
    assert foretold > 160 * MIB
    # Arenas of the allocator come on top, as many as the process has threads.
    assert foretold - 40 * MIB <= measured <= 1.3 * foretold + 40 * MIB


def test_iobench_prints_a_row_for_each_number_of_lanes(command: Command, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, object] = {}

    def bench(path: Path, **arguments: object) -> list[LaneResult]:
        asked.update(arguments, path=path)
        row = {"reads": 10, "bytes": 40_960, "seconds": 1.0, "mb_s": 512.0, "iops": 10.0, "latency_ms_p50": 1.0, "latency_ms_p99": 2.0}
        return [LaneResult(lanes=lanes, odirect=True, **row) for lanes in (1, 4)]  # type: ignore[arg-type]

    monkeypatch.setattr(iobench, "bench_reads", bench)
    flags = ("--lanes", "1,4", "--seconds", "0.5", "--read-kib", "4")
    result = command("iobench", model, *flags)
    assert result.code == 0
    assert [line.split()[:2] for line in result.out.splitlines() if "512" in line] == [["1", "512"], ["4", "512"]]
    assert (asked["path"], asked["lanes"], asked["seconds"], asked["expert_bytes"]) == (model, [1, 4], 0.5, 4096)
    found = command("iobench", model, *flags, "--json").json
    assert [row["lanes"] for row in found["results"]] == [1, 4]


def test_synth_writes_a_model_that_runs(command: Command, tmp_path: Path) -> None:
    result = command("synth", tmp_path / "m.gguf", "--like", "tiny-olmoe", "--layers", "2", "--type", "f32", "--split", "2", "--json")
    assert result.code == 0
    paths = [Path(path) for path in result.json["paths"]]
    assert [path.name for path in paths] == ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]
    assert result.json["bytes"] == sum(path.stat().st_size for path in paths)
    report = command("run", paths[0], "-p", "Hello", "-n", "3", "--json").json
    assert report["generated"] == 3
    again = command("synth", tmp_path / "m.gguf", "--like", "tiny-olmoe", "--split", "2")
    assert again.code == 2
    assert "exists already" in again.err
    assert command("synth", tmp_path / "m.gguf", "--like", "tiny-olmoe", "--split", "2", "--force").out.splitlines() == list(
        map(str, paths)
    )


@pytest.mark.parametrize("arguments", [[], ["--help"], *([name, "--help"] for name in ("run", "chat", "inspect", "iobench", "synth"))])
def test_help_is_for_standard_output(arguments: list[str], command: Command) -> None:
    result = command(*arguments)
    assert (result.code, result.err) == (0, "")
    assert "Usage: moetriage" in result.out


def test_the_version_is_the_packages(command: Command) -> None:
    assert command("--version").out == f"moetriage {__version__}\n"


def test_help_comes_before_anything_heavy_is_loaded() -> None:
    heavy = ("llama_cpp", "numpy", "polars", "moetriage._native")
    code = f"import sys; from moetriage.cli.main import invoke; invoke(['run', '--help']); print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]"


def test_help_names_every_flag_of_the_design(command: Command) -> None:
    text = command("run", "--help").out
    flags = """--prompt --n-predict --cache-mb --cache-ceil-mb --force-cache --io-threads --no-odirect --mmap --dense-weights --prefetch
        --n-expert-used --drop-cold-experts --drop-in-prefill --drop-no-renorm --drop-raw-weight --replay-drops --force-routing
        --route-trace --csv --progress --chat --temp --top-k --top-p --seed --ctx-size --threads --json"""
    assert [flag for flag in flags.split() if f"{flag} " not in text] == []


@pytest.mark.big
def test_inspect_of_a_17_gb_file_takes_less_than_a_second(command: Command, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    assert command("synth", path, "--like", "qwen3-30b-a3b").code == 0
    began = time.perf_counter()
    result = command("inspect", path, "--disk-mb-s", "1000")
    assert result.code == 0
    assert time.perf_counter() - began < 1
