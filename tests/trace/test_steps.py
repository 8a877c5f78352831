from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from moetriage.errors import TraceError
from moetriage.trace.io import Trace, read_trace
from moetriage.trace.steps import PhaseSteps, dropped_set, forced_routing

Columns = dict[str, npt.NDArray[np.generic]]


@pytest.fixture
def trace(write: Callable[[str], Path], columns: Columns) -> Trace:
    columns["dropped"][:] = np.arange(len(columns["dropped"])) % 5 == 0
    columns["expert_bytes"][columns["dropped"] == 1] = 0
    return read_trace(write("t.csv"))


def arrays_by_hand(
    trace: Trace, layers: tuple[int, ...], phase: int
) -> tuple[list[tuple[int, int]], dict[tuple[int, int, int], tuple[object, ...]]]:
    """Return the tokens of a phase in order and (t, i, k) -> (expert, weight, dropped), in plain Python."""
    tokens: list[tuple[int, int]] = []
    values: dict[tuple[int, int, int], tuple[object, ...]] = {}
    for row in trace.frame.iter_rows(named=True):
        if row["phase"] != phase or row["layer"] not in layers:
            continue
        token = (row["turn"], row["step"])
        if token not in tokens:
            tokens.append(token)
        values[tokens.index(token), layers.index(row["layer"]), row["slot"]] = (row["expert"], row["weight"], bool(row["dropped"]))
    return tokens, values


@pytest.mark.parametrize("n_layers", [3, 2, 1])
def test_every_row_lands_at_its_token_layer_and_slot(n_layers: int, trace: Trace) -> None:
    forced = forced_routing(trace, n_expert=8, n_layers=n_layers, path="m.gguf")
    assert (forced.top_k, forced.n_expert, forced.layers) == (2, 8, (1, 2, 3)[:n_layers])
    for phase, steps in ((0, forced.prefill), (1, forced.decode)):
        tokens, values = arrays_by_hand(trace, forced.layers, phase)
        assert steps.n_tokens == len(tokens) == (6, 4)[phase]
        for t, i, k in np.ndindex(steps.expert_TLK.shape):
            expected = values.get((t, i, k), (-1, 0.0, False))
            assert (steps.expert_TLK[t, i, k], steps.weight_TLK[t, i, k], steps.dropped_TLK[t, i, k]) == expected
            assert steps.present_TL[t, i] == ((t, i, k) in values)


def test_arrays_have_the_types_and_the_layout_that_native_code_indexes(trace: Trace) -> None:
    drops = dropped_set(trace, n_expert=8, n_layers=3, top_k=2)
    assert (drops.top_k, drops.n_expert, drops.layers) == (2, 8, (1, 2, 3))
    for steps in (drops.prefill, drops.decode):
        expected = {"expert_TLK": np.int32, "weight_TLK": np.float32, "dropped_TLK": np.bool_, "present_TL": np.bool_}
        for name, dtype in expected.items():
            array = getattr(steps, name)
            assert array.dtype == dtype
            assert array.flags.c_contiguous
        assert steps.dropped_TLK.any()
    assert set(expected) == {field.name for field in dataclasses.fields(PhaseSteps)}


def test_last_layer_of_a_prefill_holds_only_tokens_with_output(trace: Trace) -> None:
    forced = forced_routing(trace, n_expert=8, n_layers=3, path="m.gguf")
    assert forced.prefill.present_TL[:, :2].all()
    assert forced.prefill.present_TL[:, 2].tolist() == [False, False, False, True, False, True]
    assert forced.decode.present_TL.all()


def test_the_packaged_recording_drives_a_model_of_fewer_layers(repo_root: Path) -> None:
    trace = read_trace(repo_root / "src/moetriage/data/qwen-excerpt.route.parquet")
    forced = forced_routing(trace, n_expert=128, n_layers=16, path="m.gguf")
    assert forced.prefill.expert_TLK.shape == (28, 16, 6)
    assert forced.decode.expert_TLK.shape == (128, 16, 6)
    assert forced.prefill.present_TL.all()
    assert forced.prefill.expert_TLK[0, 0].tolist() == [49, 19, 58, 29, 16, 70]
    whole = forced_routing(trace, n_expert=128, n_layers=48, path="m.gguf")
    assert whole.decode.expert_TLK[-1, -1].tolist() == [73, 105, 20, 57, 9, 126]
    assert whole.prefill.present_TL[:, 47].sum() == 1


@pytest.mark.parametrize(
    ("n_expert", "n_layers", "reason"),
    [
        (16, 3, "has 8 experts per layer and cannot drive m.gguf, which has 16"),
        (8, 4, "has 3 layers with experts and cannot drive m.gguf, which has 4"),
    ],
)
def test_a_trace_of_another_model_cannot_be_forced(n_expert: int, n_layers: int, reason: str, trace: Trace) -> None:
    with pytest.raises(TraceError) as caught:
        forced_routing(trace, n_expert=n_expert, n_layers=n_layers, path="m.gguf")
    assert str(caught.value) == f"{trace.path}: {reason}"


def test_a_phase_without_steps_has_no_tokens(trace: Trace) -> None:
    only = dataclasses.replace(trace, frame=trace.frame.filter(trace.frame["phase"] == 1))
    forced = forced_routing(only, n_expert=8, n_layers=3, path="m.gguf")
    assert (forced.prefill.n_tokens, forced.decode.n_tokens) == (0, 4)
    assert forced.prefill.expert_TLK.shape == (0, 3, 2)


@pytest.mark.parametrize(
    ("n_expert", "n_layers", "top_k", "reason"),
    [
        (16, 3, 2, "has 8 experts per layer, the model 16"),
        (8, 2, 2, "has 3 layers with experts, the model 2"),
        (8, 3, 4, "has 2 experts per token (top-k), the model 4"),
    ],
)
def test_drops_of_another_model_or_width_are_refused(n_expert: int, n_layers: int, top_k: int, reason: str, trace: Trace) -> None:
    with pytest.raises(TraceError) as caught:
        dropped_set(trace, n_expert=n_expert, n_layers=n_layers, top_k=top_k)
    assert reason in str(caught.value)


def test_a_trace_without_the_dropped_column_says_nothing_of_drops(trace: Trace) -> None:
    with pytest.raises(TraceError, match="has no 'dropped' column"):
        dropped_set(dataclasses.replace(trace, has_dropped=False), n_expert=8, n_layers=3, top_k=2)
