"""Where every expert of a model lies: (layer, expert, projection) -> (shard, byte offset, size).

In: the path of a GGUF file, or of the first shard of a split one. Out: a ``ModelLayout``, checked so far that whoever reads by it needs
no further checks and that llama.cpp's loader does not abort the process on what it holds (see ``hparams``). It reads headers only, never
tensor data, and knows nothing of caches, graphs or the loader's parameters.

What an expert tensor is follows from its shape alone: three-dimensional with one matrix per expert, in ``blk.N.``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from moetriage.errors import ModelFileError, NotMoeError
from moetriage.gguf.ggml_api import NOT_WEIGHTS, block_elements, type_names
from moetriage.gguf.header import GgufHeader, TensorInfo, whole
from moetriage.gguf.hparams import Hparams, read_hparams
from moetriage.gguf.shards import open_shards

_BLOCK = re.compile(r"blk\.(\d+)\.(.+)")
#: "ffn_gate_up_exps.weight" -> "gate_up"; a name of another form keeps its whole middle.
_PROJECTION = re.compile(r"(?:ffn_)?(.+?)(?:_exps)?(?:\.weight)?")
#: "blk.0.ffn_gate.7.weight": one tensor per expert, as converters wrote Mixtral before 2024.
_ONE_TENSOR_PER_EXPERT = re.compile(r"blk\.\d+\.ffn_(gate|up|down)\.\d+\.weight")


@dataclass(frozen=True)
class TensorSpan:
    """One tensor's bytes: ``nbytes`` from absolute byte ``offset`` of shard ``shard``; ``ne`` always has four dimensions."""

    name: str
    shard: int
    offset: int
    nbytes: int
    ggml_type: int
    ne: tuple[int, ...]


@dataclass(frozen=True)
class ExpertTensor:
    """All experts of one projection of one layer; expert ``e`` is ``expert_bytes`` from ``span.offset + e * expert_bytes``."""

    span: TensorSpan
    layer: int
    projection: str
    n_expert: int

    @property
    def expert_bytes(self) -> int:
        return self.span.nbytes // self.n_expert


@dataclass(frozen=True)
class ModelLayout:
    """What a model file holds and where.

    paths, sizes: the shards and their sizes in bytes; n_layer: layers that are computed (multi-token-prediction blocks are not);
    top_k: experts a token uses, the largest over the layers; n_head_kv: key/value heads per computed layer; metadata: every key that is
    no array; layer_arrays: every short numeric array, usually one value per block; experts: by layer, then file order;
    dense: everything else that is loaded; unused: tensors of blocks beyond ``n_layer``.
    """

    paths: tuple[Path, ...]
    sizes: tuple[int, ...]
    arch: str
    name: str
    n_layer: int
    n_expert: int
    top_k: int
    n_ctx_train: int
    n_embd: int
    n_vocab: int
    n_head_kv: tuple[int, ...]
    metadata: dict[str, object] = field(repr=False)
    layer_arrays: dict[str, tuple[object, ...]] = field(repr=False)
    experts: tuple[ExpertTensor, ...] = field(repr=False)
    dense: tuple[TensorSpan, ...] = field(repr=False)
    unused: tuple[TensorSpan, ...] = field(repr=False)

    @property
    def moe_layers(self) -> tuple[int, ...]:
        return tuple(sorted({e.layer for e in self.experts}))

    @property
    def expert_total_bytes(self) -> int:
        return sum(e.span.nbytes for e in self.experts)

    @property
    def dense_total_bytes(self) -> int:
        return sum(span.nbytes for span in self.dense)

    def expert_bytes(self, layer: int) -> int:
        """Return the bytes of one expert of ``layer``, all projections together; 0 for a layer without experts."""
        return sum(e.expert_bytes for e in self.experts if e.layer == layer)

    def layer_top_k(self, layer: int) -> int:
        """Return how many experts a token uses in ``layer``; few models differ between layers."""
        per_layer = self.layer_arrays.get(f"{self.arch}.expert_used_count")
        return self.top_k if per_layer is None else whole(per_layer[layer])

    def working_set_bytes(self, top_k: int | None = None) -> int:
        """Return T, the expert bytes that one token uses; ``top_k`` replaces the model's own width in every layer.

        Under LRU a cache below T can never hit: by the time a layer comes round again, its experts have been evicted.
        """
        return sum((self.layer_top_k(layer) if top_k is None else top_k) * self.expert_bytes(layer) for layer in self.moe_layers)


