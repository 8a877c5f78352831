"""The image of a split model is the model as if it had never been split."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from moetriage.errors import ModelFileError
from moetriage.gguf.layout import ModelLayout, read_layout
from moetriage.gguf.virtual import virtual_file

if TYPE_CHECKING:
    from tests.gguf.conftest import GgufBytes

U16, I32 = 2, 5
Tiny = Callable[..., Path]


def materialise(layout: ModelLayout) -> bytes:
    """Build the image, every byte of it."""
    image = virtual_file(layout)
    out = bytearray(image.size)
    out[: len(image.header)] = image.header
    for segment in image.segments:
        with layout.paths[segment.shard].open("rb") as file:
            file.seek(segment.offset)
            out[segment.virtual_offset : segment.virtual_offset + segment.nbytes] = file.read(segment.nbytes)
    return bytes(out)


def tensors_of(path: Path) -> dict[str, bytes]:
    layout, raw = read_layout(path), path.read_bytes()
    spans = (*layout.dense, *(e.span for e in layout.experts))
    return {span.name: raw[span.offset : span.offset + span.nbytes] for span in spans}


def test_a_single_file_is_its_own_image(tiny: Tiny) -> None:
    path = tiny("tiny-olmoe")
    assert materialise(read_layout(path)) == path.read_bytes()


@pytest.mark.parametrize("shape", ["tiny-mixed", "tiny-gemma4", "tiny-deepseek2"])
def test_the_image_of_shards_holds_the_tensors_and_keys_of_the_unsplit_file(shape: str, tiny: Tiny, tmp_path: Path) -> None:
    merged = tmp_path / "merged.gguf"
    merged.write_bytes(materialise(read_layout(tiny(shape, split=4))))
    assert tensors_of(merged) == tensors_of(tiny(shape))
    here, there = read_layout(merged), read_layout(tiny(shape))
    assert (here.metadata, here.layer_arrays) == (there.metadata, there.layer_arrays)


def test_llama_cpp_says_the_same_with_the_image_the_shards_and_the_unsplit_file(
    tiny: Tiny, tmp_path: Path, load_plain: Callable[..., Any]
) -> None:
    merged = tmp_path / "merged.gguf"
    merged.write_bytes(materialise(read_layout(tiny("tiny-mixed", split=4))))
    texts = []
    for path in (tiny("tiny-mixed"), tiny("tiny-mixed", split=4), merged):
        with load_plain(path) as llama:
            texts.append(llama.create_completion("The model reads", max_tokens=24, temperature=0)["choices"][0]["text"])
    assert texts[0]
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.parametrize("split", [1, 3])
def test_segments_are_in_order_aligned_and_apart_and_only_experts_are_streamed(split: int, tiny: Tiny) -> None:
    layout = read_layout(tiny("tiny-gpt-oss", split=split))
    image = virtual_file(layout)
    end = len(image.header)
    for segment in image.segments:
        assert segment.virtual_offset >= end
        assert segment.virtual_offset % 32 == 0
        end = segment.virtual_offset + segment.nbytes
    assert end <= image.size
    streamed = {(s.shard, s.offset, s.nbytes) for s in image.segments if s.streamed}
    assert streamed == {(e.span.shard, e.span.offset, e.span.nbytes) for e in layout.experts}
    assert sum(s.nbytes for s in image.segments if not s.streamed) == layout.dense_total_bytes


def test_an_unusual_alignment_of_the_first_shard_does_not_survive_the_merge(moe: GgufBytes, tmp_path: Path) -> None:
    # The writer aligns to 32 bytes whatever the key says, and the loader believes the key.
    second = type(moe)(data=moe.data[128:])
    second.tensors["blk.1.ffn_up_exps.weight"] = moe.tensor((32, 2, 4), 0, 2)
    del moe.tensors["blk.1.ffn_up_exps.weight"]
    moe.alignment, moe.data = 64, moe.data[:128]
    moe.set("general.alignment", 64)
    for number, shard in enumerate((moe, second)):
        shard.keys |= {
            "split.no": shard.value(U16, number),
            "split.count": shard.value(U16, 2),
            "split.tensors.count": shard.value(I32, 2),
        }
        shard.write(tmp_path / f"m-0000{number + 1}-of-00002.gguf")
    merged = tmp_path / "merged.gguf"
    merged.write_bytes(materialise(read_layout(tmp_path / "m-00001-of-00002.gguf")))
    assert "general.alignment" not in read_layout(merged).metadata
    assert tensors_of(merged) == {"output.weight": moe.data, "blk.1.ffn_up_exps.weight": second.data[:144]}


def test_a_file_that_has_gone_since_is_named(tiny: Tiny, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(tiny("tiny-olmoe").read_bytes())
    layout = read_layout(path)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(ModelFileError, match="has become shorter"):
        virtual_file(layout)
    path.unlink()
    with pytest.raises(ModelFileError, match="cannot be read: No such file"):
        virtual_file(layout)
