"""The sizes of the demo that everybody runs, without writing it: from the layout of a header and the packaged recording."""

from __future__ import annotations

from pathlib import Path

import pytest

from moetriage.demo.plan import DEFAULT_LAYERS, PROMPT_TOKENS, TOKENS, plan_cells, plan_sizes, recorded_routing
from moetriage.gguf.layout import ExpertTensor, ModelLayout, TensorSpan
from moetriage.trace.io import read_trace
from moetriage.types import MIB

N_EXPERT = 128
EXPERT_BYTES = 3 * 768 * 2048 // 32 * 18  # three q4_0 matrices
DENSE_BYTES = 450 * MIB


def layout_of(n_layer: int) -> ModelLayout:
    """Return the layout of so many layers of Qwen3-30B-A3B in q4_0, its experts as one tensor a layer."""
    experts = [ExpertTensor(span(f"blk.{i}.ffn_exps.weight", N_EXPERT * EXPERT_BYTES), i, "exps", N_EXPERT) for i in range(n_layer)]
    heads = {"head_count": 32, "key_length": 128, "value_length": 128}
    return ModelLayout(
        paths=(Path("model.gguf"),),
        sizes=(DENSE_BYTES + n_layer * N_EXPERT * EXPERT_BYTES,),
        arch="qwen3moe",
        name="",
        n_layer=n_layer,
        n_expert=N_EXPERT,
        top_k=8,
        n_ctx_train=40960,
        n_embd=2048,
        n_vocab=151936,
        n_head_kv=(4,) * n_layer,
        metadata={f"qwen3moe.attention.{name}": value for name, value in heads.items()},
        layer_arrays={},
        experts=tuple(experts),
        dense=(span("token_embd.weight", DENSE_BYTES),),
        unused=(),
    )


def span(name: str, nbytes: int) -> TensorSpan:
    return TensorSpan(name, 0, 0, nbytes, 2, (1, 1, 1, 1))


@pytest.mark.parametrize("n_layer", [3, DEFAULT_LAYERS, 10])
def test_the_cache_holds_the_recorded_share_of_the_experts(n_layer: int) -> None:
    meta = read_trace(recorded_routing()).meta
    layout = layout_of(n_layer)
    sizes = plan_sizes(layout, meta, n_ctx=157)
    recorded_share = 4000 * MIB / (128 * sum(meta.layer_expert_bytes.values()))
    assert sizes.cache_mb * MIB / layout.expert_total_bytes == pytest.approx(recorded_share, abs=MIB / layout.expert_total_bytes)


def test_the_default_file_fits_into_4_gb_and_not_into_its_memory_limit() -> None:
    sizes = plan_sizes(layout_of(DEFAULT_LAYERS), read_trace(recorded_routing()).meta, n_ctx=157)
    assert sizes.limit_bytes is not None
    assert sizes.cache_mb * MIB + DENSE_BYTES < sizes.limit_bytes < 0.7 * sizes.file_bytes
    assert sizes.file_bytes < 4e9


def test_a_file_of_one_layer_gets_no_limit() -> None:
    assert plan_sizes(layout_of(1), read_trace(recorded_routing()).meta, n_ctx=157).limit_bytes is None


def test_prompt_and_tokens_are_those_of_the_recording() -> None:
    frame = read_trace(recorded_routing()).frame
    assert frame.filter(frame["phase"] == 0)["step"].n_unique() == PROMPT_TOKENS
    assert frame.filter(frame["phase"] == 1)["step"].n_unique() == TOKENS


def test_the_cells_are_valid_and_differ_only_in_what_they_compare() -> None:
    cells = plan_cells(600, Path("trace.parquet"))
    for cell in cells:
        cell.config.validate()
        assert cell.config.force_routing == Path("trace.parquet")
    assert [cell.config.mmap for cell in cells] == [True, False, False, False]
    assert {cell.config.cache_mb for cell in cells[1:]} == {600}
    assert [cell.config.drop and cell.config.drop.threshold for cell in cells] == [None, None, 0.75, 1.0]
