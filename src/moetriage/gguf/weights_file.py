"""Write one GGUF file of trained weights.

In: metadata values and float32 arrays, each with the tensor type it should get. Out: the file, which appears under its name only when it is
complete. Quantised with ggml's own ``ggml_quantize_chunk``, so the blocks are those that llama-quantize would write. What the tensors
mean is up to the caller.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from moetriage.errors import UsageError
from moetriage.gguf.ggml_api import check_weight_type, fitting_type, quantize, tensor_bytes
from moetriage.gguf.writer import HeaderWriter, Value, aligned

_LARGEST_HALF = 65504.0


@dataclass(frozen=True)
class Weight:
    """One tensor: its values [..., row elements] and the name of the type it is written in.

    A type whose blocks do not divide the row becomes q8_0 or f16, as when converting with llama.cpp's tools.
    """

    name: str
    values: npt.NDArray[np.float32]
    wanted: str

    @property
    def ne(self) -> tuple[int, ...]:
        """Return the sizes as ggml counts them, the row first."""
        return tuple(reversed(self.values.shape))

    @property
    def ggml_type(self) -> int:
        """Return the number of the type that is written."""
        return fitting_type(self.wanted, self.values.shape[-1])


def write_weights(out: Path, keys: dict[str, Value], weights: Sequence[Weight], *, force: bool = False) -> int:
    """Write ``out`` and return its size in bytes.

    force: replace an existing file. Raises UsageError for an existing file, a type that cannot be made from weights alone, values that are
    not finite or do not fit f16, and a file that cannot be written; nothing is left behind then.
    """
    check_target(out, force=force)
    for weight in weights:
        _check(weight)
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(_header(keys, weights))
            for weight in weights:
                data = _encoded(weight)
                file.write(data)
                file.write(bytes(aligned(len(data)) - len(data)))
            file.flush()
            os.fsync(file.fileno())
        nbytes = temporary.stat().st_size
        temporary.replace(out)
    except OSError as error:
        raise UsageError(f"{out}: writing failed: {error.strerror or error}; nothing was kept") from error
    finally:
        with contextlib.suppress(OSError):  # on a disk that cannot be written to it would hide what was wrong
            temporary.unlink()
    return nbytes


def check_target(out: Path, *, force: bool) -> None:
    """Raise UsageError for a place that cannot be written to, before anything is computed for it. Only regular files are ever replaced."""
    try:
        if not out.parent.is_dir():
            raise UsageError(f"{out}: the folder {out.parent} does not exist")
        if out.is_dir():
            raise UsageError(f"{out}: is a directory; name a file in it")
        mode = out.lstat().st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise UsageError(f"{out}: cannot be written: {error.strerror or error}") from error
    # A link is none either: what /dev/stdout leads to may be a file, and the link would be replaced.
    if not stat.S_ISREG(mode):
        raise UsageError(f"{out}: is no regular file; name another")
    if not force:
        raise UsageError(f"{out}: exists already; choose another name, or replace it with --force")


def _check(weight: Weight) -> None:
    check_weight_type(weight.ggml_type)
    if not np.isfinite(weight.values).all():
        raise UsageError(f"tensor {weight.name} holds NaN or inf: the training diverged; export an earlier checkpoint")
    largest = float(np.abs(weight.values).max(initial=0.0))
    # Halves are also the scales of the quantised types; beyond their range llama.cpp would compute with inf.
    if weight.wanted != "f32" and largest > _LARGEST_HALF:
        raise UsageError(
            f"tensor {weight.name} holds {largest:.3g}, beyond the {_LARGEST_HALF:g} of {weight.wanted}'s halves; use --type f32"
        )


def _header(keys: dict[str, Value], weights: Sequence[Weight]) -> bytes:
    with HeaderWriter(len(weights)) as header:
        for key, value in keys.items():
            header.set(key, value)
        for weight in weights:
            header.add_tensor(weight.name, weight.ggml_type, weight.ne)
        return header.header()


def _encoded(weight: Weight) -> memoryview:
    data = quantize(weight.values.reshape(-1, weight.values.shape[-1]), weight.ggml_type)
    assert data.nbytes == tensor_bytes(weight.ggml_type, weight.ne)
    return data.data
