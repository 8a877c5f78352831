"""``moetriage.Llama`` is a ``llama_cpp.Llama``: what works there works here, says the same, and survives what goes wrong."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest
from gates.harness import PROMPT, assert_same, counters, resident, say, streamed

from moetriage import Llama, StreamConfig
from moetriage.config import DropConfig
from moetriage.errors import UsageError
from moetriage.types import Phase

TEXT = "The quick brown fox"
ONE_THREAD: dict[str, Any] = {"n_threads": 1, "n_threads_batch": 1}


@pytest.fixture
def pair(model: Path) -> Iterator[tuple[llama_cpp.Llama, Llama]]:
    """Plain llama.cpp and a streaming session with an evicting cache, to be asked the same."""
    with resident(model) as plain, streamed(model, share=1.3) as llm:
        yield plain, llm


def completed(llm: llama_cpp.Llama, **arguments: Any) -> dict[str, Any]:
    return llm.create_completion(TEXT, **{"max_tokens": 24, "temperature": 1.2, "seed": 5} | arguments)


def test_completion_says_what_llama_cpp_says(pair: tuple[llama_cpp.Llama, Llama]) -> None:
    expected, got = (completed(llm) for llm in pair)
    assert got["choices"] == expected["choices"]
    assert got["usage"] == expected["usage"]
    assert got["usage"]["completion_tokens"] == 24
    assert got["choices"][0]["finish_reason"] == "length"
    assert counters(pair[1])["reads"] > 0


def test_streamed_chunks_make_the_same_text(pair: tuple[llama_cpp.Llama, Llama]) -> None:
    expected = completed(pair[0])["choices"][0]["text"]
    chunks = [chunk["choices"][0]["text"] for chunk in completed(pair[1], stream=True)]
    assert "".join(chunks) == expected
    assert len(chunks) > 2


def test_a_stop_text_ends_the_text_before_it(pair: tuple[llama_cpp.Llama, Llama]) -> None:
    whole = completed(pair[0])["choices"][0]["text"]
    stop = whole[len(whole) // 2 :][:2]
    expected, got = (completed(llm, stop=[stop])["choices"][0] for llm in pair)
    assert got == expected
    assert got["finish_reason"] == "stop"
    assert got["text"] == whole[: whole.index(stop)]
    assert completed(pair[1])["choices"][0]["text"] == whole, "the session goes on"


def test_chat_uses_the_models_own_template(pair: tuple[llama_cpp.Llama, Llama]) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello?"}]
    expected, got = (llm.create_chat_completion(messages, max_tokens=12, temperature=1.0, seed=3) for llm in pair)
    assert got["choices"] == expected["choices"]
    assert got["usage"]["prompt_tokens"] > len("Hello?"), "the template's own text is in the prompt"
    assert pair[1].chat_format == "chat_template.default"


def test_a_grammar_binds_the_text(pair: tuple[llama_cpp.Llama, Llama]) -> None:
    grammar = llama_cpp.LlamaGrammar.from_string('root ::= "yes" | "no"', verbose=False)
    expected, got = (completed(llm, grammar=grammar)["choices"][0]["text"] for llm in pair)
    assert got == expected
    assert got in ("yes", "no")


def test_a_json_schema_binds_the_answer(pair: tuple[llama_cpp.Llama, Llama]) -> None:
    schema = {"type": "object", "properties": {"answer": {"enum": ["left", "right"]}}, "required": ["answer"]}
    answers = [
        llm.create_chat_completion(
            [{"role": "user", "content": "Which way?"}],
            response_format={"type": "json_object", "schema": schema},
            max_tokens=80,
            temperature=0.8,
            seed=3,
        )["choices"][0]["message"]["content"]
        for llm in pair
    ]
    assert answers[0] == answers[1]
    assert json.loads(answers[1])["answer"] in ("left", "right")


def test_a_logits_processor_decides(model: Path) -> None:
    def only_77(tokens: Any, scores: Any) -> Any:
        assert len(tokens) >= len(PROMPT)
        scores[:] = -np.inf
        scores[77] = 0.0
        return scores

    with streamed(model, cache_mb=0) as llm:
        tokens = llm.generate(PROMPT, logits_processor=llama_cpp.LogitsProcessorList([only_77]))
        assert [next(tokens) for _ in range(5)] == [77] * 5
        tokens.close()


def test_log_probabilities_equal_llama_cpps(model: Path) -> None:
    with resident(model, logits_all=True) as plain, streamed(model, cache_mb=0, llama={"logits_all": True}) as llm:
        expected, got = (completed(each, logprobs=3, max_tokens=6)["choices"][0]["logprobs"] for each in (plain, llm))
    assert got == expected
    assert len(got["token_logprobs"]) == 6


def test_a_saved_state_says_the_same_again(model: Path) -> None:
    with streamed(model, share=1.3) as llm:
        llm.eval(PROMPT)
        state = llm.save_state()
        texts = []
        for _ in range(2):
            llm.load_state(state)
            llm.set_seed(9)
            texts.append(list(itertools.islice(llm.generate([50], reset=False, temp=1.2), 12)))
    assert texts[0] == texts[1]
    with resident(model) as plain:
        plain.eval(PROMPT)
        plain.set_seed(9)
        assert list(itertools.islice(plain.generate([50], reset=False, temp=1.2), 12)) == texts[0]


def test_a_second_generation_finds_the_cache_warm(model: Path) -> None:
    with streamed(model, cache_mb=64) as llm:
        first = completed(llm)
        read = counters(llm)
        llm.reset()
        second = completed(llm)
        again = counters(llm)
    assert second["choices"] == first["choices"]
    assert again["hits"] > read["hits"]
    assert again["reads"] == read["reads"]
    assert again["read_bytes"] == read["read_bytes"] > 0


def test_the_evaluations_up_to_the_first_token_are_the_prefill(model: Path) -> None:
    with streamed(model, cache_mb=0, llama={"n_batch": 10}) as llm:
        steps = say(llm, 5).steps
        assert [(step.phase, step.n_tokens, step.step) for step in steps] == [
            (Phase.PREFILL, 10, 0),
            (Phase.PREFILL, 10, 10),
            (Phase.PREFILL, 4, 20),
            *((Phase.DECODE, 1, 24 + i) for i in range(4)),
        ]
        assert len(llm.sampled) == 5


@pytest.mark.parametrize(
    ("argument", "value"),
    [("embedding", True), ("n_gpu_layers", 1), ("n_gpu_layers", -1), ("use_mmap", True), ("use_mlock", True), ("vocab_only", True)],
)
def test_what_streaming_cannot_do_is_refused_before_loading(model: Path, argument: str, value: object) -> None:
    with pytest.raises(UsageError, match=argument):
        Llama(model, **{argument: value})


def test_a_prompt_beyond_the_context_is_refused_and_the_session_goes_on(model: Path) -> None:
    with streamed(model, share=1.3) as llm, resident(model) as plain:
        with pytest.raises(ValueError, match="exceed context window"):
            llm.create_completion([30] * 300)
        llm.eval([30] * 200)
        with pytest.raises(UsageError, match="context of 256 tokens has no room for 57 more"):
            llm.eval([30] * 57)
        assert llm.n_tokens == 200
        said = say(llm, 12)
        assert_same(said, say(plain, 12))


def test_dropping_on_a_narrow_routing_is_warned_of_once(tiny: Callable[..., Path]) -> None:
    notes: list[str] = []
    config = StreamConfig(cache_mb=64, drop=DropConfig(threshold=0.75), prefetch=1)
    llm = Llama(tiny("tiny-gpt-oss"), stream=config, notify=notes.append, n_ctx=64, **ONE_THREAD)
    say(llm, 4)
    llm.close()
    narrow = [note for note in notes if "top-k" in note]
    assert len(narrow) == 1
    assert "37.5 % of the routing" in narrow[0]
    assert "12.5 % at the top-k 8" in narrow[0]
    assert len([note for note in notes if "--prefetch 1 with --drop-cold-experts" in note]) == 1


def mapped(address: int) -> bool:
    spans = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(begin, 16) <= address < int(end, 16) for begin, end in spans)


def held() -> tuple[int, int]:
    """Return this process's open files and threads."""
    return tuple(len(list(Path("/proc/self", kind).iterdir())) for kind in ("fd", "task"))  # type: ignore[return-value]


