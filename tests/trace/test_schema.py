from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetriage.errors import TraceError
from moetriage.trace.schema import MAGIC, SCHEMA, TraceMeta, header_lines, parse_header

names = st.text(st.characters(min_codepoint=32, exclude_characters="\x7f", exclude_categories=["Cs", "Cc"]), max_size=30)


@given(
    model=names,
    arch=st.from_regex(r"[a-z0-9-]{0,12}", fullmatch=True),
    expert_bytes=st.dictionaries(st.integers(0, 9), st.integers(1, 2**50), min_size=1),
    dense_bytes=st.dictionaries(st.integers(0, 9), st.integers(1, 2**50)),
    extra=st.dictionaries(st.text(max_size=5), st.text(max_size=20), max_size=3),
)
def test_header_reads_back_as_the_meta_it_was_written_from(
    model: str, arch: str, expert_bytes: dict[int, int], dense_bytes: dict[int, int], extra: dict[str, str]
) -> None:
    meta = TraceMeta(
        model=model,
        arch=arch,
        n_layer=10,
        n_expert=16,
        n_expert_used=4,
        layer_expert_bytes=expert_bytes,
        layer_dense_bytes=dense_bytes,
        extra=extra,
    )
    assert parse_header(header_lines(meta), "t.csv") == meta


def test_dense_layers_are_no_moe_layers() -> None:
    lines = [
        MAGIC,
        "# model=m arch=deepseek2 n_layer=3 n_expert=4 n_expert_used=2",
        "# layer=0 expert_bytes=0 dense_bytes=9",
        "# layer=2 expert_bytes=7 dense_bytes=9",
        "# layer=1 expert_bytes=8 dense_bytes=9",
        "# a line of a newer writer",
    ]
    meta = parse_header(lines, "t.csv")
    assert meta.moe_layers == (1, 2)
    assert meta.layer_expert_bytes == {1: 8, 2: 7}
    assert meta.layer_dense_bytes == {0: 9, 1: 9, 2: 9}


def test_line_breaks_in_a_model_name_cannot_forge_header_lines(meta: TraceMeta) -> None:
    forged = dataclasses.replace(meta, model="m\n# layer=0 expert_bytes=1 dense_bytes=1")
    assert parse_header(header_lines(forged), "t.csv").moe_layers == meta.moe_layers


GOOD = {
    "magic": MAGIC,
    "model": "# model=m arch=a n_layer=4 n_expert=8 n_expert_used=2",
    "layer": "# layer=1 expert_bytes=10 dense_bytes=0",
}


@pytest.mark.parametrize(
    ("part", "line", "reason"),
    [
        ("magic", "turn,phase", "is not a route trace"),
        ("magic", "# route_trace v2", "version 2 of the trace format; this program reads version 1"),
        ("model", "# model=m", "the header has no line '# model="),
        ("model", "# model=m arch=a n_layer=0 n_expert=8 n_expert_used=2", "n_layer=0 is not between"),
        ("model", "# model=m arch=a n_layer=99999999999999999999 n_expert=8 n_expert_used=2", "out of range"),
        ("model", "# model=m arch=a n_layer=999999999 n_expert=8 n_expert_used=2", "n_layer=999999999"),
        ("model", "# model=m arch=a n_layer=4 n_expert=0 n_expert_used=2", "n_expert=0"),
        (
            "model",
            "# model=m arch=a n_layer=4 n_expert=8 n_expert_used=9",
            "n_expert_used=9 is not between 1 and the number of experts (8)",
        ),
        ("model", "# model=m arch=a n_layer=-4 n_expert=8 n_expert_used=2", "the header has no line '# model="),
        ("layer", "", "no layer has experts"),
        ("layer", "# layer=1 expert_bytes=0 dense_bytes=5", "no layer has experts"),
        ("layer", "# layer=4 expert_bytes=10 dense_bytes=0", "layer 4 is not below n_layer=4"),
        ("layer", "# layer=1 expert_bytes=9999999999999999 dense_bytes=0", "claims 9999999999999999 bytes"),
        ("layer", GOOD["layer"] + "\n" + GOOD["layer"], "layer 1 is described twice"),
        ("layer", GOOD["layer"] + "\n# extra=[1]", "'extra' must be a JSON object"),
        ("layer", GOOD["layer"] + '\n# extra={"a": 1}', "'extra' must be a JSON object"),
        ("layer", GOOD["layer"] + "\n# extra=" + "[" * 100_000, "'extra' must be a JSON object"),
    ],
)
def test_wrong_header_is_refused_with_its_reason(part: str, line: str, reason: str) -> None:
    lines = "\n".join({**GOOD, part: line}.values()).split("\n")
    with pytest.raises(TraceError) as caught:
        parse_header(lines, "some.csv")
    assert reason in str(caught.value)
    assert "some.csv" in str(caught.value)
    assert caught.value.exit_code == 2


def test_every_column_is_documented_with_its_type(repo_root: Path) -> None:
    text = (repo_root / "docs" / "telemetry.md").read_text()
    for name, dtype in SCHEMA.items():
        assert f"| `{name}` | {str(dtype).lower()} |" in text
