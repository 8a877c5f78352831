"""Loading commits no memory for experts and reads none of them, whole or split, and a dropped model gives its memory back."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moetriage import Llama, ModelFileError, StreamConfig
from moetriage.gguf.synth import write_model
from moetriage.stream.page_cache import resident_bytes

PAGE = 4096
ONE_THREAD: dict[str, Any] = {"n_threads": 1, "n_threads_batch": 1}
#: stdio may read ahead into an expert tensor once for each tensor before it.
READ_AHEAD = 1 << 16


def resident_pages(address: int, nbytes: int) -> int:
    """Count the committed pages of a range of this process's private memory."""
    first, last = address // PAGE, (address + nbytes - 1) // PAGE
    with Path("/proc/self/pagemap").open("rb") as pagemap:
        pagemap.seek(first * 8)
        entries = np.frombuffer(pagemap.read((last - first + 1) * 8), "<u8")
    return int(np.count_nonzero(entries >> 62))  # present or swapped


@pytest.mark.parametrize("dense_weights", ["anon", "mmap"])
@pytest.mark.parametrize("options", [{}, {"split": 3}], ids=["whole", "split"])
def test_loading_reads_and_commits_no_expert(tiny: Callable[..., Path], options: dict[str, int], dense_weights: str) -> None:
    llm = Llama(tiny("tiny-qwen3moe", **options), stream=StreamConfig(cache_mb=0, dense_weights=dense_weights), n_ctx=64, **ONE_THREAD)
    source, layout = llm.session.weights.source, llm.session.layout
    for expert in layout.experts:
        assert resident_pages(source.address(expert.span.name), expert.span.nbytes) == 0
    most = layout.dense_total_bytes + READ_AHEAD * (len(layout.dense) + 1) if dense_weights == "anon" else READ_AHEAD
    assert source.loaded_bytes <= most
    if dense_weights == "anon":
        assert source.loaded_bytes >= layout.dense_total_bytes
    llm.create_completion("a", max_tokens=1)
    used = sum(resident_pages(source.address(expert.span.name), expert.span.nbytes) for expert in layout.experts)
    assert used > 0, "the probe can see experts that are there"
    llm.close()


@pytest.mark.parametrize(("config", "leaves"), [({}, True), ({"odirect": False}, False), ({"dense_weights": "mmap"}, False)])
def test_loading_leaves_no_second_copy_of_the_dense_weights_in_the_page_cache(disk_dir: Path, config: dict[str, Any], leaves: bool) -> None:
    """Unless the page cache is what the lanes or the mapped weights are served from."""
    (path,) = write_model(disk_dir / "model.gguf", "tiny-qwen3moe")
    size = path.stat().st_size
    with path.open("rb") as file:
        os.fsync(file.fileno())  # what is not written yet cannot be evicted
        assert resident_bytes(file.fileno(), 0, size) > 0
        with contextlib.closing(Llama(path, stream=StreamConfig(cache_mb=0, **config), n_ctx=64, **ONE_THREAD)):
            assert (resident_bytes(file.fileno(), 0, size) < size // 10) == leaves  # a few pages are compared with direct reads


def test_a_cache_gives_evicted_memory_back(tiny: Callable[[str], Path]) -> None:
    config = StreamConfig(cache_mb=1, force_cache=True)
    llm = Llama(tiny("tiny-qwen3moe"), stream=config, n_ctx=256, notify=lambda _: None, **ONE_THREAD)
    llm.create_completion("some text that routes apart", max_tokens=40, temperature=1.5)
    source, session = llm.session.weights.source, llm.session
    committed = PAGE * sum(resident_pages(source.address(e.span.name), e.span.nbytes) for e in session.layout.experts)
    stats = session.hook.stats()
    assert stats["evictions"] > 0
    borders = 2 * PAGE * len(session.layout.experts) * session.layout.n_expert  # pages that neighbours share
    assert committed <= stats["resident_bytes"] + borders
    assert committed < session.layout.expert_total_bytes / 2
    llm.close()


def test_a_dropped_llama_is_freed_without_the_garbage_collector(tiny: Callable[[str], Path]) -> None:
    gc.disable()
    try:
        llm = Llama(tiny("tiny-qwen3moe"), stream=StreamConfig(cache_mb=0), n_ctx=64, **ONE_THREAD)
        llm.create_completion("a", max_tokens=2)
        gone = weakref.ref(llm)
        del llm
        assert gone() is None
    finally:
        gc.enable()


def test_the_address_space_is_reserved_not_committed(tiny: Callable[[str], Path]) -> None:
    """A model larger than memory must load under the kernel's default overcommit rule."""
    llm = Llama(tiny("tiny-mixed"), stream=StreamConfig(cache_mb=0), n_ctx=64, **ONE_THREAD)
    assert llm.session.weights.source.reserved_bytes >= llm.session.layout.expert_total_bytes
    address = llm.session.weights.source.address(llm.session.layout.experts[0].span.name)
    flags = ""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()[0]
        if "-" in head and ":" not in head:
            low, high = (int(part, 16) for part in head.split("-"))
            inside = low <= address < high
        elif inside and line.startswith("VmFlags:"):
            flags = line
    assert " nr" in flags, "MAP_NORESERVE"
    assert ctypes.c_char.from_address(address).value == b"\0"
    llm.close()


@pytest.mark.parametrize(("of", "to"), [(b"endfor", b"endfox"), (b"<|im_end|>", b"<|im\xacend|>")])
def test_metadata_that_llama_cpp_cannot_read_is_the_files_fault(tiny: Callable[[str], Path], tmp_path: Path, of: bytes, to: bytes) -> None:
    path, data = tmp_path / "model.gguf", tiny("tiny-qwen3moe").read_bytes()
    assert of in data
    path.write_bytes(data.replace(of, to))
    with pytest.raises(ModelFileError, match=r"model\.gguf: llama_cpp cannot read its metadata or chat template"):
        Llama(path, stream=StreamConfig(cache_mb=0), n_ctx=64, **ONE_THREAD)
