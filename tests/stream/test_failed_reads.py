"""A session whose reads fail says where, and goes on once they succeed again."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gates.harness import PROMPT, assert_same, resident, say, streamed

from moetriage import Llama
from moetriage.errors import ReadError


@pytest.fixture
def copy(model: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(model, tmp_path / "copy.gguf"))


def cut_off(path: Path, llm: Llama, layer: int) -> Callable[[], None]:
    """Shorten the file to before the experts of a layer; return a function that gives it its bytes back."""
    whole = path.read_bytes()
    first = min(tensor.span.offset for tensor in llm.session.layout.experts if tensor.layer == layer)
    with path.open("r+b") as file:
        file.truncate(first)

    def mend() -> None:
        with path.open("r+b") as file:
            file.write(whole)

    return mend


@pytest.mark.parametrize(
    ("config", "layer"),
    [
        *(({"cache_mb": 0}, layer) for layer in (0, 2, 3)),
        *(({"share": 1.0, "prefetch": 2}, layer) for layer in (0, 2, 3)),
        ({"cache_mb": 0, "odirect": False}, 2),
        ({"cache_mb": 0, "staged": False}, 2),
    ],
)
def test_a_failed_read_names_its_place_and_the_session_goes_on(copy: Path, model: Path, config: dict[str, Any], layer: int) -> None:
    with resident(model) as plain:
        expected = say(plain)
    with streamed(copy, record_routes=True, **config) as llm:
        assert_same(say(llm), expected)
        mend = cut_off(copy, llm, layer)
        for _ in range(2):  # the second time round nothing of the first may count as loaded
            with pytest.raises(ReadError) as caught:
                say(llm)
        error = caught.value
        assert error.path == str(copy)
        assert error.layer >= layer
        tensor = next(t for t in llm.session.layout.experts if t.span.offset <= error.offset < t.span.offset + t.span.nbytes)
        assert tensor.layer == error.layer
        assert error.expert == (error.offset - tensor.span.offset) // tensor.expert_bytes
        assert str(copy) in str(error)
        assert str(error.offset) in str(error)
        assert f"layer {error.layer}, expert {error.expert}" in str(error)
        assert llm.n_tokens == 0, "no token of it counts as evaluated"
        mend()
        routes: list[Any] = []
        llm.session.on_routes = routes.append
        said = say(llm)
    assert_same(said, expected)
    assert routes[0]["step"][0] == 0
    assert sum(len(columns["step"]) for columns in routes if columns["phase"][0] == 1) == 23 * 16


def test_the_same_prompt_after_a_failed_token_is_not_sampled_from_lost_logits(copy: Path, model: Path) -> None:
    """llama_cpp samples at once when a prompt is exactly what was evaluated last; its logits are gone when the token after it failed."""
    with streamed(copy, cache_mb=0) as llm:
        tokens = llm.generate(PROMPT, temp=0.0)
        first = next(tokens)
        mend = cut_off(copy, llm, 1)
        with pytest.raises(ReadError):
            next(tokens)
        assert llm.n_tokens == len(PROMPT)
        mend()
        tokens = llm.generate(PROMPT, temp=0.0)
        again = [next(tokens) for _ in range(6)]
        tokens.close()
    with resident(model) as plain:
        tokens = plain.generate(PROMPT, temp=0.0)
        expected = [next(tokens) for _ in range(6)]
        tokens.close()
    assert again == expected
    assert first == expected[0]
