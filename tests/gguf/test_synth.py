"""Synthetic models run in llama.cpp, are the same for the same seed, and no two of their experts are equal."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from moetriage.errors import UsageError
from moetriage.gguf import bigfile, blocks, synth
from moetriage.gguf.architectures import tensor_plan
from moetriage.gguf.bigfile import BigFile
from moetriage.gguf.blocks import TypedPlan
from moetriage.gguf.ggml_api import type_id, type_names
from moetriage.gguf.layout import ModelLayout, read_layout
from moetriage.gguf.synth import SHAPES, write_model
from moetriage.gguf.vocabulary import build_vocabulary

Tiny = Callable[..., Path]
TINY = [name for name in SHAPES if name.startswith("tiny-")]
ANY_TEXT = 'Héllo, the "world": 漢字 🎉\n\t\x01\x7f and 42 models\r\n'


@pytest.mark.parametrize("shape", TINY)
def test_llama_cpp_runs_it(shape: str, tiny: Tiny, load_plain: Callable[..., Any]) -> None:
    path = tiny(shape)
    assert path.stat().st_size < 10e6
    with load_plain(path, logits_all=True) as llama:
        tokens = llama.tokenize(ANY_TEXT.encode(), add_bos=False)
        assert llama.detokenize(tokens).decode() == ANY_TEXT
        llama.eval(tokens)
        logits = llama.scores[: len(tokens)]
        assert np.isfinite(logits).all()
        assert 1 < logits.std() < 4
        llama.reset()
        drawn = [token for token, _ in zip(llama.generate(tokens, temp=0), range(48), strict=False)]
        assert len(set(drawn)) > 15, "greedy text runs in a loop"
        assert llama.token_eos() not in drawn
        reply = llama.create_chat_completion([{"role": "user", "content": "hello"}], max_tokens=4, temperature=0)
        assert reply["choices"][0]["message"]["content"]


@pytest.mark.parametrize("name", ["f32", "bf16", "q6_K", "iq4_nl"])
def test_other_tensor_types_run_too(name: str, tiny: Tiny, load_plain: Callable[..., Any]) -> None:
    with load_plain(tiny("tiny-qwen3moe", layers=1, ggml_type=name), logits_all=True) as llama:
        llama.eval([1, 2, 3])
        assert np.isfinite(llama.scores[:3]).all()


def test_rows_that_do_not_fill_a_block_fall_back(tiny: Tiny) -> None:
    layout = read_layout(tiny("tiny-qwen3moe", layers=1, ggml_type="q6_K"))
    used = {e.projection: type_names()[e.span.ggml_type] for e in layout.experts}
    assert used == {"gate": "q6_K", "up": "q6_K", "down": "q8_0"}  # down has rows of 192


def test_mixed_types_differ_between_layers_and_projections(tiny: Tiny) -> None:
    layout = read_layout(tiny("tiny-mixed"))
    used = [tuple(type_names()[e.span.ggml_type] for e in layout.experts if e.layer == layer) for layer in range(4)]
    assert used == [("q4_0", "q4_0", "q6_K"), ("q8_0",) * 3, ("q6_K", "q6_K", "q4_0"), ("f16",) * 3]


def test_the_same_arguments_give_the_same_bytes(tmp_path: Path) -> None:
    first, again, other = (
        write_model(tmp_path / f"{name}.gguf", "tiny-gpt-oss", layers=1, seed=seed)[0].read_bytes()
        for name, seed in (("a", 7), ("b", 7), ("c", 8))
    )
    assert first == again
    assert first != other


def experts_of(layout: ModelLayout) -> list[bytes]:
    raw = [path.read_bytes() for path in layout.paths]
    out = []
    for tensor in layout.experts:
        for expert in range(tensor.n_expert):
            start = tensor.span.offset + expert * tensor.expert_bytes
            out.append(raw[tensor.span.shard][start : start + tensor.expert_bytes])
    return out


@pytest.mark.parametrize("shape", TINY)
def test_no_two_experts_are_equal(shape: str, tiny: Tiny) -> None:
    experts = experts_of(read_layout(tiny(shape)))
    assert len(set(experts)) == len(experts)


def test_no_two_experts_are_equal_when_the_blocks_are_used_over_and_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "RING_ELEMENTS", 4096)
    path = write_model(tmp_path / "m.gguf", "tiny-qwen3moe")[0]
    experts = experts_of(read_layout(path))
    assert len(set(experts)) == len(experts) == 4 * 16 * 3
    blocks_used = {expert[i : i + 18] for expert in experts for i in range(0, len(expert), 18)}
    assert len(blocks_used) < 1000, "the ring did not wrap, so this proved nothing"


def test_the_bench_shape_has_the_reference_models_expert_size() -> None:
    shape = SHAPES["qwen3-30b-a3b"]
    plans = [TypedPlan(plan, type_id("f32" if plan.exact else "q4_0")) for plan in tensor_plan(shape, 0)]
    first = [t for t in plans if t.plan.layer == 0 and t.plan.n_expert > 1]
    assert sum(t.nbytes // t.plan.n_expert for t in first) == 2_654_208
    assert sum(t.nbytes for t in plans) == pytest.approx(16.9e9, rel=0.03)


def test_a_large_vocabulary_has_no_token_twice() -> None:
    vocabulary = build_vocabulary(151936)
    assert len(set(vocabulary.tokens)) == 151936


def test_layers_can_be_chosen(tiny: Tiny) -> None:
    assert read_layout(tiny("tiny-deepseek2", layers=3)).moe_layers == (1, 2)


def test_progress_grows_to_the_total(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    write_model(tmp_path / "m.gguf", "tiny-olmoe", split=2, progress=lambda done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] == seen[-1][1] > 5_000_000


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"shape": "huge"}, "'huge' is unknown; there are: tiny-qwen3moe"),
        ({"layers": 0}, "--layers 0: must be between 1 and 512"),
        ({"shape": "tiny-deepseek2", "layers": 1}, "--layers 1: must be between 2 and 512"),
        ({"ggml_type": "q4_9"}, "'q4_9' is unknown"),
        ({"ggml_type": "iq1_s"}, "cannot be made from weights alone"),
        ({"shape": "tiny-mixed", "ggml_type": "q8_0"}, "is there for its mixed types"),
        ({"split": 0}, "--split 0: must be between 1 and"),
        ({"split": 5000}, "--split 5000: must be between 1 and"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_written(options: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=reason):
        write_model(tmp_path / "m.gguf", **({"shape": "tiny-olmoe"} | options))
    assert not list(tmp_path.iterdir())


def test_an_existing_file_is_kept_unless_forced(tmp_path: Path) -> None:
    path = tmp_path / "m-00002-of-00002.gguf"
    path.write_text("precious")
    with pytest.raises(UsageError, match="exists already"):
        write_model(tmp_path / "m.gguf", "tiny-olmoe", split=2)
    assert [p.read_text() for p in tmp_path.iterdir()] == ["precious"]
    paths = write_model(tmp_path / "m.gguf", "tiny-olmoe", split=2, force=True)
    assert read_layout(paths[0]).n_expert == 16


def test_a_missing_folder_and_a_directory_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not exist"):
        write_model(tmp_path / "no" / "m.gguf", "tiny-olmoe")
    with pytest.raises(UsageError, match="is a directory"):
        write_model(tmp_path, "tiny-olmoe")


def test_too_little_space_is_found_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synth.shutil, "disk_usage", lambda path: SimpleNamespace(free=10**9))
    with pytest.raises(UsageError, match=r"needs 17\.\d GB and the disk has 1\.0 GB free"):
        write_model(tmp_path / "m.gguf", "qwen3-30b-a3b")
    assert not list(tmp_path.iterdir())


def test_a_name_that_is_too_long_is_refused_by_its_own_name(tmp_path: Path) -> None:
    out = tmp_path / ("x" * 250)
    with pytest.raises(UsageError) as caught:
        write_model(out, "tiny-qwen3moe")
    assert str(caught.value).startswith(f"{out}: writing failed")


def test_ctrl_c_leaves_nothing_behind(tmp_path: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_model(tmp_path / "m.gguf", "tiny-olmoe", split=2, progress=interrupt)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: BigFile, data: memoryview) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(BigFile, "_write_all", full)
    with pytest.raises(UsageError, match=r"writing failed after \d+ of \d+ bytes: No space left on device"):
        write_model(tmp_path / "m.gguf", "tiny-olmoe")
    assert not list(tmp_path.iterdir())


DATA = np.random.default_rng(0).bytes(3 * bigfile._BUFFER_BYTES + 5000)


def write_big(path: Path) -> bool:
    """Write DATA in odd pieces and return whether it went past the page cache at the end of the last whole buffer."""
    with BigFile(path, direct=True) as file:
        for start in range(0, len(DATA), 1_000_003):
            file.write(DATA[start : start + 1_000_003])
        direct = file._direct
    assert path.read_bytes() == DATA
    return direct


def test_a_direct_file_holds_what_was_written_tail_included(tmp_path: Path) -> None:
    write_big(tmp_path / "f")


def test_a_file_system_that_refuses_direct_writes_is_written_through_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.open

    def refuse(path: Path, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags, mode)

    monkeypatch.setattr(bigfile.os, "open", refuse)
    assert not write_big(tmp_path / "f")


def test_direct_writes_that_do_not_read_back_are_done_again_through_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BigFile, "_reads_back", lambda self, nbytes: False)
    assert not write_big(tmp_path / "f")


def test_a_failing_first_direct_write_is_done_again_through_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = BigFile._write_all

    def fail_once(self: BigFile, data: memoryview) -> None:
        if self._direct:
            raise OSError(errno.EINVAL, "Invalid argument")
        real(self, data)

    monkeypatch.setattr(BigFile, "_write_all", fail_once)
    assert not write_big(tmp_path / "f")
