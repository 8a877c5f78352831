"""G12: a prompt of several batches and micro-batches, with the logits of its end or of all of it."""

from __future__ import annotations

import numpy as np
import pytest
from gates.harness import FAMILIES, assert_same, recording, resident, say, streamed

from moetriage.trace.reader import read_trace

LONG = tuple(np.random.default_rng(5).integers(10, 500, 150).tolist())
CUTS = [{"n_batch": 64, "n_ubatch": 16}, {"n_batch": 150, "n_ubatch": 33}]


@pytest.mark.parametrize("shape", FAMILIES)
@pytest.mark.parametrize("cut", CUTS, ids=lambda cut: f"{cut['n_batch']}-{cut['n_ubatch']}")
def test_cut_prompt_equals_resident(tiny, tmp_path, shape, cut):
    with resident(tiny(shape), **cut) as llm:
        expected = say(llm, 8, LONG)
    with streamed(tiny(shape), share=1.3, record_routes=True, llama=cut) as llm, recording(llm, tmp_path / "routes.parquet"):
        said, layers = say(llm, 8, LONG), llm.session.layers
    assert_same(said, expected)
    prefill = [step.n_tokens for step in said.steps[:-7]]
    assert prefill == [min(cut["n_batch"], len(LONG) - at) for at in range(0, len(LONG), cut["n_batch"])]
    frame = read_trace(tmp_path / "routes.parquet").frame
    for layer in layers[:-1]:  # each token of each micro-batch was routed once, under its own number
        assert frame.filter(layer=layer.block, slot=0)["step"].to_list() == list(range(len(LONG) + 7))
    last = frame.filter(layer=layers[-1].block, slot=0)["step"].to_list()
    assert last[-8:] == list(range(len(LONG) - 1, len(LONG) + 7))


@pytest.mark.parametrize("shape", FAMILIES)
def test_all_logits_of_a_cut_prompt_equal_resident(tiny, tmp_path, shape):
    cut = {"n_batch": 64, "n_ubatch": 16, "logits_all": True}
    with resident(tiny(shape), **cut) as llm:
        llm.eval(LONG)
        expected = llm.scores[: len(LONG)].copy()
    with streamed(tiny(shape), share=1.3, record_routes=True, llama=cut) as llm, recording(llm, tmp_path / "routes.parquet"):
        llm.eval(LONG)
        scores, last = llm.scores[: len(LONG)].copy(), llm.session.layers[-1].block
    assert np.array_equal(scores.view(np.uint32), expected.view(np.uint32))
    assert read_trace(tmp_path / "routes.parquet").frame.filter(layer=last, slot=0)["step"].to_list() == list(range(len(LONG)))
