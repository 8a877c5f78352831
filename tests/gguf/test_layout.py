"""The layout says where every expert lies, and refuses a model that cannot be streamed or would abort llama.cpp."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from moetriage.errors import ModelFileError, NotMoeError
from moetriage.gguf.layout import read_layout
from moetriage.gguf.synth import write_model

if TYPE_CHECKING:
    from tests.gguf.conftest import GgufBytes

U16, U32, I32, F32, BOOL, STRING = 2, 4, 5, 6, 7, 8
Q4_0 = 2
Tiny = Callable[..., Path]


def refused(moe: GgufBytes, path: Path) -> str:
    with pytest.raises(ModelFileError) as caught:
        read_layout(moe.write(path / "m.gguf"))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_offsets_lead_to_the_bytes_of_the_tensor(moe: GgufBytes, tmp_path: Path) -> None:
    layout = read_layout(moe.write(tmp_path / "m.gguf"))
    (dense,) = layout.dense
    assert layout.paths[0].read_bytes()[dense.offset : dense.offset + dense.nbytes] == bytes(range(128))
    (expert,) = layout.experts
    assert (expert.layer, expert.projection, expert.n_expert, expert.expert_bytes) == (1, "up", 4, 36)
    assert expert.span.offset == dense.offset + 128


def test_totals_and_the_working_set_follow_from_the_tensors(moe: GgufBytes, tmp_path: Path) -> None:
    layout = read_layout(moe.write(tmp_path / "m.gguf"))
    assert (layout.arch, layout.name, layout.n_layer, layout.n_expert, layout.top_k) == ("q", "small", 2, 4, 2)
    assert layout.moe_layers == (1,)
    assert (layout.expert_bytes(0), layout.expert_bytes(1)) == (0, 36)
    assert (layout.expert_total_bytes, layout.dense_total_bytes) == (144, 128)
    assert layout.working_set_bytes() == 72
    assert layout.working_set_bytes(top_k=3) == 108


def test_a_width_per_layer_counts_each_layer_with_its_own(moe: GgufBytes, tmp_path: Path) -> None:
    moe.keys["q.expert_used_count"] = moe.array(U32, [4, 1])
    layout = read_layout(moe.write(tmp_path / "m.gguf"))
    assert layout.top_k == 4
    assert layout.layer_top_k(1) == 1
    assert layout.working_set_bytes() == 36


@pytest.mark.parametrize(
    ("shape", "n_moe", "projections"),
    [
        ("tiny-qwen3moe", 4, {"gate", "up", "down"}),
        ("tiny-olmoe", 3, {"gate", "up", "down"}),
        ("tiny-gemma4", 4, {"gate_up", "down"}),
        ("tiny-gpt-oss", 4, {"gate", "up", "down"}),
        ("tiny-deepseek2", 3, {"gate", "up", "down"}),
    ],
)
def test_each_family_is_read_with_its_own_projections(shape: str, n_moe: int, projections: set[str], tiny: Tiny) -> None:
    layout = read_layout(tiny(shape))
    assert len(layout.moe_layers) == n_moe
    for layer in layout.moe_layers:
        assert {e.projection for e in layout.experts if e.layer == layer} == projections
    names = [span.name for span in layout.dense] + [e.span.name for e in layout.experts]
    assert len(names) == len(set(names))


def test_matrices_per_head_are_no_experts_even_if_their_number_is_the_same(tiny: Tiny) -> None:
    layout = read_layout(tiny("tiny-deepseek2"))
    per_head = [span for span in layout.dense if span.ne[2] == layout.n_expert]
    assert {span.name.split(".")[2] for span in per_head} == {"attn_k_b", "attn_v_b"}


def test_leading_dense_layers_hold_no_experts(tiny: Tiny) -> None:
    assert read_layout(tiny("tiny-deepseek2")).moe_layers == (1, 2, 3)


def test_layers_may_differ_in_quantisation(tiny: Tiny) -> None:
    layout = read_layout(tiny("tiny-mixed"))
    sizes = [layout.expert_bytes(layer) for layer in layout.moe_layers]
    assert len(set(sizes)) == 4
    assert layout.working_set_bytes() == 2 * sum(sizes)


def test_an_expert_tensor_of_unknown_name_keeps_its_own(moe: GgufBytes, tmp_path: Path) -> None:
    moe.tensors = {"blk.0.ffn_mystery_exps.weight": moe.tensor((32, 2, 4), 0, Q4_0), "blk.0.other.thing": moe.tensor((32, 2, 4), 160, Q4_0)}
    moe.data = bytes(320)
    assert [e.projection for e in read_layout(moe.write(tmp_path / "m.gguf")).experts] == ["mystery", "other.thing"]


def test_blocks_that_predict_further_tokens_are_unused(moe: GgufBytes, tmp_path: Path) -> None:
    moe.set("q.block_count", 3)
    moe.set("q.nextn_predict_layers", 1)
    moe.tensors["blk.2.ffn_up_exps.weight"] = moe.tensor((32, 2, 4), 288, Q4_0)
    moe.data += bytes(160)
    layout = read_layout(moe.write(tmp_path / "m.gguf"))
    assert layout.n_layer == 2
    assert layout.moe_layers == (1,)
    assert [span.name for span in layout.unused] == ["blk.2.ffn_up_exps.weight"]


def test_a_truncated_file_names_tensor_and_byte(moe: GgufBytes, tmp_path: Path) -> None:
    moe.data = moe.data[:200]
    path = moe.write(tmp_path / "m.gguf")
    with pytest.raises(ModelFileError, match=r"'blk.1.ffn_up_exps.weight' ends at byte \d+ but the file has \d+ bytes") as caught:
        read_layout(path)
    assert caught.value.offset == path.stat().st_size - 200 + 128


@pytest.mark.parametrize("key", ["general.architecture", "q.block_count", "q.context_length", "q.embedding_length"])
def test_a_missing_key_is_named(key: str, moe: GgufBytes, tmp_path: Path) -> None:
    del moe.keys[key]
    assert f"the key {key} is missing" in refused(moe, tmp_path)


@pytest.mark.parametrize(
    ("key", "value", "kind", "reason"),
    [
        ("q.block_count", 0, U32, "between 1 and 512"),
        ("q.block_count", 513, U32, "between 1 and 512"),
        ("q.block_count", 1, U32, "is of block 1, but the model has 1 blocks"),
        ("q.block_count", 2, I32, "is of type INT32, must be UINT32"),
        ("q.nextn_predict_layers", 2, U32, "between 0 and 1"),
        ("q.embedding_length", 0, U32, "between 1 and"),
        ("q.expert_count", 1025, U32, "between 0 and 1024"),
        ("q.expert_used_count", 5, U32, "between 1 and the 4 experts"),
        ("q.expert_used_count", 0, U32, "between 1 and the 4 experts"),
        ("q.expert_group_count", 4, U32, "4 experts in 4 groups"),
        ("q.expert_group_count", 3, U32, "4 experts in 3 groups"),
        ("q.expert_group_count", 2, U32, "of which 0 are used"),
        ("q.expert_gating_func", 5, U32, "between 0 and 4"),
        ("q.attention.head_count", 2**20, U32, "attention heads"),
        ("q.attention.head_count_kv", 2**20, U32, "attention heads"),
        ("q.attention.key_length", 0, U32, "between 1 and"),
        ("q.attention.shared_kv_layers", 1, U32, "must leave 2 of the 2 layers"),
        ("q.attention.sliding_window", 2**31, U32, "between 0 and"),
        ("q.attention.layer_norm_rms_epsilon", float("nan"), F32, "is nan"),
        ("q.attention.layer_norm_rms_epsilon", -1.0, F32, "is -1.0"),
        ("q.rope.dimension_count", 7, U32, "must be even"),
        ("general.architecture", 1, U32, "the key general.architecture is missing"),
    ],
)
def test_values_that_would_abort_the_loader_are_refused(
    key: str, value: float, kind: int, reason: str, moe: GgufBytes, tmp_path: Path
) -> None:
    moe.keys[key] = moe.value(kind, value)
    assert reason in refused(moe, tmp_path)


def test_rotating_more_than_a_head_is_refused(moe: GgufBytes, tmp_path: Path) -> None:
    moe.set("q.attention.key_length", 32)
    moe.set("q.rope.dimension_count", 34)
    assert "must be even and fit into a head of 32" in refused(moe, tmp_path)


@pytest.mark.parametrize(
    "sizes", [{"key_length": 96, "key_length_mla": 32}, {"key_length": 32}, {"head_count": 1}], ids=lambda s: "+".join(s)
)
def test_a_rotated_part_as_large_as_a_latent_head_is_refused(sizes: dict[str, int], moe: GgufBytes, tmp_path: Path) -> None:
    """The head's size as files of today name it, as those before them do, and as it follows from an embedding of 32."""
    for name, size in ({"kv_lora_rank": 64} | sizes).items():
        moe.set(f"q.attention.{name}", size)
    moe.set("q.rope.dimension_count", 32)
    assert "must leave a part of a latent head of 32" in refused(moe, tmp_path)
    moe.set("q.rope.dimension_count", 30)
    assert read_layout(moe.write(tmp_path / "m.gguf")).n_expert == 4


