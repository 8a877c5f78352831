"""Ctrl-C in every stage of a run: the text so far, a summary, exit code 130, and outputs that are whole."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from moetriage.trace.io import read_trace

Start = Callable[..., "subprocess.Popen[str]"]
#: A decode that lasts until the context is full; after one batch of prefill, or after seven.
LONG = ("-n", "5000", "--temp", "0", "--cache-mb", "0")
PROMPTS = {"decode": "Hello there", "prefill": "Hello there, " * 280}


def interrupt_after_step(process: subprocess.Popen[str], phase: str) -> list[dict[str, object]]:
    """Send SIGINT once a step of the phase has been reported; return the steps reported until then."""
    assert process.stderr is not None
    steps = []
    for line in process.stderr:
        steps.append(json.loads(line))
        if steps[-1]["phase"] == phase:
            process.send_signal(signal.SIGINT)
            return steps
    raise AssertionError("the run ended before it could be interrupted")


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_ctrl_c_ends_a_run_with_a_report_and_whole_files(phase: str, suffix: str, start: Start, model: Path, tmp_path: Path) -> None:
    metrics, trace = tmp_path / "m.csv", tmp_path / f"t{suffix}"
    process = start("run", model, "-p", PROMPTS[phase], *LONG, "--json", "--progress", "--csv", metrics, "--route-trace", trace)
    steps = interrupt_after_step(process, phase)
    sent = time.monotonic()
    out, err = process.communicate(timeout=60)
    assert time.monotonic() - sent < 20
    assert process.returncode == 130
    steps += [json.loads(line) for line in err.splitlines()]
    report = json.loads(out)
    assert report["finish_reason"] == "interrupted"
    n_decoded = sum(step["phase"] == "decode" for step in steps)
    assert report["decode"]["tokens"] == n_decoded
    # The token of an evaluation that was ended had been sampled already.
    assert report["generated"] == len(report["token_ids"])
    assert report["generated"] - n_decoded in (0, 1)
    if phase == "prefill":
        assert n_decoded == 0
    assert sum(report["phases"].values()) == pytest.approx(report["decode_seconds"], abs=1e-3)
    assert len(metrics.read_text().splitlines()) == 5 + len(steps)
    recorded = read_trace(trace).frame
    assert recorded["step"].max() == int(str(steps[-1]["step"])) + int(str(steps[-1]["n_tokens"])) - 1
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([metrics.name, trace.name])


def test_ctrl_c_keeps_the_text_so_far_and_summarises_it(start: Start, model: Path) -> None:
    process = start("run", model, "-p", PROMPTS["decode"], *LONG)
    assert process.stdout is not None
    first = process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert (first + out).endswith("\n")
    assert len(first + out) > 1
    assert err.splitlines()[0] == "stopped by Ctrl-C"
    assert " tokens" in err.splitlines()[1]
    assert "Traceback" not in err


def test_ctrl_c_while_loading_is_quiet(start: Start, model: Path, tmp_path: Path) -> None:
    """The prompt is read before the model is loaded; that it was opened shows that the command is running."""
    import os

    fifo = tmp_path / "prompt"
    os.mkfifo(fifo)
    process = start("run", model, "-f", fifo, "-n", "5000")
    with fifo.open("w"):
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert out == ""
    assert err == ""
