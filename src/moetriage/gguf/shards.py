"""Open the headers of all files of a model: one, or the shards of a split one.

In: the path of the model or of its first shard. Out: open headers in shard order, checked to belong together. It knows the ``split.*``
keys and the standard names ``PREFIX-00001-of-0000N.gguf``, nothing of what the tensors are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from moetriage.errors import ModelFileError
from moetriage.gguf.ggml_api import GgufType
from moetriage.gguf.header import GgufHeader, open_header, whole

KEY_NO = "split.no"
KEY_COUNT = "split.count"
KEY_TENSORS = "split.tensors.count"
#: llama.cpp reads the first two with a getter that aborts the process on any other type.
_KEY_TYPES = {KEY_NO: GgufType.UINT16, KEY_COUNT: GgufType.UINT16, KEY_TENSORS: GgufType.INT32}


def shard_name(prefix: str, number: int, count: int) -> str:
    """Return the standard file name of shard ``number`` (from 0) of ``count``."""
    return f"{prefix}-{number + 1:05d}-of-{count:05d}.gguf"


@contextmanager
def open_shards(path: Path) -> Iterator[list[GgufHeader]]:
    """Open all shards of the model at ``path``.

    Raises ModelFileError if ``path`` is not the first shard, or a shard is missing, misnumbered or of another model.
    """
    with ExitStack() as stack:
        first = stack.enter_context(open_header(path))
        count = _split_key(first, KEY_COUNT, default=1)
        if count <= 1:
            yield [first]
            return
        names = _shard_paths(first, count)
        shards = [first]
        for number in range(1, count):
            shards.append(stack.enter_context(open_header(names[number])))
            _check_same_split(shards[number], first, number, count)
        _check_tensor_count(shards)
        yield shards


def _split_key(shard: GgufHeader, key: str, *, default: int | None = None) -> int:
    if key not in shard.types:
        if default is not None:
            return default
        raise ModelFileError(str(shard.path), f"the key {key} is missing: it is no shard of a split model")
    if shard.types[key] != _KEY_TYPES[key]:
        raise ModelFileError(str(shard.path), f"the key {key} is {shard.types[key].name} and must be {_KEY_TYPES[key].name}")
    return whole(shard.scalars[key])


def _shard_paths(first: GgufHeader, count: int) -> list[Path]:
    """Return the paths of all shards after checking that ``first`` is the first one and is named as llama.cpp needs it."""
    number = _split_key(first, KEY_NO)
    ending = shard_name("", number, count)
    prefix = first.path.name.removesuffix(ending)
    if prefix in ("", first.path.name):
        raise ModelFileError(
            str(first.path), f"is shard {number + 1} of {count} and must be called PREFIX{ending}, or the others cannot be found"
        )
    paths = [first.path.with_name(shard_name(prefix, i, count)) for i in range(count)]
    if number != 0:
        raise ModelFileError(str(first.path), f"is shard {number + 1} of {count}; pass the first one, {paths[0].name}")
    for i, path in enumerate(paths):
        if not path.exists():
            raise ModelFileError(str(path), f"shard {i + 1} of {count} is missing; copy it beside the others")
    return paths


def _check_same_split(shard: GgufHeader, first: GgufHeader, number: int, count: int) -> None:
    held, total = _split_key(shard, KEY_NO), _split_key(shard, KEY_COUNT)
    if (held, total) != (number, count):
        raise ModelFileError(
            str(shard.path), f"holds shard {held + 1} of {total} but is named as shard {number + 1} of {count}; was a file renamed?"
        )
    for key in ("general.architecture", "general.name"):
        here, there = shard.scalars.get(key), first.scalars.get(key)
        if here is not None and here != there:
            raise ModelFileError(str(shard.path), f"is a shard of another model: {key} is {here!r}, in {first.path.name} {there!r}")


def _check_tensor_count(shards: list[GgufHeader]) -> None:
    claimed = _split_key(shards[0], KEY_TENSORS)
    found = sum(len(shard.tensors()) for shard in shards)
    if claimed != found:
        raise ModelFileError(
            str(shards[0].path),
            f"the shards hold {found} tensors and must hold {claimed}: one is of another model or an old copy",
        )
