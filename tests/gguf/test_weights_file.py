"""Trained weights are written as given, in the types asked for, completely or not at all."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import numpy as np
import pytest

from moetriage.errors import UsageError
from moetriage.gguf import weights_file
from moetriage.gguf.ggml_api import type_names
from moetriage.gguf.header import open_header
from moetriage.gguf.weights_file import Weight, write_weights

KEYS = {"general.architecture": "test"}


def weight(name: str = "w", shape: tuple[int, ...] = (3, 64), wanted: str = "f32", scale: float = 1.0) -> Weight:
    return Weight(name, np.random.default_rng(1).standard_normal(shape, dtype=np.float32) * np.float32(scale), wanted)


def data_of(path: Path, name: str) -> bytes:
    with open_header(path) as header:
        (tensor,) = [t for t in header.tensors() if t.name == name]
        return path.read_bytes()[tensor.offset : tensor.offset + tensor.nbytes]


def test_values_come_back_from_the_file(tmp_path: Path) -> None:
    out = tmp_path / "m.gguf"
    exact, half, q8 = weight("exact", (5, 7)), weight("half", (2, 3, 64), "f16"), weight("q8", (4, 64), "q8_0")
    assert write_weights(out, KEYS, [exact, half, q8]) == out.stat().st_size
    assert data_of(out, "exact") == exact.values.tobytes()
    assert data_of(out, "half") == half.values.astype(np.float16).tobytes()
    blocks = np.frombuffer(data_of(out, "q8"), dtype=[("scale", "<f2"), ("q", "i1", 32)])
    values = (blocks["scale"][:, None].astype(np.float32) * blocks["q"]).reshape(4, 64)
    assert np.abs(values - q8.values).max() <= np.abs(q8.values).max() / 127 / 2 * 1.01


def test_a_row_that_does_not_fill_a_block_falls_back(tmp_path: Path) -> None:
    names = [type_names()[weight(shape=(2, n), wanted=wanted).ggml_type] for n, wanted in ((256, "q6_K"), (64, "q6_K"), (20, "q4_0"))]
    assert names == ["q6_K", "q8_0", "f16"]


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (Weight("w", np.array([[1.0, np.nan]], dtype=np.float32), "f32"), "tensor w holds NaN or inf"),
        (
            Weight("w", np.array([[1.0, 7e4]], dtype=np.float32), "f16"),
            "tensor w holds 7e+04, beyond the 65504 of f16's halves; use --type f32",
        ),
        (weight(wanted="q9"), "tensor type 'q9' is unknown"),
        (weight(shape=(1, 256), wanted="iq2_xs"), "cannot be made from weights alone"),
    ],
)
def test_weights_that_no_file_can_hold_are_refused(tmp_path: Path, bad: Weight, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        write_weights(tmp_path / "m.gguf", KEYS, [bad])
    assert said in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_values_beyond_halves_are_written_as_f32(tmp_path: Path) -> None:
    big = Weight("w", np.array([[1.0, 7e4]], dtype=np.float32), "f32")
    write_weights(tmp_path / "m.gguf", KEYS, [big])
    assert data_of(tmp_path / "m.gguf", "w") == big.values.tobytes()


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "m.gguf"
    write_weights(out, KEYS, [weight()])
    before = out.read_bytes()

    def full(_fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(weights_file.os, "fsync", full)
    with pytest.raises(UsageError, match=r"m\.gguf: writing failed: No space left on device; nothing was kept"):
        write_weights(out, KEYS, [weight(scale=2.0)], force=True)
    assert out.read_bytes() == before
    assert list(tmp_path.iterdir()) == [out]


def test_what_is_no_regular_file_is_never_replaced(tmp_path: Path) -> None:
    pipe, link, target = tmp_path / "pipe", tmp_path / "link", tmp_path / "target"
    os.mkfifo(pipe)
    target.write_text("x")
    link.symlink_to(target)
    (tmp_path / "dangling").symlink_to(tmp_path / "nothing")
    for name in ("pipe", "link", "dangling"):
        for force in (False, True):
            with pytest.raises(UsageError, match=f"{name}: is no regular file; name another"):
                write_weights(tmp_path / name, KEYS, [weight()], force=force)
    assert stat.S_ISFIFO(pipe.lstat().st_mode)
    assert link.is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dangling", "link", "pipe", "target"]


@pytest.mark.parametrize(("length", "said"), [(250, "writing failed: File name too long"), (300, "cannot be written: File name too long")])
def test_a_name_that_no_file_can_have_is_refused_by_its_own_name(length: int, said: str, tmp_path: Path) -> None:
    out = tmp_path / ("x" * length)
    with pytest.raises(UsageError) as caught:
        write_weights(out, KEYS, [weight()])
    assert str(caught.value).startswith(f"{out}: {said}")


def test_an_existing_file_is_replaced_only_by_force(tmp_path: Path) -> None:
    out = tmp_path / "m.gguf"
    write_weights(out, KEYS, [weight()])
    with pytest.raises(UsageError, match="exists already; choose another name, or replace it with --force"):
        write_weights(out, KEYS, [weight()])
    write_weights(out, KEYS, [weight(scale=2.0)], force=True)
    assert data_of(out, "w") == weight(scale=2.0).values.tobytes()
    with pytest.raises(UsageError, match="is a directory"):
        write_weights(tmp_path, KEYS, [weight()])
    with pytest.raises(UsageError, match="does not exist"):
        write_weights(tmp_path / "no" / "m.gguf", KEYS, [weight()])
