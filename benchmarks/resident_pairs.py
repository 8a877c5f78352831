"""Child of bench_stream: plain llama.cpp and streaming in one process, all experts in memory, token by token in turns.

In: a JSON object as the only argument. Out: one JSON line. ``repacked`` instead runs plain llama.cpp as it comes, with repacking, alone:
that may crash, so it gets a process of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import harness
import llama_cpp
import llama_cpp.llama_cpp as lib

from moetriage.config import StreamConfig
from moetriage.gguf.layout import read_layout
from moetriage.stream.cell import prompt_of
from moetriage.stream.llama import Llama
from moetriage.types import MIB, TokenMetrics


def main() -> None:
    asked = json.loads(sys.argv[1])
    run = repacked if asked.pop("repacked") else pairs
    print(json.dumps(run(**asked)))


def pairs(model: str, threads: int, prompt_tokens: int, tokens: int, rounds: int) -> dict[str, Any]:
    """Return every round's two turns. Raises SystemExit if they do not say the same."""
    sizes: dict[str, Any] = {"n_ctx": prompt_tokens + tokens + 1, "n_threads": threads, "n_threads_batch": threads}
    cache_mb = -(-read_layout(Path(model)).expert_total_bytes // MIB)
    with (
        contextlib.closing(plain_llama(model, repacking=False, **sizes)) as plain,
        contextlib.closing(Llama(model, stream=StreamConfig(cache_mb=cache_mb), notify=lambda _line: None, **sizes)) as streamed,
    ):
        prompt = plain.tokenize(prompt_of(plain, prompt_tokens).encode(), add_bos=False, special=True)
        for llm in (plain, streamed):  # reads every expert that will be used, and checks what is said before it is timed
            turn(llm, prompt, tokens)
        done = []
        for number in range(rounds):
            with harness.watched() as found:
                order = [("plain", plain), ("streamed", streamed)]
                turns = {name: turn(llm, prompt, tokens) for name, llm in (order if number % 2 == 0 else order[::-1])}
            if turns["plain"]["token_ids"] != turns["streamed"]["token_ids"]:
                raise SystemExit("streaming and plain llama.cpp said different tokens: nothing is timed")
            done.append(turns | {"others_cpu": found.others_cpu})
    return {"cache_mb": cache_mb, "rounds": done}


def repacked(model: str, threads: int, prompt_tokens: int, tokens: int, rounds: int) -> dict[str, Any]:
    """Return the turns of plain llama.cpp with its default, repacking on."""
    sizes: dict[str, Any] = {"n_ctx": prompt_tokens + tokens + 1, "n_threads": threads, "n_threads_batch": threads}
    with contextlib.closing(plain_llama(model, repacking=True, **sizes)) as llm:
        prompt = llm.tokenize(prompt_of(llm, prompt_tokens).encode(), add_bos=False, special=True)
        turn(llm, prompt, tokens)
        return {"rounds": [turn(llm, prompt, tokens) for _ in range(rounds)]}


def plain_llama(model: str, *, repacking: bool, **sizes: Any) -> llama_cpp.Llama:
    """Return llama_cpp's own class; it has no argument for repacking, only the C function that gives its defaults has."""
    defaults = lib.llama_model_default_params

    def params() -> Any:
        found = defaults()
        found.use_extra_bufts = repacking
        return found

    lib.llama_model_default_params = params
    try:
        return llama_cpp.Llama(model, verbose=False, **sizes)
    finally:
        lib.llama_model_default_params = defaults


def turn(llm: llama_cpp.Llama, prompt: list[int], tokens: int) -> dict[str, Any]:
    """Generate once from an empty sequence with a fixed seed; times are of this process's clock."""
    steps: list[TokenMetrics] = []
    if isinstance(llm, Llama):
        llm.session.on_step = steps.append
    llm.reset()  # type: ignore[no-untyped-call]
    llm.set_seed(1)
    times, ids = [time.perf_counter()], []
    for token in generated(llm, prompt, tokens + 1):
        times.append(time.perf_counter())
        ids.append(token)
    each = [after - before for before, after in itertools.pairwise(times[1:])]
    decode = [dataclasses.asdict(step) for step in steps if step.phase == 1]
    return {
        "token_ids": ids,
        "prefill_seconds": times[1] - times[0],
        "token_seconds": statistics.fmean(each),
        "token_seconds_median": statistics.median(each),
        "phases": {
            name: statistics.fmean(step[f"{name}_seconds"] for step in decode) for name in ("compute", "read_wait", "cache", "other")
        }
        if decode
        else None,
        "misses": sum(step["misses"] for step in decode),
    }


def generated(llm: llama_cpp.Llama, prompt: list[int], count: int) -> Iterator[int]:
    with contextlib.closing(llm.generate(prompt, temp=0.8, top_k=40, top_p=0.95)) as tokens:
        for number, token in enumerate(tokens, start=1):
            yield token
            if number == count:
                return


if __name__ == "__main__":
    main()
