"""What a model asks of memory and disk, before it is loaded.

In: the path of a model, and what the caller measured of its disk. Out: an ``Inspection``. It reads headers only, measures nothing and
does not know how much memory there is; what cache that memory allows is for ``stream.budget`` to say.
"""

from __future__ import annotations

import dataclasses
import math
import re
from dataclasses import dataclass
from pathlib import Path

from moetriage.errors import UsageError
from moetriage.gguf.ggml_api import type_names
from moetriage.gguf.kv_cache import kv_cache_bytes
from moetriage.gguf.layout import ModelLayout, read_layout
from moetriage.types import MIB

DEFAULT_HIT_FRACTIONS = (0.0, 0.5, 0.75, 0.9)
#: Context that the KV cache is sized for unless the caller says otherwise (or the model was trained on less).
DEFAULT_N_CTX = 4096
_SHARED_FFN = re.compile(r"blk\.(\d+)\.ffn_(?:up|gate_up)(?:_shexp)?\.weight")


@dataclass(frozen=True, kw_only=True)
class Floor:
    """The least seconds that reading experts costs a token when ``hit_fraction`` of its expert bytes are cached."""

    hit_fraction: float
    seconds_per_token: float


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """A model in numbers. Sizes in bytes unless the name says MiB; ``expert_types`` are the tensor types that experts are stored in.

    working_set_bytes: T, the expert bytes one token uses; smallest_cache_mib: T in whole MiB, below which an LRU cache never hits;
    kv_bytes: KV cache of ``n_ctx`` tokens in f16; n_expert_shared: experts every token uses, counted as dense; floors: empty without
    ``disk_mb_s``, which is in 10^6 bytes a second.
    """

    paths: tuple[str, ...]
    file_bytes: int
    arch: str
    name: str
    n_layer: int
    n_moe_layer: int
    n_expert: int
    n_expert_shared: int
    top_k: int
    n_embd: int
    n_vocab: int
    n_ctx_train: int
    expert_types: tuple[str, ...]
    expert_bytes_min: int
    expert_bytes_max: int
    expert_total_bytes: int
    dense_total_bytes: int
    working_set_bytes: int
    smallest_cache_mib: int
    n_ctx: int
    kv_bytes: int
    disk_mb_s: float | None
    floors: tuple[Floor, ...]

    def as_dict(self) -> dict[str, object]:
        """Return the fields as JSON-ready values."""
        return dataclasses.asdict(self)


def inspect_model(
    path: str | Path, *, hit_fraction: float | None = None, disk_mb_s: float | None = None, n_ctx: int | None = None
) -> Inspection:
    """Describe the model at ``path`` (the first shard of a split one).

    hit_fraction: the one to compute the floor for, 0 to 1 (default: several); disk_mb_s: random read rate in 10^6 bytes a second;
    n_ctx: context length for ``kv_bytes``. Raises UsageError for a value out of range, ModelFileError and NotMoeError for the file.
    """
    if hit_fraction is not None and not 0 <= hit_fraction <= 1:
        raise UsageError(f"hit fraction {hit_fraction}: must be between 0 and 1")
    if disk_mb_s is not None and not (disk_mb_s > 0 and math.isfinite(disk_mb_s)):
        raise UsageError(f"--disk-mb-s {disk_mb_s}: must be above 0 (10^6 bytes a second)")
    if n_ctx is not None and n_ctx < 1:
        raise UsageError(f"context of {n_ctx} tokens: must be at least 1")
    layout = read_layout(path)
    n_ctx = n_ctx or min(DEFAULT_N_CTX, layout.n_ctx_train) or DEFAULT_N_CTX
    per_layer = [layout.expert_bytes(layer) for layer in layout.moe_layers]
    working_set = layout.working_set_bytes()
    fractions = DEFAULT_HIT_FRACTIONS if hit_fraction is None else (hit_fraction,)
    return Inspection(
        paths=tuple(str(p) for p in layout.paths),
        file_bytes=sum(layout.sizes),
        arch=layout.arch,
        name=layout.name,
        n_layer=layout.n_layer,
        n_moe_layer=len(per_layer),
        n_expert=layout.n_expert,
        n_expert_shared=_n_shared(layout),
        top_k=layout.top_k,
        n_embd=layout.n_embd,
        n_vocab=layout.n_vocab,
        n_ctx_train=layout.n_ctx_train,
        expert_types=tuple(sorted({type_names()[e.span.ggml_type] for e in layout.experts})),
        expert_bytes_min=min(per_layer),
        expert_bytes_max=max(per_layer),
        expert_total_bytes=layout.expert_total_bytes,
        dense_total_bytes=layout.dense_total_bytes,
        working_set_bytes=working_set,
        smallest_cache_mib=-(-working_set // MIB),
        n_ctx=n_ctx,
        kv_bytes=kv_cache_bytes(layout, n_ctx),
        disk_mb_s=disk_mb_s,
        floors=() if disk_mb_s is None else tuple(_floor(working_set, h, disk_mb_s) for h in fractions),
    )


def _floor(working_set_bytes: int, hit_fraction: float, disk_mb_s: float) -> Floor:
    seconds = (1 - hit_fraction) * working_set_bytes / (disk_mb_s * 1e6)
    return Floor(hit_fraction=hit_fraction, seconds_per_token=seconds)


def _n_shared(layout: ModelLayout) -> int:
    """Return the model's count of shared experts; where no key says, a dense FFN inside a layer of experts is one."""
    count = layout.metadata.get(f"{layout.arch}.expert_shared_count")
    if type(count) is int:
        return count
    moe_layers = set(layout.moe_layers)
    matches = (_SHARED_FFN.fullmatch(span.name) for span in layout.dense)
    return int(any(match and int(match[1]) in moe_layers for match in matches))