@pytest.mark.parametrize("key", ["key_length_mla", "kv_lora_rank"])
def test_a_latent_head_that_would_be_rotated_whole_is_refused(key: str, moe: GgufBytes, tmp_path: Path) -> None:
    """Left out, all of the key is rotated, and llama.cpp asserts that a part of it is not."""
    moe.set(f"q.attention.{key}", 32)
    moe.keys.pop("q.rope.dimension_count", None)
    assert "q.rope.dimension_count is missing" in refused(moe, tmp_path)


def test_an_unknown_rope_scaling_is_refused(moe: GgufBytes, tmp_path: Path) -> None:
    moe.keys["q.rope.scaling.type"] = moe.value(STRING, "wild")
    assert "'wild', must be one of none, linear" in refused(moe, tmp_path)


def test_an_array_of_another_length_than_the_blocks_is_refused(moe: GgufBytes, tmp_path: Path) -> None:
    moe.keys["q.attention.head_count_kv"] = moe.array(U32, [1, 1, 1])
    assert "q.attention.head_count_kv must hold 2 numbers" in refused(moe, tmp_path)


def test_an_array_of_flags_is_no_count(moe: GgufBytes, tmp_path: Path) -> None:
    moe.keys["q.attention.head_count"] = moe.array(BOOL, [True, True])
    assert "must hold 2 numbers" in refused(moe, tmp_path)


