"""Write models with random weights that llama.cpp loads and runs, for tests and benchmarks.

In: the name of a shape, a path, a seed. Out: one GGUF file, or the shards of a split one. Files appear under their names only when they
are complete. What a shape is made of is said in ``shapes`` and ``architectures``, where bytes come from in ``blocks``.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from moetriage.errors import UsageError
from moetriage.gguf.architectures import TensorPlan, architecture_keys, tensor_plan
from moetriage.gguf.bigfile import BigFile
from moetriage.gguf.blocks import BlockSource, TypedPlan
from moetriage.gguf.ggml_api import GgufType, check_weight_type, fitting_type, type_id
from moetriage.gguf.hparams import MAX_LAYERS
from moetriage.gguf.shapes import SHAPES, Shape
from moetriage.gguf.shards import KEY_COUNT, KEY_NO, KEY_TENSORS, shard_name
from moetriage.gguf.vocabulary import Vocabulary, build_vocabulary
from moetriage.gguf.weights_file import check_target
from moetriage.gguf.writer import HeaderWriter, Typed, Value, aligned

__all__ = ["SHAPES", "Shape", "write_model"]

Progress = Callable[[int, int], None]
#: What a header may take besides the vocabulary, for the check of free space.
_HEADER_SLACK = 4 * 1024 * 1024
MAX_SHARDS = 999
#: Files from this size on are written past the page cache; smaller ones are about to be read and may stay in it.
DIRECT_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True)
class _File:
    """One file to write."""

    path: Path
    tensors: list[TypedPlan]
    keys: dict[str, Value]

    @property
    def data_bytes(self) -> int:
        return sum(aligned(t.nbytes) for t in self.tensors)


def write_model(
    out: Path,
    shape: str,
    *,
    layers: int | None = None,
    ggml_type: str | None = None,
    split: int = 1,
    seed: int = 0,
    progress: Progress | None = None,
    force: bool = False,
) -> list[Path]:
    """Write a model of ``shape`` with random weights and return the paths of its files.

    layers: blocks in place of the shape's own; ggml_type: tensor type of all matrices (rows that do not fill its blocks fall back to
    q8_0 or f16, as when converting); split: number of shards, named PREFIX-00001-of-0000N.gguf; progress: called with bytes written
    and bytes in total; force: replace existing files. The same arguments give the same bytes.
    Raises UsageError for a bad value, an existing file or too little disk space; nothing is left behind then, nor after Ctrl-C.
    """
    sized = _sized(shape, layers, ggml_type)
    vocabulary = build_vocabulary(sized.n_vocab)
    tensors = _typed(tensor_plan(sized, vocabulary.n_silent), sized)
    files = _files(out, tensors, _keys(shape, sized, vocabulary), split)
    _check_target(out, files, force)
    source = BlockSource(tensors, seed)
    total = sum(file.data_bytes for file in files)
    temporary = [file.path.with_name(f".{file.path.name}.{os.getpid()}.tmp") for file in files]
    done = 0
    try:
        for file, path in zip(files, temporary, strict=True):
            done = _write_file(file, path, source, done, total, progress)
        for file, path in zip(files, temporary, strict=True):
            path.replace(file.path)
    except OSError as error:
        raise UsageError(f"{out}: writing failed after {done} of {total} bytes: {error.strerror}; nothing was kept") from error
    finally:
        for path in temporary:
            with contextlib.suppress(OSError):  # on a disk that cannot be written to it would hide what was wrong
                path.unlink()
    return [file.path for file in files]


def _sized(name: str, layers: int | None, ggml_type: str | None) -> Shape:
    if name not in SHAPES:
        raise UsageError(f"shape {name!r} is unknown; there are: {', '.join(SHAPES)}")
    shape = SHAPES[name]
    if layers is not None:
        if not shape.lead < layers <= MAX_LAYERS:
            raise UsageError(f"--layers {layers}: must be between {shape.lead + 1} and {MAX_LAYERS} for {name}")
        shape = replace(shape, n_layer=layers)
    if ggml_type is not None:
        if name == "tiny-mixed":
            raise UsageError(f"--type {ggml_type}: {name} is there for its mixed types; choose tiny-qwen3moe")
        check_weight_type(type_id(ggml_type))
        shape = replace(shape, ggml_type=ggml_type, expert_types=())
    return shape


def _typed(plans: list[TensorPlan], shape: Shape) -> list[TypedPlan]:
    """Choose the type of each tensor."""
    return [TypedPlan(plan, type_id("f32") if plan.exact else fitting_type(_wanted(plan, shape), plan.ne[0])) for plan in plans]


def _wanted(plan: TensorPlan, shape: Shape) -> str:
    if plan.n_expert == 1 or not shape.expert_types:
        return shape.ggml_type
    others, down = shape.expert_types[plan.layer % len(shape.expert_types)]
    return down if "_down_" in plan.name else others


def _keys(name: str, shape: Shape, vocabulary: Vocabulary) -> dict[str, Value]:
    general: dict[str, Value] = {
        "general.architecture": shape.arch,
        "general.type": "model",
        "general.name": f"moetriage synthetic {name}",
        "general.description": f"random weights; {shape.about}",
        "general.quantization_version": 2,
    }
    return general | architecture_keys(shape) | vocabulary.keys(shape.pre)


def _files(out: Path, tensors: list[TypedPlan], keys: dict[str, Value], split: int) -> list[_File]:
    if not 1 <= split <= min(MAX_SHARDS, len(tensors)):
        raise UsageError(f"--split {split}: must be between 1 and {min(MAX_SHARDS, len(tensors))}")
    if split == 1:
        return [_File(out, tensors, keys)]
    prefix = out.name.removesuffix(".gguf")
    files = []
    for number, part in enumerate(_parts(tensors, split)):
        split_keys: dict[str, Value] = {
            KEY_NO: Typed(GgufType.UINT16, number),
            KEY_COUNT: Typed(GgufType.UINT16, split),
            KEY_TENSORS: Typed(GgufType.INT32, len(tensors)),
        }
        path = out.with_name(shard_name(prefix, number, split))
        # As llama-gguf-split does it: the model's own keys are in the first shard only.
        files.append(_File(path, part, keys | split_keys if number == 0 else split_keys))
    return files


def _parts(tensors: list[TypedPlan], n: int) -> list[list[TypedPlan]]:
    """Cut the tensors into ``n`` runs of about the same size, none of them empty."""
    total = sum(t.nbytes for t in tensors)
    parts: list[list[TypedPlan]] = [[]]
    done = 0
    for left, tensor in zip(range(len(tensors), 0, -1), tensors, strict=True):
        missing = n - len(parts)
        if parts[-1] and missing and (done >= total * len(parts) / n or left <= missing):
            parts.append([])
        parts[-1].append(tensor)
        done += tensor.nbytes
    return parts


def _check_target(out: Path, files: list[_File], force: bool) -> None:
    for file in files:
        check_target(file.path, force=force)
    needed = sum(file.data_bytes + _HEADER_SLACK for file in files)
    free = shutil.disk_usage(out.parent).free
    if needed > free:
        raise UsageError(f"{out}: needs {needed / 1e9:.1f} GB and the disk has {free / 1e9:.1f} GB free; use fewer --layers")


def _write_file(file: _File, path: Path, source: BlockSource, done: int, total: int, progress: Progress | None) -> int:
    """Write one file and return the bytes of data written so far, over all files."""
    with BigFile(path, direct=file.data_bytes >= DIRECT_BYTES) as target:
        target.write(_header(file))
        for tensor in file.tensors:
            padding = bytes(aligned(tensor.nbytes) - tensor.nbytes)
            for chunk in itertools.chain(source.chunks(tensor), [padding]):
                target.write(chunk)
                done += len(chunk)
                if progress is not None:
                    progress(done, total)
    return done


def _header(file: _File) -> bytes:
    with HeaderWriter(len(file.tensors)) as header:
        for key, value in file.keys.items():
            header.set(key, value)
        for tensor in file.tensors:
            header.add_tensor(tensor.plan.name, tensor.ggml_type, tensor.plan.ne)
        return header.header()
