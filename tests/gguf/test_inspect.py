"""What inspect says agrees with the file and with what llama.cpp allocates."""

from __future__ import annotations

import ctypes
import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from moetriage.errors import NotMoeError, UsageError
from moetriage.gguf import synth
from moetriage.gguf.inspect import DEFAULT_HIT_FRACTIONS, inspect_model
from moetriage.gguf.kv_cache import kv_cache_bytes
from moetriage.gguf.layout import read_layout
from moetriage.types import MIB

if TYPE_CHECKING:
    from tests.gguf.conftest import GgufBytes

Tiny = Callable[..., Path]
TINY = [name for name in synth.SHAPES if name.startswith("tiny-")]


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of the bench shape that is 17 GB long and takes no disk: header, then a hole."""
    shape = synth.SHAPES["qwen3-30b-a3b"]
    vocabulary = synth.build_vocabulary(shape.n_vocab)
    tensors = synth._typed(synth.tensor_plan(shape, vocabulary.n_silent), shape)
    path = tmp_path_factory.mktemp("large") / "large.gguf"
    (file,) = synth._files(path, tensors, synth._keys("large", shape, vocabulary), 1)
    header = synth._header(file)
    path.write_bytes(header)
    os.truncate(path, len(header) + file.data_bytes)
    return path


def test_the_17_gb_model_is_described_in_under_a_second(large: Path) -> None:
    start = time.process_time()  # what others do meanwhile does not count
    found = inspect_model(large, disk_mb_s=1300)
    assert time.process_time() - start < 1
    assert (found.n_layer, found.n_moe_layer, found.n_expert, found.top_k, found.n_vocab) == (48, 48, 128, 8, 151936)
    assert found.expert_bytes_min == found.expert_bytes_max == 2_654_208
    assert found.expert_total_bytes == 48 * 128 * 2_654_208
    assert found.working_set_bytes == 48 * 8 * 2_654_208
    assert found.smallest_cache_mib == 972
    assert found.kv_bytes == 4096 * 48 * 2 * 4 * 128 * 2
    assert found.file_bytes == large.stat().st_size


def test_the_floor_is_what_is_missed_over_what_the_disk_gives(large: Path) -> None:
    floors = inspect_model(large, disk_mb_s=1300).floors
    assert tuple(f.hit_fraction for f in floors) == DEFAULT_HIT_FRACTIONS
    for floor in floors:
        assert floor.seconds_per_token == pytest.approx((1 - floor.hit_fraction) * 48 * 8 * 2_654_208 / 1.3e9)
    (one,) = inspect_model(large, disk_mb_s=1300, hit_fraction=1.0).floors
    assert one.seconds_per_token == 0


def test_without_a_disk_rate_no_floor_is_made_up(tiny: Tiny) -> None:
    assert inspect_model(tiny("tiny-olmoe")).floors == ()


def test_the_smallest_cache_is_the_working_set_rounded_up(tiny: Tiny) -> None:
    found = inspect_model(tiny("tiny-mixed"))
    assert (found.smallest_cache_mib - 1) * MIB < found.working_set_bytes <= found.smallest_cache_mib * MIB
    assert found.expert_bytes_min < found.expert_bytes_max
    assert found.expert_types == ("f16", "q4_0", "q6_K", "q8_0")


@pytest.mark.parametrize(("shape", "n_shared"), [("tiny-qwen3moe", 0), ("tiny-gemma4", 1), ("tiny-deepseek2", 1)])
def test_shared_experts_are_counted(shape: str, n_shared: int, tiny: Tiny) -> None:
    assert inspect_model(tiny(shape)).n_expert_shared == n_shared


def test_a_count_of_shared_experts_of_another_type_is_not_believed(moe: GgufBytes, tmp_path: Path) -> None:
    moe.keys["q.expert_shared_count"] = moe.value(8, "many")
    assert inspect_model(moe.write(tmp_path / "m.gguf")).n_expert_shared == 0


def test_the_numbers_become_json(tiny: Tiny) -> None:
    path = tiny("tiny-olmoe", split=2)
    back = json.loads(json.dumps(inspect_model(path, disk_mb_s=500, hit_fraction=0.5).as_dict()))
    assert back["paths"][0] == str(path)
    assert len(back["paths"]) == 2
    assert back["floors"][0]["hit_fraction"] == 0.5


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"hit_fraction": 1.5}, "hit fraction 1.5"),
        ({"hit_fraction": float("nan")}, "hit fraction nan"),
        ({"disk_mb_s": 0.0}, "--disk-mb-s 0.0"),
        ({"disk_mb_s": float("nan")}, "--disk-mb-s nan"),
        ({"disk_mb_s": float("inf")}, "--disk-mb-s inf"),
        ({"n_ctx": 0}, "context of 0 tokens"),
    ],
)
def test_values_out_of_range_are_refused(options: dict[str, Any], reason: str, tiny: Tiny) -> None:
    with pytest.raises(UsageError, match=reason):
        inspect_model(tiny("tiny-olmoe"), **options)


def test_a_dense_model_is_refused(moe: GgufBytes, tmp_path: Path) -> None:
    del moe.keys["q.expert_count"], moe.keys["q.expert_used_count"]
    with pytest.raises(NotMoeError):
        inspect_model(moe.write(tmp_path / "m.gguf"))


@pytest.mark.parametrize("shape", TINY)
def test_the_kv_cache_is_as_large_as_llama_cpp_makes_it(shape: str, tiny: Tiny, load_plain: Callable[..., Any]) -> None:
    import llama_cpp

    lines: list[str] = []
    collect = llama_cpp.llama_log_callback(lambda level, message, user: lines.append(message.decode()))
    with load_plain(tiny(shape), n_ctx=700) as llama:
        llama_cpp.llama_log_set(collect, ctypes.c_void_p(0))
        try:
            again = llama_cpp.llama_init_from_model(llama.model, llama.context_params)
            llama_cpp.llama_free(again)
        finally:
            llama_cpp.llama_log_set(llama_cpp._logger.llama_log_callback, ctypes.c_void_p(0))
    sizes = [float(size) for size in re.findall(r"KV buffer size = +([\d.]+) MiB", "".join(lines))]
    assert sizes
    assert kv_cache_bytes(read_layout(tiny(shape)), 700) == pytest.approx(sum(sizes) * MIB, abs=0.02 * MIB)


def test_layers_without_a_cache_of_their_own_are_left_out(moe: GgufBytes, tmp_path: Path) -> None:
    moe.set("q.block_count", 4)
    moe.set("q.attention.head_count", 4)
    moe.set("q.attention.key_length", 16)
    moe.set("q.attention.value_length", 16)
    path = tmp_path / "m.gguf"
    full = kv_cache_bytes(read_layout(moe.write(path)), 256)
    assert full == 256 * 4 * (4 * 16 + 4 * 16) * 2
    moe.set("q.full_attention_interval", 4)
    assert kv_cache_bytes(read_layout(moe.write(path)), 256) == full // 4
    moe.set("q.full_attention_interval", 1)
    moe.set("q.attention.shared_kv_layers", 2)
    assert kv_cache_bytes(read_layout(moe.write(path)), 256) == full // 2
    moe.keys["q.attention.head_count_kv"] = moe.array(4, [4, 0, 4, 4])
    assert kv_cache_bytes(read_layout(moe.write(path)), 256) == full // 4