def test_a_vocabulary_with_a_token_twice_is_refused(moe: GgufBytes, tmp_path: Path) -> None:
    moe.keys["tokenizer.ggml.tokens"] = moe.array(STRING, ["a", "b", "a"])
    assert "the token 'a' 2 times" in refused(moe, tmp_path)


def test_empty_tokens_may_repeat_as_the_loader_renames_them(moe: GgufBytes, tmp_path: Path) -> None:
    moe.keys["tokenizer.ggml.tokens"] = moe.array(STRING, ["a", "", ""])
    assert read_layout(moe.write(tmp_path / "m.gguf")).n_vocab == 3


def test_a_dimension_of_zero_is_refused(moe: GgufBytes, tmp_path: Path) -> None:
    moe.tensors["blk.0.nothing"] = moe.tensor((4, 0), 288)
    assert "'blk.0.nothing' has a dimension of zero" in refused(moe, tmp_path)


def test_an_absurd_layer_number_is_refused(moe: GgufBytes, tmp_path: Path) -> None:
    moe.tensors["blk.99999999999999999999.w"] = moe.tensor((8,), 288)
    moe.data += bytes(32)
    assert "is of block 99999999999999999999, but the model has 2" in refused(moe, tmp_path)


@pytest.mark.parametrize(("name", "ne", "kind"), [("a.bias", (32, 2), Q4_0), ("norm.weight", (32,), Q4_0), ("w", (4, 4), 28)])
def test_types_that_a_tensor_cannot_have_are_refused(name: str, ne: tuple[int, ...], kind: int, moe: GgufBytes, tmp_path: Path) -> None:
    moe.tensors[name] = moe.tensor(ne, 288, kind)
    moe.data += bytes(128)
    assert "which no model has there" in refused(moe, tmp_path)


def test_a_dense_model_is_not_moe(moe: GgufBytes, tmp_path: Path) -> None:
    del moe.keys["q.expert_count"], moe.keys["q.expert_used_count"], moe.tensors["blk.1.ffn_up_exps.weight"]
    with pytest.raises(NotMoeError, match=r"not a Mixture-of-Experts model \(q with no experts\)"):
        read_layout(moe.write(tmp_path / "m.gguf"))


def test_claimed_experts_without_tensors_are_not_moe(moe: GgufBytes, tmp_path: Path) -> None:
    del moe.tensors["blk.1.ffn_up_exps.weight"]
    with pytest.raises(NotMoeError, match="claims 4 experts but has no tensor"):
        read_layout(moe.write(tmp_path / "m.gguf"))


