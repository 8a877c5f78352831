"""``moetriage chat`` with piped lines: history, commands, and what happens when an answer cannot be had or is stopped."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moetriage.trace.io import read_trace

Start = Callable[..., "subprocess.Popen[str]"]
GREEDY = ("--temp", "0", "-n", "6")


def talk(start: Start, lines: str, *arguments: object) -> tuple[int, str, str]:
    process = start("chat", *arguments)
    out, err = process.communicate(lines, timeout=60)
    return process.returncode, out, err


def turns(start: Start, lines: str, *arguments: object) -> list[Any]:
    code, out, err = talk(start, lines, *arguments, "--json")
    assert code == 0, err
    assert len(out.splitlines()) == 1
    found: list[Any] = json.loads(out)["turns"]
    return found


def test_each_line_gets_an_answer_and_a_summary(start: Start, model: Path) -> None:
    code, out, err = talk(start, "Hello\nAnd you?\n", model, *GREEDY)
    reports = turns(start, "Hello\nAnd you?\n", model, *GREEDY)
    assert code == 0
    assert out == "".join(f"{report['text']}\n" for report in reports)
    assert len(err.splitlines()) == 2
    assert all("6 tokens" in line and "tok/s" in line for line in err.splitlines())


def test_the_conversation_is_remembered_and_evaluated_once(start: Start, model: Path) -> None:
    first, second, third = turns(start, "Hello\nHello\nHello\n", model, *GREEDY)
    assert 0 < second["prefill"]["tokens"] < first["prefill"]["tokens"] + 30
    again = turns(start, "Hello\n/reset\nHello\n", model, *GREEDY)
    assert [report["token_ids"] for report in again] == [first["token_ids"]] * 2
    assert third["cache"]["misses"] < first["cache"]["misses"]


def test_a_system_message_begins_the_conversation_also_after_a_reset(start: Start, model: Path) -> None:
    plain = turns(start, "Hello\n", model, *GREEDY)
    first, second = turns(start, "Hello\n/reset\nHello\n", model, *GREEDY, "--system", "Be brief and friendly")
    assert first["prefill"]["tokens"] > plain[0]["prefill"]["tokens"]
    assert first["token_ids"] == second["token_ids"]


def test_exit_leaves_and_an_unknown_command_is_not_sent_to_the_model(start: Start, model: Path) -> None:
    code, out, err = talk(start, "/rest\n\n/exit\nHello\n", model, *GREEDY)
    assert (code, out) == (0, "")
    assert err.splitlines() == [
        "moetriage: there is no /rest: /reset forgets the conversation, /exit or Ctrl-D leaves, Ctrl-C stops an answer"
    ]


def test_a_line_too_long_for_the_context_is_refused_and_the_chat_goes_on(start: Start, model: Path) -> None:
    code, out, err = talk(start, "x" * 600 + "\nHello\n", model, *GREEDY, "-c", "256")
    assert code == 0
    assert len(out.splitlines()) == 1
    refused, answered = err.splitlines()
    assert "the context 256" in refused
    assert "6 tokens" in answered


def test_ctrl_c_stops_an_answer_and_returns_to_the_prompt(start: Start, model: Path) -> None:
    process = start("chat", model, "--temp", "0", "-n", "3000", "--cache-mb", "0")
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("Hello\n")
    process.stdin.flush()
    process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate("/exit\n", timeout=60)
    assert process.returncode == 0
    assert out.endswith("\n")
    end, summary = err.splitlines()
    assert end == "stopped by Ctrl-C"
    n_tokens = int(summary.split(" ")[0])
    assert 0 < n_tokens < 3000


def test_a_trace_numbers_the_turns(start: Start, model: Path, tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    reports = turns(start, "Hello\nAnd you?\n", model, *GREEDY, "--route-trace", path, "--csv", tmp_path / "m.csv")
    frame = read_trace(path).frame
    for turn, report in enumerate(reports):
        assert int(frame.filter(frame["turn"] == turn)["expert_bytes"].sum()) == report["read_bytes"]
    assert sorted(frame["turn"].unique()) == [0, 1]
    assert len((tmp_path / "m.csv").read_text().splitlines()) == 5 + 2 * 6
