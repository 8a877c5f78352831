"""``moetriage demo`` as people run it: its table, its JSON, and that Ctrl-C or a kill leaves no process, cgroup or file behind."""

from __future__ import annotations

import signal
import subprocess
import tempfile
import time
from collections import namedtuple
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cli.support import Command
from demo.support import N_LAYER, SHAPE, TOKENS, write_trace

from moetriage.demo import plan
from moetriage.demo import run as demo_run
from moetriage.stream.cgroup import MemoryCgroup

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def folder() -> Iterator[Path]:
    """On a disk: the demo refuses memory, and /tmp may be in memory."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        yield Path(name)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_trace(tmp_path_factory.mktemp("trace") / "made-up.parquet")


@pytest.fixture
def tiny_demo(folder: Path, trace: Path) -> list[object]:
    return ["demo", "--dir", folder, "--shape", SHAPE, "--layers", N_LAYER, "--trace", trace, "--threads", 1]


@pytest.fixture
def two_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the first two cells only, for the sake of time."""
    monkeypatch.setattr(demo_run, "plan_cells", lambda *arguments: plan.plan_cells(*arguments)[:2])


def cells_in(folder: Path) -> list[int]:
    """Return the ids of processes that run a cell on a model in the folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace")
        except OSError:
            continue
        if "moetriage.stream.cell" in words and str(folder) in words:
            found.append(int(path.parent.name))
    return found


def wait_for(condition: Callable[[], object], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)  # looking through all processes is work


def test_the_table_and_its_meaning_go_to_standard_output(command: Command, tiny_demo: list[object], folder: Path) -> None:
    result = command(*tiny_demo, "--tokens", 4)
    assert result.code == 0
    for words in ("plain mmap", "streamed, F=0.75", "streamed, F=1", "tok/s", "MiB read/token", "hits", "dropped", "peak memory"):
        assert words in result.out
    assert "The weights are random" in result.out
    for name in ("streamed", "streamed, F=0.75"):
        assert f"A small model trained on Python's standard library writes, {name}:" in result.out
    assert [line for line in result.errors if "(4 tokens)" in line] == [
        f"moetriage: {cell} (4 tokens)" for cell in ("plain mmap", "streamed", "streamed, F=0.75", "streamed, F=1")
    ]
    assert list(folder.iterdir()) == []


@pytest.mark.usefixtures("two_cells")
def test_json_is_one_object_on_the_last_line_and_names_a_file_that_is_kept(command: Command, tiny_demo: list[object], folder: Path) -> None:
    result = command(*tiny_demo, "--tokens", TOKENS, "--json", "--keep")
    assert result.code == 0
    assert len(result.out.splitlines()) == 1
    kept = Path(result.json["kept"])
    assert kept.parent == folder
    assert kept.stat().st_size == result.json["file_bytes"]
    assert [cell["tokens"] for cell in result.json["cells"]] == [TOKENS] * 2
    lossless, dropped = result.json["text"]
    assert lossless["text"].strip()
    assert lossless["drop"]["dropped"] == 0 < dropped["drop"]["dropped"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_while_a_cell_runs_leaves_nothing_behind(
    start: Start, tiny_demo: list[object], folder: Path, number: signal.Signals, code: int
) -> None:
    # So many tokens that no cell ends by itself.
    process = start(*tiny_demo, "--tokens", 100_000)
    wait_for(lambda: cells_in(folder))
    process.send_signal(number)
    assert process.wait(timeout=30) == code
    assert cells_in(folder) == []
    assert list(folder.iterdir()) == []


def test_ctrl_c_while_the_file_is_written_leaves_nothing_behind(start: Start, folder: Path) -> None:
    process = start("demo", "--dir", folder, "--layers", 2)
    wait_for(lambda: [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size > 1_000_000])
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=30) == 130
    assert list(folder.iterdir()) == []


def test_a_killed_demo_takes_its_cell_with_it(start: Start, tiny_demo: list[object], folder: Path) -> None:
    process = start(*tiny_demo, "--tokens", 100_000)
    wait_for(lambda: cells_in(folder))
    process.kill()
    process.wait(timeout=30)
    wait_for(lambda: not cells_in(folder))


def test_a_disk_that_is_too_small_ends_with_one_line(command: Command, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("Usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda _path: usage(10**12, 10**12, 1_161_000_000))
    result = command("demo", "--dir", folder)
    assert result.code == 2
    assert len(result.errors) == 1
    assert "needs 3.2 GB and the disk has 1.2 GB free; use fewer --layers" in result.errors[0]
    assert list(folder.iterdir()) == []


@pytest.mark.usefixtures("two_cells")
def test_where_no_cgroup_can_be_made_the_demo_says_that_mmap_is_flattered(
    command: Command, tiny_demo: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "_MAX_LIMIT_FRACTION", 1000.0)  # so that a limit is wanted for so small a file
    monkeypatch.setattr(MemoryCgroup, "available", classmethod(lambda _cls: "no memory controller is mounted; making one needs root"))
    result = command(*tiny_demo, "--tokens", 2)
    assert result.code == 0
    assert "There was no memory limit (no memory controller is mounted; making one needs root)" in result.out
    assert "flatters plain mmap" in result.out
