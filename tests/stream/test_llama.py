"""``moetriage.Llama`` is a ``llama_cpp.Llama``: what works there works here, says the same, and survives what goes wrong."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest
from gates.harness import FAMILIES, PROMPT, assert_same, counters, resident, say, streamed

from moetriage import Llama, StreamConfig
from moetriage.config import DropConfig
from moetriage.errors import ReadError, UsageError
from moetriage.gguf import ggml_api
from moetriage.stream import llama_api
from moetriage.types import Phase

SHAPE = "tiny-qwen3moe"
TEXT = "The quick brown fox"
ONE_THREAD: dict[str, Any] = {"n_threads": 1, "n_threads_batch": 1}


@pytest.fixture
def model(tiny: Callable[..., Path]) -> Path:
    return tiny(SHAPE)


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


# Reads that fail.


@pytest.fixture
def copy(model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(model, tmp_path / "copy.gguf"))


def cut_off(path: Path, llm: Llama, layer: int) -> Callable[[], None]:
    """Shorten the file to before the experts of a layer; return a function that gives it its bytes back."""
    whole = path.read_bytes()
    first = min(tensor.span.offset for tensor in llm.session.layout.experts if tensor.layer == layer)
    with path.open("r+b") as file:
        file.truncate(first)

    def mend() -> None:
        with path.open("r+b") as file:
            file.write(whole)

    return mend


@pytest.mark.parametrize(
    ("config", "layer"),
    [
        *(({"cache_mb": 0}, layer) for layer in (0, 2, 3)),
        *(({"share": 1.0, "prefetch": 2}, layer) for layer in (0, 2, 3)),
        ({"cache_mb": 0, "odirect": False}, 2),
        ({"cache_mb": 0, "staged": False}, 2),
    ],
)
def test_a_failed_read_names_its_place_and_the_session_goes_on(copy: Path, model: Path, config: dict[str, Any], layer: int) -> None:
    with resident(model) as plain:
        expected = say(plain)
    with streamed(copy, record_routes=True, **config) as llm:
        assert_same(say(llm), expected)
        mend = cut_off(copy, llm, layer)
        for _ in range(2):  # the second time round nothing of the first may count as loaded
            with pytest.raises(ReadError) as caught:
                say(llm)
        error = caught.value
        assert error.path == str(copy)
        assert error.layer >= layer
        tensor = next(t for t in llm.session.layout.experts if t.span.offset <= error.offset < t.span.offset + t.span.nbytes)
        assert tensor.layer == error.layer
        assert error.expert == (error.offset - tensor.span.offset) // tensor.expert_bytes
        assert str(copy) in str(error)
        assert str(error.offset) in str(error)
        assert f"layer {error.layer}, expert {error.expert}" in str(error)
        assert llm.n_tokens == 0, "no token of it counts as evaluated"
        mend()
        routes: list[Any] = []
        llm.session.on_routes = routes.append
        said = say(llm)
    assert_same(said, expected)
    assert routes[0]["step"][0] == 0
    assert sum(len(columns["step"]) for columns in routes if columns["phase"][0] == 1) == 23 * 16


def test_the_same_prompt_after_a_failed_token_is_not_sampled_from_lost_logits(copy: Path, model: Path) -> None:
    """llama_cpp samples at once when a prompt is exactly what was evaluated last; its logits are gone when the token after it failed."""
    with streamed(copy, cache_mb=0) as llm:
        tokens = llm.generate(PROMPT, temp=0.0)
        first = next(tokens)
        mend = cut_off(copy, llm, 1)
        with pytest.raises(ReadError):
            next(tokens)
        assert llm.n_tokens == len(PROMPT)
        mend()
        tokens = llm.generate(PROMPT, temp=0.0)
        again = [next(tokens) for _ in range(6)]
        tokens.close()
    with resident(model) as plain:
        tokens = plain.generate(PROMPT, temp=0.0)
        expected = [next(tokens) for _ in range(6)]
        tokens.close()
    assert again == expected
    assert first == expected[0]


# Graphs that move.


def node_name(tensor: int) -> bytes:
    ggml = ctypes.CDLL(str(ggml_api.library_path()))
    ggml.ggml_get_name.restype, ggml.ggml_get_name.argtypes = ctypes.c_char_p, [ctypes.c_void_p]
    return bytes(ggml.ggml_get_name(tensor))


class _InitParams(ctypes.Structure):
    _fields_ = [("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]


@pytest.fixture
def foreign_plan() -> Iterator[Callable[[Llama], Any]]:
    """Return a function that makes the hook learn a graph of the session's experts in which every other node has another name."""
    ggml = ctypes.CDLL(str(ggml_api.library_path()))
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    for name, result, arguments in (
        ("ggml_init", pointer, [_InitParams]),
        ("ggml_free", None, [pointer]),
        ("ggml_new_tensor_2d", pointer, [pointer, ctypes.c_int, integer, integer]),
        ("ggml_new_tensor_3d", pointer, [pointer, ctypes.c_int, integer, integer, integer]),
        ("ggml_mul_mat_id", pointer, [pointer, pointer, pointer, pointer]),
        ("ggml_set_name", pointer, [pointer, ctypes.c_char_p]),
    ):
        function = getattr(ggml, name)
        function.restype, function.argtypes = result, arguments
    context = ggml.ggml_init(_InitParams(1 << 22, None, True))
    f32, i32 = 0, 26

    def plan(llm: Llama) -> Any:
        session = llm.session
        on_eval = llama_api.lib.ggml_backend_sched_eval_callback(session.hook.callback)
        session.hook.begin_learning()
        for layer in session.layers:
            ids = ggml.ggml_new_tensor_2d(context, i32, layer.top_k, 1)
            ggml.ggml_set_name(ids, f"elsewhere-{layer.block}".encode())
            on_eval(ids, True, session.hook.user_data)
            for name in layer.tensors:
                experts = ggml.ggml_new_tensor_3d(context, f32, 8, 4, session.layout.n_expert)
                ggml.ggml_set_name(experts, name.encode())
                product = ggml.ggml_mul_mat_id(context, experts, ggml.ggml_new_tensor_3d(context, f32, 8, 1, 1), ids)
                on_eval(product, True, session.hook.user_data)
        return session.hook.finish_learning(session.weights.blocks)

    yield plan
    ggml.ggml_free(context)