def read_layout(path: str | Path) -> ModelLayout:
    """Read the layout of a model file; for a split model pass the first shard, the others are found beside it.

    Raises ModelFileError (file, tensor and byte where known) for anything that cannot be loaded or streamed, NotMoeError for a valid
    file without routed experts. Reads headers only: about 0.2 s for a model with a vocabulary of 150,000 tokens.
    """
    with open_shards(Path(path)) as shards:
        hparams = read_hparams(shards[0])
        spans = list(_spans(shards))
    first = str(shards[0].path)
    experts, dense, unused = _classify(first, spans, hparams)
    if not experts:
        raise NotMoeError(first, _why_no_experts(hparams, spans))
    return ModelLayout(
        paths=tuple(shard.path for shard in shards),
        sizes=tuple(shard.size for shard in shards),
        arch=hparams.arch,
        name=hparams.name,
        n_layer=hparams.n_layer,
        n_expert=hparams.n_expert,
        top_k=hparams.top_k,
        n_ctx_train=hparams.n_ctx_train,
        n_embd=hparams.n_embd,
        n_vocab=hparams.n_vocab,
        n_head_kv=hparams.n_head_kv,
        metadata=hparams.metadata,
        layer_arrays=hparams.arrays,
        experts=tuple(sorted(experts, key=lambda e: e.layer)),
        dense=tuple(dense),
        unused=tuple(unused),
    )


def _spans(shards: list[GgufHeader]) -> Iterator[TensorSpan]:
    """Yield every tensor of every shard, each checked to lie within its file."""
    owner: dict[str, GgufHeader] = {}
    for number, shard in enumerate(shards):
        for tensor in shard.tensors():
            if tensor.name in owner:
                other = owner[tensor.name].path
                raise ModelFileError(str(shard.path), f"tensor {tensor.name!r} is also in {other}: one of the two belongs to another model")
            owner[tensor.name] = shard
            _check_range(shard, tensor)
            _check_type(shard, tensor)
            yield TensorSpan(tensor.name, number, tensor.offset, tensor.nbytes, tensor.ggml_type, tensor.ne)


def _check_range(shard: GgufHeader, tensor: TensorInfo) -> None:
    if 0 in tensor.ne:
        raise ModelFileError(str(shard.path), f"tensor {tensor.name!r} has a dimension of zero: {tensor.ne}; the file is damaged")
    end = tensor.offset + tensor.nbytes
    if end > shard.size:
        raise ModelFileError(
            str(shard.path),
            f"tensor {tensor.name!r} ends at byte {end} but the file has {shard.size} bytes: it is truncated, copy it again",
            offset=tensor.offset,
        )


def _check_type(shard: GgufHeader, tensor: TensorInfo) -> None:
    """Refuse types that abort llama.cpp's compute functions: they take vectors and biases as plain floats only."""
    name = type_names()[tensor.ggml_type]
    is_vector = tensor.ne[1] == 1 or tensor.name.endswith(".bias")
    if name in NOT_WEIGHTS - {"i32"} or (is_vector and block_elements(tensor.ggml_type) > 1):
        raise ModelFileError(
            str(shard.path),
            f"tensor {tensor.name!r} is stored as {name}, which no model has there; the file is damaged",
            offset=tensor.offset,
        )


def _classify(path: str, spans: list[TensorSpan], hparams: Hparams) -> tuple[list[ExpertTensor], list[TensorSpan], list[TensorSpan]]:
    experts: list[ExpertTensor] = []
    dense: list[TensorSpan] = []
    unused: list[TensorSpan] = []
    for span in spans:
        block = _BLOCK.match(span.name)
        layer = int(block[1]) if block else -1
        if layer >= hparams.n_block:
            raise ModelFileError(
                path, f"tensor {span.name!r} is of block {layer}, but the model has {hparams.n_block} blocks", offset=span.offset
            )
        if layer >= hparams.n_layer:
            unused.append(span)
        elif block and _is_expert(span, block[2], hparams.n_expert):
            experts.append(ExpertTensor(span, layer, _projection(block[2]), hparams.n_expert))
        else:
            dense.append(span)
    return experts, dense, unused


def _is_expert(span: TensorSpan, middle: str, n_expert: int) -> bool:
    # Latent attention keeps one matrix per head in a 3-D tensor, and a model may have as many heads as experts.
    return n_expert > 1 and span.ne[2] == n_expert and span.ne[1] > 1 and span.ne[3] == 1 and not middle.startswith("attn_")


def _projection(middle: str) -> str:
    match = _PROJECTION.fullmatch(middle)
    return match[1] if match else middle


def _why_no_experts(hparams: Hparams, spans: list[TensorSpan]) -> str:
    if any(_ONE_TENSOR_PER_EXPERT.fullmatch(span.name) for span in spans):
        return "has one tensor per expert, an old layout that llama.cpp no longer loads; convert the model again"
    if hparams.n_expert > 1:
        return f"claims {hparams.n_expert} experts but has no tensor with one matrix for each of them"
    return f"is not a Mixture-of-Experts model ({hparams.arch} with no experts): there is nothing to stream; run it with llama.cpp itself"