def test_a_closed_session_gives_memory_lanes_and_files_back_and_keeps_its_counts(model: Path) -> None:
    with contextlib.closing(Llama(model, stream=StreamConfig(cache_mb=2), n_ctx=64, **ONE_THREAD)) as first:
        say(first, 2)  # what a process makes once and keeps is made
    before = held()
    llm = Llama(model, stream=StreamConfig(cache_mb=2), n_ctx=64, **ONE_THREAD)
    address = llm.session.weights.source.address(llm.session.layout.experts[0].span.name)
    say(llm, 2)
    counted = counters(llm)
    assert mapped(address)
    assert all(now > then for now, then in zip(held(), before, strict=True))
    llm.close()
    llm.close()
    assert not mapped(address)
    assert held() == before
    assert counted["misses"] > 0
    assert counters(llm)["misses"] == counted["misses"]
    with pytest.raises(UsageError, match="this session was closed"):
        llm.session.decode(None, None, Phase.DECODE)


def test_a_session_that_is_dropped_while_it_reads_ahead_ends_quietly(model: Path) -> None:
    for _ in range(20):
        with streamed(model, share=0.6, prefetch=4, io_threads=4) as llm:
            assert len(say(llm, 2).tokens) == 2
            assert counters(llm)["prefetch_issued"] > 0
        del llm
