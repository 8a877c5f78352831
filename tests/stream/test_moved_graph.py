"""A graph that differs from the one the hook learned is learned again, and the session says the same."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gates.harness import FAMILIES, assert_same, resident, say, streamed

from moetriage import Llama
from moetriage.gguf import ggml_api
from moetriage.stream import llama_api


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