def test_a_graph_that_moved_is_learned_again_and_says_the_same(model: Path, foreign_plan: Callable[[Llama], Any]) -> None:
    with resident(model) as plain:
        expected = say(plain)
    with streamed(model, share=1.3) as llm:
        assert_same(say(llm), expected)
        learned = llm.session.layers
        llm.session.hook.rearm(foreign_plan(llm))
        said = say(llm)
        assert llm.session.layers is not learned
        assert llm.session.layers == learned
    assert_same(said, expected)


@pytest.mark.parametrize("shape", FAMILIES)
def test_a_graph_that_moves_within_a_batch_is_learned_again_and_says_the_same(
    tiny: Callable[..., Path], shape: str, foreign_plan: Callable[[Llama], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the third of six micro-batches the plan is exchanged for one with other names: the batch starts over from its first token."""
    cut, n_tokens = {"n_batch": 24, "n_ubatch": 4}, 6
    with resident(tiny(shape), **cut) as plain:
        expected = say(plain, n_tokens)
    watched: dict[str, Any] = {"graphs": 0}

    def on_node(tensor: int, ask: bool, user_data: int) -> bool:
        if ask and "plan" in watched and node_name(tensor) == b"embd":
            watched["graphs"] += 1
            if watched["graphs"] == 3:
                watched["llm"].session.hook.rearm(watched.pop("plan"))
        return bool(watched["native"](tensor, ask, user_data))

    init_hooked = llama_api.init_hooked

    def init_watched(model: Any, params: Any, *, on_eval: int, on_abort: int, user_data: int) -> Any:
        prototype = llama_api.lib.ggml_backend_sched_eval_callback
        watched["native"], watched["callback"] = prototype(on_eval), prototype(on_node)
        address = ctypes.cast(watched["callback"], ctypes.c_void_p).value
        return init_hooked(model, params, on_eval=address, on_abort=on_abort, user_data=user_data)

    monkeypatch.setattr(llama_api, "init_hooked", init_watched)
    with streamed(tiny(shape), share=1.3, record_routes=True, llama=cut) as llm:
        learned = llm.session.layers
        watched |= {"llm": llm, "plan": foreign_plan(llm)}
        routes: list[Any] = []
        llm.session.on_routes = routes.append
        said = say(llm, n_tokens)
        assert watched["graphs"] == 3
        assert llm.session.layers is not learned
        watched.clear()
    assert_same(said, expected)
    assert routes[0]["step"][0] == 0
    assert routes[0]["step"].tolist().count(0) == routes[0]["step"].tolist().count(1), "the stopped attempt is not in the record"


# Memory.


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
