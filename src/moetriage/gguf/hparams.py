"""The few numbers about a model that streaming needs, read from its metadata and checked.

In: the header of the first shard. Out: ``Hparams``. Besides what we need ourselves this checks what llama.cpp's loader asserts instead
of reporting (``load_hparams`` in llama-model.cpp, ``load`` in llama-vocab.cpp): an assertion there ends the whole Python process, so
such a file must be refused before the loader sees it. What the loader reports as an error is left to it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from moetriage.errors import ModelFileError
from moetriage.gguf.ggml_api import GgufType
from moetriage.gguf.header import GgufHeader, whole

#: LLAMA_MAX_LAYERS and LLAMA_MAX_EXPERTS of llama-hparams.h.
MAX_LAYERS = 512
MAX_EXPERTS = 1024
_ROPE_SCALING_TYPES = ("none", "linear", "yarn", "longrope")
#: Last value of llama_expert_gating_func_type.
_MAX_GATING_FUNC = 4
#: Far above any model, far below where sizes computed from them overflow.
_MAX_HEADS = 4096
_MAX_HEAD_SIZE = 65536
_MAX_WINDOW = 2**24


@dataclass(frozen=True, kw_only=True)
class Hparams:
    """Checked metadata; ``n_block`` counts all blocks in the file, ``n_layer`` those that are computed."""

    arch: str
    name: str
    n_block: int
    n_layer: int
    n_expert: int
    top_k: int
    n_ctx_train: int
    n_embd: int
    n_vocab: int
    n_head_kv: tuple[int, ...]
    metadata: dict[str, object]
    arrays: dict[str, tuple[object, ...]]


class _Keys:
    """Typed access to the ``ARCH.*`` keys of one header; every refusal names file, key and value."""

    def __init__(self, header: GgufHeader) -> None:
        self.header = header
        self.arch = self._architecture()

    def _architecture(self) -> str:
        arch = self.header.scalars.get("general.architecture")
        if not isinstance(arch, str) or not arch:
            raise self.error("the key general.architecture is missing; the file holds no model")
        return arch

    def error(self, reason: str) -> ModelFileError:
        return ModelFileError(str(self.header.path), reason)

    def has(self, suffix: str) -> bool:
        """Tell whether the file holds the key."""
        return f"{self.arch}.{suffix}" in self.header.types

    def number(self, suffix: str, *, default: int | None = None, low: int = 0, high: int = 2**31 - 1) -> int:
        """Return a uint32 key; raises ModelFileError if it is missing without a default, of another type or out of range."""
        key = f"{self.arch}.{suffix}"
        if key not in self.header.types:
            if default is None:
                raise self.error(f"the key {key} is missing; convert the model again")
            return default
        if self.header.types[key] != GgufType.UINT32:
            raise self.error(f"the key {key} is of type {self.header.types[key].name}, must be UINT32")
        value = whole(self.header.scalars[key])
        if not low <= value <= high:
            raise self.error(f"the key {key} is {value}, must be between {low} and {high}")
        return value

    def per_block(self, suffix: str, n_block: int, *, default: tuple[int, ...] | int | None = None) -> tuple[int, ...]:
        """Return a key that holds one number for all blocks or an array with one for each."""
        key = f"{self.arch}.{suffix}"
        if self.header.types.get(key) != GgufType.ARRAY:
            if isinstance(default, tuple) and key not in self.header.types:
                return default
            return (self.number(suffix, default=default if isinstance(default, int) else None),) * n_block
        values = self.header.arrays.get(key, ())
        if len(values) != n_block or not all(type(v) is int and 0 <= v < 2**31 for v in values):
            raise self.error(f"the key {key} must hold {n_block} numbers, one per block")
        return tuple(whole(v) for v in values)


def read_hparams(header: GgufHeader) -> Hparams:
    """Read and check the metadata of a model; raises ModelFileError naming the key and its value."""
    keys = _Keys(header)
    n_block = keys.number("block_count", low=1, high=MAX_LAYERS)
    n_mtp = keys.number("nextn_predict_layers", default=0, high=n_block - 1)
    n_expert, top_k = _experts(keys, n_block)
    n_head = keys.per_block("attention.head_count", n_block, default=0)
    n_head_kv = keys.per_block("attention.head_count_kv", n_block, default=n_head)
    if max(*n_head, *n_head_kv) > _MAX_HEADS:
        raise keys.error(f"{max(*n_head, *n_head_kv)} attention heads are more than the {_MAX_HEADS} of any model; the file is damaged")
    _check_attention(keys, n_block)
    _check_rope(keys)
    _check_latent_rope(keys, n_head[0])
    return Hparams(
        arch=keys.arch,
        name=str(header.scalars.get("general.name", "")),
        n_block=n_block,
        n_layer=n_block - n_mtp,
        n_expert=n_expert,
        top_k=top_k,
        n_ctx_train=keys.number("context_length"),
        n_embd=keys.number("embedding_length", low=1),
        n_vocab=_check_vocabulary(keys),
        n_head_kv=n_head_kv[: n_block - n_mtp],
        metadata=header.scalars,
        arrays=header.arrays,
    )


def _experts(keys: _Keys, n_block: int) -> tuple[int, int]:
    n_expert = keys.number("expert_count", default=0, high=MAX_EXPERTS)
    top_k = max(keys.per_block("expert_used_count", n_block, default=0))
    keys.number("expert_gating_func", default=0, high=_MAX_GATING_FUNC)
    groups = keys.number("expert_group_count", default=0)
    groups_used = keys.number("expert_group_used_count", default=0)
    if n_expert and not 1 <= top_k <= n_expert:
        raise keys.error(f"the key {keys.arch}.expert_used_count is {top_k}, must be between 1 and the {n_expert} experts")
    if not n_expert and (top_k or groups):
        raise keys.error(f"{keys.arch}.expert_used_count is {top_k} and expert_group_count {groups}, but the model has no experts")
    if n_expert and (groups >= n_expert or (groups > 1 and (n_expert % groups or not 0 < groups_used < groups))):
        raise keys.error(f"{n_expert} experts in {groups} groups of which {groups_used} are used cannot be routed")
    return n_expert, top_k


def _check_attention(keys: _Keys, n_block: int) -> None:
    for name in ("layer_norm_rms_epsilon", "layer_norm_epsilon"):
        epsilon = keys.header.scalars.get(f"{keys.arch}.attention.{name}", 0.0)
        if not isinstance(epsilon, float) or not 0 <= epsilon < 1:
            raise keys.error(f"the key {keys.arch}.attention.{name} is {epsilon!r}, must be between 0 and 1")
    shared = keys.number("attention.shared_kv_layers", default=0)
    if shared and shared > n_block - 2:
        raise keys.error(f"the key {keys.arch}.attention.shared_kv_layers is {shared}, must leave 2 of the {n_block} layers their own")
    if keys.header.types.get(f"{keys.arch}.attention.sliding_window") != GgufType.ARRAY:
        keys.number("attention.sliding_window", default=0, high=_MAX_WINDOW)


def _check_rope(keys: _Keys) -> None:
    scaling = keys.header.scalars.get(f"{keys.arch}.rope.scaling.type", "linear")
    if scaling not in _ROPE_SCALING_TYPES:
        raise keys.error(f"the key {keys.arch}.rope.scaling.type is {scaling!r}, must be one of {', '.join(_ROPE_SCALING_TYPES)}")
    for rotated, head in (("rope.dimension_count", "key_length"), ("rope.dimension_count_swa", "key_length_swa")):
        if keys.header.types.get(f"{keys.arch}.{rotated}") == GgufType.ARRAY:
            continue
        n_rotated = keys.number(rotated, default=0)
        size = keys.number(f"attention.{head}", default=_MAX_HEAD_SIZE, low=1, high=_MAX_HEAD_SIZE)
        if n_rotated % 2 or n_rotated > size:
            raise keys.error(f"the key {keys.arch}.{rotated} is {n_rotated}, must be even and fit into a head of {size}")


def _check_latent_rope(keys: _Keys, n_head: int) -> None:
    """Latent attention splits a head into a plain and a rotated part, neither of them empty; left out, all of the key is rotated."""
    if not keys.has("attention.kv_lora_rank") and not keys.has("attention.key_length_mla"):
        return
    n_rotated = keys.number("rope.dimension_count", low=1)
    # Files from before key_length_mla have a head's size in key_length, those since then the size of what is cached.
    named = [name for name in ("attention.key_length", "attention.key_length_mla") if keys.has(name)]
    size = min(map(keys.number, named), default=keys.number("embedding_length", low=1) // max(n_head, 1))
    if n_rotated >= size:
        raise keys.error(f"the key {keys.arch}.rope.dimension_count is {n_rotated}, must leave a part of a latent head of {size}")


def _check_vocabulary(keys: _Keys) -> int:
    """Return the number of tokens; llama.cpp asserts that no two have the same text (empty ones it renames)."""
    tokens = keys.header.strings("tokenizer.ggml.tokens") or []
    text, times = Counter(filter(None, tokens)).most_common(1)[0] if any(tokens) else (b"", 0)
    if times > 1:
        raise keys.error(f"the vocabulary holds the token {text.decode('utf-8', 'replace')!r} {times} times; convert the model again")
    return len(tokens)
