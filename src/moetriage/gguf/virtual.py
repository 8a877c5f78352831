"""One GGUF image of a model, as llama.cpp's loader is to see it, described without copying any tensor data.

In: a ``ModelLayout``. Out: a ``VirtualFile``: header bytes and where each tensor's bytes come from. A single file is its own image; the
shards of a split model get a merged header in which every tensor has a new aligned place. Who serves the image to the loader, and which
of its segments are ever read, is not decided here.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from moetriage.errors import ModelFileError
from moetriage.gguf.header import open_header
from moetriage.gguf.layout import ModelLayout, TensorSpan
from moetriage.gguf.shards import KEY_COUNT, KEY_NO, KEY_TENSORS
from moetriage.gguf.writer import HeaderWriter, aligned

#: The image is one file and has the default alignment, which the writer cannot change.
_DROPPED_KEYS = (KEY_NO, KEY_COUNT, KEY_TENSORS, "general.alignment")


@dataclass(frozen=True)
class Segment:
    """One tensor: ``nbytes`` at ``virtual_offset`` of the image are those at ``offset`` of shard ``shard``.

    streamed: the tensor holds experts, or belongs to a block that is never computed; loading must not read it.
    """

    virtual_offset: int
    nbytes: int
    shard: int
    offset: int
    streamed: bool


@dataclass(frozen=True)
class VirtualFile:
    """``size`` bytes that start with ``header``; ``segments`` are in order and do not overlap, bytes outside of them are zero."""

    header: bytes
    size: int
    segments: tuple[Segment, ...]


def virtual_file(layout: ModelLayout) -> VirtualFile:
    """Describe the image of a model; raises ModelFileError if a file has gone or changed since the layout was read."""
    spans = sorted((*(e.span for e in layout.experts), *layout.dense, *layout.unused), key=lambda span: (span.shard, span.offset))
    resident = {span.name for span in layout.dense}
    if len(layout.paths) == 1:
        header, places = _own_header(layout.paths[0], spans[0].offset), [span.offset for span in spans]
    else:
        header, places = _merged_header(layout.paths[0], spans)
    segments = tuple(
        Segment(place, span.nbytes, span.shard, span.offset, span.name not in resident) for place, span in zip(places, spans, strict=True)
    )
    end = segments[-1].virtual_offset + segments[-1].nbytes
    return VirtualFile(header, layout.sizes[0] if len(layout.paths) == 1 else aligned(end), segments)


def _own_header(path: Path, nbytes: int) -> bytes:
    try:
        with path.open("rb") as file:
            header = file.read(nbytes)
    except OSError as error:
        raise ModelFileError(str(path), f"cannot be read: {error.strerror}") from error
    if len(header) < nbytes:
        raise ModelFileError(str(path), "has become shorter since it was opened; copy it again", offset=len(header))
    return header


def _merged_header(first: Path, spans: list[TensorSpan]) -> tuple[bytes, list[int]]:
    """Return a header with all keys of the first shard and all tensors, and the place of each tensor in the image."""
    with open_header(first) as shard, HeaderWriter(len(spans)) as merged:
        merged.copy_keys(shard.context)
        merged.remove(_DROPPED_KEYS)
        offsets = [merged.add_tensor(span.name, span.ggml_type, span.ne) for span in spans]
        header = merged.header()
    return header, [len(header) + offset for offset in offsets]
