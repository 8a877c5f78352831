"""The library is found, checked and called as its headers say."""

from __future__ import annotations

import ctypes
import ctypes.util
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from moetriage.errors import MoetriageError, UsageError
from moetriage.gguf import ggml_api


def test_reading_a_layout_imports_neither_llama_cpp_nor_libllama() -> None:
    code = (
        "import sys; from moetriage.gguf import ggml_api; import moetriage.gguf.layout; ggml_api.library();"
        "assert not [m for m in sys.modules if m.startswith('llama_cpp')];"
        "assert 'libllama' not in open('/proc/self/maps').read()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_missing_package_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MoetriageError, match=r"llama-cpp-python is not installed.*pip install llama-cpp-python=="):
        ggml_api.library_path()


def test_a_package_without_the_library_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: SimpleNamespace(submodule_search_locations=[str(tmp_path)]))
    with pytest.raises(MoetriageError, match=rf"{tmp_path}/lib has no libggml-base"):
        ggml_api.library_path()


def test_a_library_without_our_functions_is_refused_with_the_first_missing_one() -> None:
    libc = ctypes.util.find_library("c")
    assert libc is not None
    with pytest.raises(MoetriageError, match=r"libc.* does not fit moetriage.*ggml_version"):
        ggml_api.open_library(Path(libc))


def test_a_file_that_is_no_library_is_refused(tmp_path: Path) -> None:
    (tmp_path / "libggml-base.so").write_text("no ELF")
    with pytest.raises(MoetriageError, match="does not fit moetriage"):
        ggml_api.open_library(tmp_path / "libggml-base.so")


def test_an_older_library_is_refused_with_both_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ggml_api, "MIN_GGML_VERSION", (99, 1))
    with pytest.raises(MoetriageError, match=r"is ggml \d+\.\d+.* needs at least 99\.1"):
        ggml_api.open_library(ggml_api.library_path())


def test_every_known_type_has_a_name_and_finds_its_number() -> None:
    for number, name in ggml_api.type_names().items():
        assert ggml_api.type_id(name.upper()) == number
    assert ggml_api.type_id("mxfp4") == 39


def test_an_unknown_type_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"'q4_9' is unknown.*q4_0"):
        ggml_api.type_id("q4_9")


def test_quantised_values_are_close_to_the_originals() -> None:
    values = np.random.default_rng(0).standard_normal((3, 64), dtype=np.float32)
    blocks = ggml_api.quantize(values, ggml_api.type_id("q8_0")).reshape(-1, 34)
    scale = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    decoded = (scale * blocks[:, 2:].view(np.int8)).reshape(values.shape)
    assert np.abs(decoded - values).max() < 0.02


@pytest.mark.parametrize("name", ["iq2_xxs", "q8_1", "i32"])
def test_types_that_need_more_than_weights_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match=f"{name} cannot be made from weights alone"):
        ggml_api.quantize(np.zeros((1, 256), np.float32), ggml_api.type_id(name))


def test_the_previous_log_callback_is_put_back() -> None:
    lib = ggml_api.library()
    seen: list[bytes] = []
    mine = ggml_api.LOG_CALLBACK(lambda level, message, user: seen.append(message))
    before, user = ctypes.c_void_p(), ctypes.c_void_p()
    lib.ggml_log_get(ctypes.byref(before), ctypes.byref(user))
    lib.ggml_log_set(ctypes.cast(mine, ctypes.c_void_p), None)
    try:
        with ggml_api.captured_log() as lines:
            lib.gguf_init_from_buffer(b"nope", 4, ggml_api.GgufInitParams(True, None))
        assert any("magic" in line for line in lines)
        assert not seen
        lib.gguf_init_from_buffer(b"nope", 4, ggml_api.GgufInitParams(True, None))
        assert seen
    finally:
        lib.ggml_log_set(before, user)