def test_one_tensor_per_expert_is_named_as_the_old_layout(moe: GgufBytes, tmp_path: Path) -> None:
    del moe.tensors["blk.1.ffn_up_exps.weight"]
    moe.tensors["blk.0.ffn_gate.0.weight"] = moe.tensor((8, 2), 128)
    with pytest.raises(NotMoeError, match="one tensor per expert, an old layout"):
        read_layout(moe.write(tmp_path / "m.gguf"))


@pytest.fixture
def shards(tmp_path: Path) -> list[Path]:
    return write_model(tmp_path / "model.gguf", "tiny-olmoe", split=3, layers=1)


def test_shards_are_found_beside_the_first(shards: list[Path], tmp_path: Path) -> None:
    layout = read_layout(shards[0])
    whole = read_layout(write_model(tmp_path / "whole.gguf", "tiny-olmoe", layers=1)[0])
    assert layout.paths == tuple(shards)
    assert {span.shard for span in (*layout.dense, *(e.span for e in layout.experts))} == {0, 1, 2}
    for here, there in zip((e.span for e in layout.experts), (e.span for e in whole.experts), strict=True):
        part = layout.paths[here.shard].read_bytes()[here.offset : here.offset + here.nbytes]
        assert part == whole.paths[0].read_bytes()[there.offset : there.offset + there.nbytes]


def test_a_missing_shard_is_named(shards: list[Path]) -> None:
    shards[1].unlink()
    with pytest.raises(ModelFileError, match=r"model-00002-of-00003.gguf: shard 2 of 3 is missing"):
        read_layout(shards[0])


def test_a_later_shard_points_to_the_first(shards: list[Path]) -> None:
    with pytest.raises(ModelFileError, match=r"is shard 2 of 3; pass the first one, model-00001-of-00003.gguf"):
        read_layout(shards[1])


def test_a_shard_of_another_name_is_refused(shards: list[Path], tmp_path: Path) -> None:
    shutil.copy(shards[0], tmp_path / "renamed.gguf")
    with pytest.raises(ModelFileError, match=r"must be called PREFIX-00001-of-00003.gguf"):
        read_layout(tmp_path / "renamed.gguf")


def test_exchanged_shards_are_refused(shards: list[Path]) -> None:
    shutil.copy(shards[2], shards[1])
    with pytest.raises(ModelFileError, match=r"model-00002-of-00003.gguf: holds shard 3 of 3 but is named as shard 2"):
        read_layout(shards[0])


def test_a_truncated_shard_is_named(shards: list[Path]) -> None:
    with shards[2].open("r+b") as file:
        file.truncate(shards[2].stat().st_size - 1000)
    with pytest.raises(ModelFileError, match=r"00003-of-00003.gguf \(byte \d+\): tensor 'blk.0.ffn_down_exps.weight' ends at byte"):
        read_layout(shards[0])


def test_a_shard_of_a_model_with_other_tensors_is_refused(shards: list[Path], tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    others = write_model(tmp_path / "other" / "model.gguf", "tiny-qwen3moe", split=3, layers=2)
    shutil.copy(others[2], shards[2])
    with pytest.raises(ModelFileError, match="of another model"):
        read_layout(shards[0])


def spoil_key(path: Path, key: str, old: bytes, new: bytes) -> None:
    """Replace the type and value of a key in a file; both encodings have the same length."""
    raw = path.read_bytes()
    at = raw.index(key.encode()) + len(key)
    assert raw[at : at + len(old)] == old
    path.write_bytes(raw[:at] + new + raw[at + len(old) :])


def test_a_shard_number_of_another_type_is_refused(shards: list[Path]) -> None:
    # llama.cpp reads it with a getter that ends the process on any other type.
    spoil_key(shards[1], "split.no", b"\x02\0\0\0", b"\x03\0\0\0")
    with pytest.raises(ModelFileError, match=r"the key split.no is INT16 and must be UINT16"):
        read_layout(shards[0])


def test_a_wrong_total_of_tensors_is_refused(shards: list[Path]) -> None:
    n = len(read_layout(shards[0]).dense) + 3
    spoil_key(shards[0], "split.tensors.count", b"\x05\0\0\0" + bytes([n]), b"\x05\0\0\0" + bytes([n + 1]))
    with pytest.raises(ModelFileError, match=rf"hold {n} tensors and must hold {n + 1}"):
        read_layout(shards[0])
