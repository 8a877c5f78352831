"""No file crashes the process, hangs it, or makes it allocate what is not there; each is refused in one line that names it."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moetriage.errors import ModelFileError
from moetriage.gguf import header
from moetriage.gguf.header import open_header
from moetriage.gguf.layout import read_layout

if TYPE_CHECKING:
    from tests.gguf.conftest import GgufBytes

U32, F32, STRING = 4, 6, 8


def refusal(path: Path) -> ModelFileError:
    """Return the error that opening ``path`` raises, after checking that it is one line that names the file."""
    with pytest.raises(ModelFileError) as caught, open_header(path):
        pass
    assert "\n" not in str(caught.value)
    assert path.name in str(caught.value)
    return caught.value


def test_values_come_back_by_type(moe: GgufBytes, tmp_path: Path) -> None:
    moe.keys["a.float"] = moe.value(F32, 0.5)
    moe.keys["a.flags"] = moe.array(7, [True, False])
    moe.keys["a.numbers"] = moe.array(5, [-1, 2])
    moe.keys["a.words"] = moe.array(STRING, ["x", "", "ü"])
    moe.keys["a.none"] = moe.array(U32, [])
    with open_header(moe.write(tmp_path / "m.gguf")) as opened:
        assert opened.scalars["general.architecture"] == "q"
        assert opened.scalars["q.block_count"] == 2
        assert opened.scalars["a.float"] == 0.5
        assert opened.arrays == {"a.flags": (True, False), "a.numbers": (-1, 2), "a.none": ()}
        assert opened.strings("a.words") == [b"x", b"", "ü".encode()]
        assert opened.strings("a.numbers") is None
        assert opened.strings("not there") is None
        first = opened.tensors()[0]
    assert (first.name, first.ne, first.nbytes, first.offset % 32) == ("output.weight", (8, 4, 1, 1), 128, 0)


def test_long_arrays_are_not_read_as_values(moe: GgufBytes, tmp_path: Path) -> None:
    moe.keys["a.scores"] = moe.array(F32, [0.0] * (header.MAX_SHORT_ARRAY + 1))
    with open_header(moe.write(tmp_path / "m.gguf")) as opened:
        assert "a.scores" not in opened.arrays
        assert "a.scores" in opened.types


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is empty"),
        (b"GG", "not a GGUF file"),
        (b"PK\x03\x04" + bytes(60), r"starts with b'PK\\x03\\x04'"),
        (b"GGUF", "ends after 4 bytes"),
        (b"GGUF" + struct.pack("<Iq", 3, 0), "ends after 16 bytes"),
        (b"GGUF" + struct.pack("<Iqq", 1, 0, 0), "GGUFv1 is no longer supported"),
        (b"GGUF" + struct.pack("<Iqq", 4, 0, 0), "version 4"),
        (b"GGUF" + struct.pack(">Iqq", 3, 0, 0), "endianness"),
        (b"GGUF" + struct.pack("<Iqq", 3, 2**62, 0), "claims 4611686018427387904 tensors"),
        (b"GGUF" + struct.pack("<Iqq", 3, 0, 2**62), "4611686018427387904 keys"),
        (b"GGUF" + struct.pack("<Iqq", 3, -1, 0), "claims -1 tensors"),
    ],
)
def test_what_is_no_gguf_file_is_refused(content: bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelFileError, match=reason):
        read_layout(path)


Spoil = Callable[["GgufBytes"], None]


def absurd_string(moe: GgufBytes) -> None:
    moe.keys["general.name"] = struct.pack("<iQ", STRING, 2**62)


def absurd_array(moe: GgufBytes) -> None:
    moe.keys["general.name"] = moe.array(U32, [], n=2**61)


def nested_array(moe: GgufBytes) -> None:
    moe.keys["general.name"] = struct.pack("<iiQ", 9, 9, 1)


def unknown_value_type(moe: GgufBytes) -> None:
    moe.keys["general.name"] = struct.pack("<i", 77)


def empty_key(moe: GgufBytes) -> None:
    moe.keys[""] = moe.value(U32, 1)


def same_name_twice(moe: GgufBytes) -> None:
    # Two names that differ behind a zero byte only: different for the library, the same for who asks it.
    moe.tensors["output.weight\0a"] = moe.tensor((4, 1), 288)
    moe.tensors["output.weight\0b"] = moe.tensor((4, 1), 320)


def odd_alignment(moe: GgufBytes) -> None:
    moe.set("general.alignment", 3)


def alignment_of_wrong_type(moe: GgufBytes) -> None:
    moe.keys["general.alignment"] = moe.value(STRING, "32")


def huge_shape(moe: GgufBytes) -> None:
    moe.tensors["output.weight"] = moe.tensor((2**40, 2**40), 0)


def negative_shape(moe: GgufBytes) -> None:
    moe.tensors["output.weight"] = moe.tensor((-4, 4), 0)


def five_dimensions(moe: GgufBytes) -> None:
    moe.tensors["output.weight"] = moe.tensor((1, 1, 1, 1, 1), 0)


def unknown_tensor_type(moe: GgufBytes) -> None:
    moe.tensors["output.weight"] = moe.tensor((8, 4), 0, 999)


def removed_tensor_type(moe: GgufBytes) -> None:
    moe.tensors["output.weight"] = moe.tensor((32, 4), 0, 4)


def partial_block(moe: GgufBytes) -> None:
    moe.tensors["output.weight"] = moe.tensor((33, 4), 0, 2)


def shifted_offset(moe: GgufBytes) -> None:
    moe.tensors["output.weight"] = moe.tensor((8, 4), 64)


def long_name(moe: GgufBytes) -> None:
    moe.tensors["n" * 64] = moe.tensor((4,), 288)


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (absurd_string, "string length"),
        (absurd_array, "failed to read key-value pairs"),
        (nested_array, "invalid GGUF type"),
        (unknown_value_type, "invalid GGUF type"),
        (empty_key, "is empty"),
        (same_name_twice, "is there twice"),
        (odd_alignment, "not a power of 2"),
        (alignment_of_wrong_type, "must be of type"),
        (huge_shape, "overflow"),
        (negative_shape, "invalid number of elements"),
        (five_dimensions, "invalid number of dimensions"),
        (unknown_tensor_type, "invalid ggml type"),
        (removed_tensor_type, "block size"),
        (partial_block, "block size"),
        (shifted_offset, "has offset 64, expected 0"),
        (long_name, "too long"),
    ],
)
def test_a_damaged_header_is_refused_with_the_librarys_reason(spoil: Spoil, reason: str, moe: GgufBytes, tmp_path: Path) -> None:
    spoil(moe)
    with pytest.raises(ModelFileError, match=reason):
        read_layout(moe.write(tmp_path / "m.gguf"))


def test_the_error_names_the_byte_where_the_header_breaks(moe: GgufBytes, tmp_path: Path) -> None:
    end = moe.header.index(b"q.context_length") + len("q.context_length") + 8  # behind this key's type and value
    path = tmp_path / "m.gguf"
    path.write_bytes(moe.header[:end] + b"\xff" * 8 + bytes(200))
    assert refusal(path).offset == end + 8  # the length of the next key was read, and cannot be


def test_control_characters_of_a_key_do_not_reach_the_terminal(moe: GgufBytes, tmp_path: Path) -> None:
    moe.keys["\x1b[2J\nkey"] = struct.pack("<i", 77)
    message = str(refusal(moe.write(tmp_path / "m.gguf")))
    assert "??" not in message
    assert "?[2J?key" in message


def test_every_prefix_of_a_file_is_refused(moe: GgufBytes, tmp_path: Path) -> None:
    whole = moe.build()
    path = tmp_path / "m.gguf"
    for length in range(len(whole) - 16):  # the last tensor ends 16 bytes before the end of the data
        path.write_bytes(whole[:length])
        with pytest.raises(ModelFileError):
            read_layout(path)
    path.write_bytes(whole)
    assert read_layout(path).n_expert == 4


def test_a_header_larger_than_the_first_window_is_read(moe: GgufBytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(header, "WINDOWS", (128, 4096))
    assert read_layout(moe.write(tmp_path / "m.gguf")).n_expert == 4


def test_a_header_larger_than_the_last_window_is_refused(moe: GgufBytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(header, "WINDOWS", (128, 512))
    moe.keys["a.long"] = moe.value(STRING, "x" * 600)
    assert "first 512 bytes" in str(refusal(moe.write(tmp_path / "m.gguf")))


def test_an_absurd_array_in_a_large_file_costs_little_memory(moe: GgufBytes, tmp_path: Path) -> None:
    # As the library reads it unbounded, this array of strings takes 32 GiB before its first element is looked at.
    moe.keys["a.words"] = moe.array(STRING, [], n=2**30)
    path = moe.write(tmp_path / "m.gguf")
    os.truncate(path, 17 * 10**9)
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))\n"
        "from moetriage.errors import ModelFileError; from moetriage.gguf.layout import read_layout\n"
        f"try: read_layout({str(path)!r})\nexcept ModelFileError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert "header is unreadable" in done.stdout


def test_a_directory_is_refused(tmp_path: Path) -> None:
    assert "is a directory" in str(refusal(tmp_path))


def test_a_pipe_is_refused_without_waiting_for_its_writer(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    assert "not a regular file" in str(refusal(tmp_path / "pipe.gguf"))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    assert "No such file" in str(refusal(tmp_path / "gone.gguf"))


def test_a_link_to_itself_is_refused(tmp_path: Path) -> None:
    (tmp_path / "loop.gguf").symlink_to(tmp_path / "loop.gguf")
    assert "cannot be opened" in str(refusal(tmp_path / "loop.gguf"))


def test_a_file_that_may_not_be_read_is_refused(moe: GgufBytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(self: Path, *_: object) -> object:
        raise PermissionError(13, "Permission denied", str(self))

    path = moe.write(tmp_path / "m.gguf")
    monkeypatch.setattr(Path, "open", denied)  # root may read anything, so the mode bits would prove nothing
    assert "cannot be read: Permission denied" in str(refusal(path))


def test_a_name_with_a_zero_byte_is_refused() -> None:
    with pytest.raises(ModelFileError, match="not a usable file name"):
        read_layout("a\0b.gguf")


@settings(max_examples=400, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_no_mutation_of_a_header_does_more_than_be_refused(moe: GgufBytes, tmp_path: Path, data: st.DataObject) -> None:
    raw = bytearray(moe.build())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(4, len(moe.header) - 8))
        if data.draw(st.booleans()):
            raw[at] = data.draw(st.integers(0, 255))
        else:
            raw[at : at + 8] = struct.pack("<Q", data.draw(st.sampled_from([0, 1, 2**16, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1])))
    path = tmp_path / "m.gguf"
    path.write_bytes(raw)
    try:
        layout = read_layout(path)
    except ModelFileError:
        return
    assert all(0 < e.span.offset + e.span.nbytes <= len(raw) for e in layout.experts)
