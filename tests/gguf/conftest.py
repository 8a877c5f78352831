"""GGUF files built byte by byte, so that a test can spoil one thing at a time; and plain llama.cpp to check files against."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

U16, U32, I32, F32, BOOL, STRING, ARRAY = 2, 4, 5, 6, 7, 8, 9
FORMATS = {U16: "<H", U32: "<I", I32: "<i", F32: "<f", BOOL: "<?"}
Q4_0 = 2


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


@dataclass
class GgufBytes:
    """A GGUF file in parts: encoded values by key, encoded tensor infos by name, the data behind them."""

    keys: dict[str, bytes] = field(default_factory=dict)
    tensors: dict[str, bytes] = field(default_factory=dict)
    data: bytes = b""
    magic: bytes = b"GGUF"
    version: int = 3
    n_keys: int | None = None
    n_tensors: int | None = None
    alignment: int = 32

    @staticmethod
    def value(kind: int, value: int | float | str | bytes) -> bytes:
        if isinstance(value, (str, bytes)):
            return struct.pack("<i", STRING) + text(value)
        return struct.pack("<i", kind) + struct.pack(FORMATS[kind], value)

    @staticmethod
    def array(kind: int, values: list[Any], *, n: int | None = None) -> bytes:
        body = b"".join(text(v) if kind == STRING else struct.pack(FORMATS[kind], v) for v in values)
        return struct.pack("<iiQ", ARRAY, kind, len(values) if n is None else n) + body

    @staticmethod
    def tensor(ne: tuple[int, ...], offset: int, ggml_type: int = 0) -> bytes:
        return struct.pack("<I", len(ne)) + struct.pack(f"<{len(ne)}q", *ne) + struct.pack("<iQ", ggml_type, offset)

    def set(self, key: str, value: int, kind: int = U32) -> None:
        self.keys[key] = self.value(kind, value)

    @property
    def header(self) -> bytes:
        counts = (
            len(self.tensors) if self.n_tensors is None else self.n_tensors,
            len(self.keys) if self.n_keys is None else self.n_keys,
        )
        out = self.magic + struct.pack("<Iqq", self.version, *counts)
        out += b"".join(text(key) + value for key, value in self.keys.items())
        return out + b"".join(text(name) + info for name, info in self.tensors.items())

    def build(self) -> bytes:
        header = self.header
        return header + bytes(-len(header) % self.alignment) + self.data

    def write(self, path: Path) -> Path:
        path.write_bytes(self.build())
        return path


@pytest.fixture
def moe() -> GgufBytes:
    """The smallest valid model: two layers, of which the second has 4 experts of 32 x 2 in Q4_0 (36 bytes each), 2 of them used."""
    model = GgufBytes()
    model.keys["general.architecture"] = model.value(STRING, "q")
    model.keys["general.name"] = model.value(STRING, "small")
    for key, value in (("block_count", 2), ("context_length", 64), ("embedding_length", 32), ("expert_count", 4), ("expert_used_count", 2)):
        model.set(f"q.{key}", value)
    model.tensors["output.weight"] = model.tensor((8, 4), 0)
    model.tensors["blk.1.ffn_up_exps.weight"] = model.tensor((32, 2, 4), 128, Q4_0)
    model.data = bytes(range(128)) + bytes(160)
    return model


@pytest.fixture(scope="session")
def load_plain() -> Callable[..., Any]:
    """Return a context manager that loads a model with plain llama.cpp: ``with load_plain(path, n_ctx=...) as llama``."""
    import llama_cpp

    defaults = llama_cpp.llama_cpp.llama_model_default_params

    def without_repacking() -> Any:
        # The AMX kernels behind repacking crash on some virtual machines (a tile configuration that the host refuses).
        params = defaults()
        params.use_extra_bufts = False
        return params

    @contextmanager
    def load(path: Path, *, n_ctx: int = 256, verbose: bool = False, **options: Any) -> Iterator[Any]:
        with mock.patch.object(llama_cpp.llama_cpp, "llama_model_default_params", without_repacking):
            llama = llama_cpp.Llama(str(path), n_ctx=n_ctx, n_threads=1, n_threads_batch=1, verbose=verbose, **options)
        try:
            yield llama
        finally:
            llama.close()

    return load
