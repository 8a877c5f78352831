"""A cell's process: what it was told arrives, what goes wrong is named, and it is gone at the end."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from moetriage.config import DropConfig, StreamConfig
from moetriage.errors import MoetriageError, UsageError
from moetriage.stream.cell import CellSpec
from moetriage.stream.cgroup import MemoryCgroup
from moetriage.stream.launch import launch
from moetriage.types import MIB

UNAVAILABLE = MemoryCgroup.available()
needs_cgroup = pytest.mark.skipif(UNAVAILABLE is not None, reason=f"no memory cgroup: {UNAVAILABLE}")


@pytest.fixture
def spec(tiny: Callable[..., Path]) -> CellSpec:
    return CellSpec(
        model=tiny("tiny-qwen3moe"), config=StreamConfig(cache_mb=2, io_threads=1), prompt_tokens=9, tokens=5, n_threads=1, seed=4
    )


def changed(spec: CellSpec, **values: object) -> CellSpec:
    return CellSpec(**vars(spec) | values)  # type: ignore[arg-type]


def test_a_spec_survives_json() -> None:
    config = StreamConfig(cache_mb=9, drop=DropConfig(threshold=0.5, renorm=False), replay_drops=None, force_routing=Path("t.csv"))
    spec = CellSpec(model=Path("m.gguf"), config=config, prompt_tokens=3, tokens=4, n_ctx=99, seconds=1.5)
    assert CellSpec.from_json(spec.to_json()) == spec
    assert json.loads(spec.to_json())["config"]["drop"]["threshold"] == 0.5


def test_a_cell_evaluates_exactly_its_tokens_and_reports_each_step(spec: CellSpec) -> None:
    seen: list[tuple[str, int]] = []
    outcome = launch(spec, on_step=lambda phase, tokens: seen.append((phase, tokens)))
    assert seen == [("prefill", 9), *(("decode", n) for n in range(1, 6))]
    assert outcome.result is not None
    assert outcome.result.report["prefill"]["tokens"] == 9
    assert outcome.result.report["decode"]["tokens"] == 5
    assert outcome.result.report["generated"] == 6
    assert [step["phase"] for step in outcome.result.steps] == [0] + 5 * [1]
    assert (outcome.limit_bytes, outcome.held_peak_bytes) == (None, None)
    assert outcome.peak_bytes == outcome.result.report["peak_rss_bytes"]


def test_a_refused_setting_is_the_childs_own_error(spec: CellSpec) -> None:
    with pytest.raises(UsageError, match="--io-threads 99: must be between 1 and 32"):
        launch(changed(spec, config=StreamConfig(io_threads=99)))


def test_a_child_that_is_not_done_in_time_is_ended_and_has_no_result(spec: CellSpec) -> None:
    outcome = launch(changed(spec, tokens=100_000, n_ctx=128_000), kill_after_seconds=0.1)
    assert outcome.result is None
    assert outcome.peak_bytes == 0


def test_a_crash_is_named_by_its_signal(spec: CellSpec, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    crashing = tmp_path / "python"
    crashing.write_text("#!/bin/sh\necho about to crash >&2\nkill -SEGV $$\n")
    crashing.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(crashing))
    with pytest.raises(MoetriageError, match="its process ended by SIGSEGV: about to crash"):
        launch(spec)


@needs_cgroup
def test_inside_a_limit_the_peak_is_the_cgroups(spec: CellSpec) -> None:
    outcome = launch(spec, limit_bytes=512 * MIB)
    assert outcome.limit_bytes == 512 * MIB
    assert outcome.held_peak_bytes is not None
    assert 20 * MIB < outcome.held_peak_bytes <= outcome.peak_bytes <= 512 * MIB


@needs_cgroup
def test_a_child_that_its_limit_kills_is_told_from_a_crash(spec: CellSpec) -> None:
    with pytest.raises(MoetriageError, match=r"more than its memory limit of \d+ bytes and was killed"):
        launch(spec, limit_bytes=24 * MIB)


@pytest.mark.parametrize("limit_bytes", [None, pytest.param(512 * MIB, marks=needs_cgroup)])
def test_an_interrupt_takes_the_child_and_its_cgroup_along(spec: CellSpec, limit_bytes: int | None) -> None:
    cgroups: list[str] = []

    def interrupt(_phase: str, _tokens: int) -> None:
        cgroups.extend(line.rpartition(":")[2] for pid in cells_of(spec.model) for line in cgroup_lines(pid) if "/moetriage-" in line)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        launch(changed(spec, tokens=5_000, n_ctx=5_100), limit_bytes=limit_bytes, on_step=interrupt)
    assert cells_of(spec.model) == []
    assert bool(cgroups) == (limit_bytes is not None)
    assert not [path for name in cgroups for path in Path("/sys/fs/cgroup").rglob(name.rpartition("/")[2])]


def cells_of(model: Path) -> list[int]:
    """Return the ids of processes that run a cell on the model."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().decode(errors="replace").split("\0")
            if "moetriage.stream.cell" in words and any(str(model) in word for word in words):
                found.append(int(path.parent.name))
    return found


def cgroup_lines(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cgroup").read_text().splitlines()
