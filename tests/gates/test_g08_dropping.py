"""G8: the machinery of expert dropping (what it drops is G13's): transparent where it drops nothing, safe where it drops all it may."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
import pytest
from gates.harness import FAMILIES, N_SHORT, assert_same, counters, resident, say, streamed

from moetriage.config import DropConfig

PAGE = mmap.PAGESIZE
_libc = ctypes.CDLL(None, use_errno=True)


def pages_in_memory(begin: int, end: int) -> int:
    """Return how many of the pages wholly inside [begin, end) exist, be it as the kernel's shared zero page."""
    first, last = -(-begin // PAGE) * PAGE, end // PAGE * PAGE
    assert last > first
    flags = (ctypes.c_ubyte * ((last - first) // PAGE))()
    assert _libc.mincore(ctypes.c_void_p(first), ctypes.c_size_t(last - first), flags) == 0
    return sum(flag & 1 for flag in flags)


class DroppedMemory:
    """Looks after each step at the memory of what was dropped in it."""

    def __init__(self, llm):
        self.llm = llm
        self.index_of_block = {layer.block: i for i, layer in enumerate(llm.session.layers)}
        self.tensors = {layer.block: [] for layer in llm.session.layers}
        for tensor in llm.session.layout.experts:
            self.tensors[tensor.layer].append((llm.session.weights.source.address(tensor.span.name), tensor.expert_bytes))
        self.was_read = set()
        self.dropped_after_release = 0

    def __call__(self, columns):
        rows = list(zip(*(columns[name].tolist() for name in ("layer", "expert", "dropped", "expert_bytes")), strict=True))
        read_now = {(block, expert) for block, expert, _, nbytes in rows if nbytes}
        self.was_read |= read_now
        for block, expert, dropped, _ in rows:
            if not dropped or (block, expert) in read_now:  # one token of a prompt may need what another one dropped
                continue
            assert not self.llm.session.hook.resident(self.index_of_block[block], expert)
            for address, expert_bytes in self.tensors[block]:
                begin = address + expert * expert_bytes
                assert pages_in_memory(begin, begin + expert_bytes) == 0, "a kernel touched an expert that was not loaded"
            self.dropped_after_release += (block, expert) in self.was_read


@pytest.mark.parametrize("shape", FAMILIES)
def test_inert_threshold_equals_undropped(tiny, reference, shape):
    """G8a and G8a': the decision is deferred to the final weights and made there, and drops nothing."""
    with streamed(tiny(shape), share=1.3, drop=DropConfig(threshold=1e-9)) as llm:
        said, stats, layers = say(llm), counters(llm), llm.session.layers
    assert_same(said, reference(shape))
    assert stats["routed"] == (N_SHORT - 1) * sum(layer.top_k for layer in layers) > 0
    assert stats["dropped"] == 0
    assert stats["evictions"] > 0
    assert said.decode_sum("misses") > 0, "there were cold experts to decide about"


@pytest.mark.parametrize("shape", FAMILIES)
@pytest.mark.parametrize("in_prefill", [False, True])
def test_full_strength_never_touches_released_memory(tiny, shape, in_prefill):
    """G8b: a cache that evicts all the time, so that drops land on experts whose pages were given back."""
    drop = DropConfig(threshold=1.0, in_prefill=in_prefill)
    with streamed(tiny(shape), share=0.5, record_routes=True, drop=drop) as llm:
        llm.session.on_routes = memory = DroppedMemory(llm)
        said, stats = say(llm), counters(llm)
    assert len(said.tokens) == N_SHORT
    assert np.isfinite(said.logits).all()
    assert stats["dropped"] > 0
    assert stats["evictions"] > 0
    assert memory.dropped_after_release > 0
    dropped_in_prefill = sum(step.dropped for step in said.steps) - said.decode_sum("dropped")
    assert (dropped_in_prefill > 0) == in_prefill


@pytest.mark.parametrize("shape", FAMILIES)
def test_top_k_of_one_drops_nothing(tiny, shape):
    """G8c: the only routed expert is the top one, and the width that counts is the graph's, not the file's."""
    with streamed(tiny(shape), cache_mb=0) as llm:
        arch, width_of_file = llm.session.layout.arch, llm.session.top_k
    with resident(tiny(shape), kv_overrides={f"{arch}.expert_used_count": 1}) as llm:
        expected = say(llm)
    with streamed(tiny(shape), share=0.5, n_expert_used=1) as llm:
        undropped = say(llm)
    assert_same(undropped, expected)
    assert width_of_file > 1
    for threshold in (0.5, 1.0):
        with streamed(tiny(shape), share=0.5, n_expert_used=1, drop=DropConfig(threshold=threshold)) as llm:
            said, stats, layers = say(llm), counters(llm), llm.session.layers
        assert_same(said, expected)
        assert all(layer.top_k == 1 for layer in layers)
        assert stats["routed"] == said.decode_sum("misses") == (N_SHORT - 1) * len(layers), "every one of them was cold"
        assert stats["dropped"] == 0
