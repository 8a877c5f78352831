"""The command line in this process (fast, and what it calls can be replaced) and as a process of its own (signals, pipes)."""

from __future__ import annotations

import os
import subprocess
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from cli.support import Command, Result

from moetriage.cli.main import invoke


def on_one_thread(arguments: Sequence[object]) -> list[str]:
    """Let runs compute on one thread: several wait for each other by spinning, which takes a hundred times as long on busy machines."""
    words = [str(argument) for argument in arguments]
    return [words[0], "--threads", "1", *words[1:]] if words[:1] in (["run"], ["chat"]) else words


@pytest.fixture(autouse=True)
def _memory_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """`moetriage train` has its process keep freed memory for good, which tests of memory in the same process would be misled by."""
    monkeypatch.setattr("moetriage.train.allocator.keep_freed_memory", lambda: False)


@pytest.fixture
def command(capfd: pytest.CaptureFixture[str]) -> Command:
    """Run a command in this process; what llama.cpp itself prints is captured too."""

    def run(*arguments: object) -> Result:
        capfd.readouterr()
        code = invoke(on_one_thread(arguments))
        return Result(code, *capfd.readouterr())

    return run


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a command as a process; whatever is left of it at the end of the test is killed."""
    script = Path(sysconfig.get_path("scripts")) / "moetriage"
    started: list[subprocess.Popen[str]] = []

    def run(*arguments: object, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            [script, *on_one_thread(arguments)], text=True, env=os.environ | (env or {}), stdin=pipe, stdout=pipe, stderr=pipe
        )
        started.append(process)
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def model(tiny: Callable[..., Path]) -> Path:
    """The model that most tests run: top-4 of 16 experts in 4 layers, 5 MiB of experts, T is 1.3 MiB."""
    return tiny("tiny-qwen3moe")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    mount = tmp_path / "small"
    mount.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(mount)], capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"no file system can be mounted here: {made.stderr.strip()}")
    yield mount
    subprocess.run(["umount", str(mount)], check=True)
