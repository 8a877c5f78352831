"""Size the expert cache.

In: the settings, the model's sizes in bytes and what memory is left (``MemoryLimit``). Out: one ``Budget`` in bytes with the reason for it,
or a ``BudgetError`` that says what would work. Pure: reads no file, allocates nothing, knows no layout and no cache.
"""

from __future__ import annotations

from dataclasses import dataclass

from moetriage.config import StreamConfig
from moetriage.errors import BudgetError
from moetriage.stream.memory_limit import MemoryLimit
from moetriage.types import MIB

#: What the process takes beside the counted parts (interpreter, tokenizer, allocator slack, read buffers); "auto" leaves it free.
FLOOR_BYTES = 256 * MIB
#: On large machines the uncounted parts, and the other processes, grow along: "auto" leaves 1/20 (5 %) of the limit if that is more.
FLOOR_DIVISOR = 20


@dataclass(frozen=True)
class Budget:
    """How many bytes the expert cache may hold (0: no cache), what decided, and what the user should be told."""

    bytes: int
    source: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Needs:
    """The sizes that a budget is weighed against, in bytes."""

    expert_total: int
    working_set: int
    largest_layer: int
    dense: int
    kv: int
    compute: int

    def left_of(self, limit: MemoryLimit, *, spare: int = 0) -> int:
        """Return the largest budget that fits; it may be overrun by the layer being computed, unless it holds all experts."""
        room = limit.available_bytes - self.dense - self.kv - self.compute - spare
        return self.expert_total if room >= self.expert_total else max(0, room - self.largest_layer)

    def describe(self) -> str:
        return (
            f"dense weights {_mib_up(self.dense)}, KV cache {_mib_up(self.kv)}, compute buffers {_mib_up(self.compute)} "
            f"and one layer's experts {_mib_up(self.largest_layer)} MiB"
        )


def resolve_budget(
    config: StreamConfig,
    *,
    layout_expert_total: int,
    working_set_bytes: int,
    largest_layer_bytes: int,
    dense_bytes: int,
    kv_bytes: int,
    compute_bytes: int,
    limit: MemoryLimit,
) -> Budget:
    """Turn ``config.cache_mb`` into bytes that fit into memory and can hit.

    layout_expert_total: bytes of all routed experts; no budget exceeds it.
    working_set_bytes: T, what one token routes to over all layers. An LRU cache below T has evicted an expert before the next token can ask
        for it, so it hits exactly never: such a budget is refused unless ``config.force_cache``, and "auto" chooses 0 instead.
    largest_layer_bytes: what the experts of one layer's batch may take beyond the budget while the layer is computed; nothing is kept for
        it where all experts fit, since then there is nothing beyond the budget.
    dense_bytes, kv_bytes, compute_bytes: what will still be allocated beside the cache; what is already allocated must not be counted
        again, since ``limit`` no longer contains it.

    Returns a budget that is 0, or at least min(T, all experts) unless forced, and never more than ``limit`` leaves unless forced past the
    host's memory (never past a cgroup). Raises BudgetError for a fixed size that does not fit or cannot hit, and where "auto" finds no room
    although dropping or prefetch needs a cache.
    """
    # A cache that holds every expert always hits, whatever T is said to be.
    working_set = min(working_set_bytes, layout_expert_total)
    needs = _Needs(layout_expert_total, working_set, largest_layer_bytes, dense_bytes, kv_bytes, compute_bytes)
    if config.cache_mb == "auto":
        return _auto(config, needs, limit)
    if config.cache_mb == 0:
        return Budget(0, "--cache-mb 0")
    return _fixed(config, config.cache_mb, needs, limit)


def _fixed(config: StreamConfig, cache_mb: int, needs: _Needs, limit: MemoryLimit) -> Budget:
    notes: list[str] = []
    wanted = cache_mb * MIB
    if wanted > needs.expert_total:
        notes.append(f"--cache-mb {cache_mb} is more than all experts take: lowered to their {_mib_up(needs.expert_total)} MiB")
        wanted = needs.expert_total
    if wanted < needs.working_set and not config.force_cache:
        raise _below_working_set(cache_mb, wanted, needs, limit)
    if wanted < needs.working_set:
        notes.append(_never_hits(wanted, needs))
    if limit.hard is not None and wanted > needs.left_of(limit.hard):
        raise _does_not_fit(cache_mb, wanted, needs, limit.hard)
    if wanted > needs.left_of(limit):
        if not config.force_cache:
            raise _does_not_fit(cache_mb, wanted, needs, limit)
        left = _mib_down(needs.left_of(limit))
        notes.append(f"--cache-mb {cache_mb} is forced past the {left} MiB that {limit.source} leaves: the system may swap or kill")
    return Budget(wanted, f"--cache-mb {cache_mb}", tuple(notes))


def _auto(config: StreamConfig, needs: _Needs, limit: MemoryLimit) -> Budget:
    whole = limit.available_bytes if limit.limit_bytes is None else limit.limit_bytes
    floor = max(FLOOR_BYTES, whole // FLOOR_DIVISOR)
    size, source = needs.left_of(limit, spare=floor), f"auto: {limit.source}"
    if size == needs.expert_total:
        source = "auto: all experts fit"
    if config.cache_ceil_mb is not None and config.cache_ceil_mb * MIB < size:
        size, source = config.cache_ceil_mb * MIB, f"auto: --cache-ceil-mb {config.cache_ceil_mb}"
    if size >= needs.working_set:
        return Budget(size, source)
    if config.force_cache and size > 0:
        return Budget(size, source, (_never_hits(size, needs),))
    return _auto_off(config, size, source, floor, needs, limit)


def _auto_off(config: StreamConfig, size: int, source: str, floor: int, needs: _Needs, limit: MemoryLimit) -> Budget:
    reason = (
        f"no expert cache: {source} leaves {_mib_down(size)} MiB for it, below one token's working set of {_size(needs.working_set)}, "
        f"where it could never hit (available {_mib_down(limit.available_bytes)} MiB; needed beside it: {needs.describe()}; "
        f"kept free {_mib_up(floor)} MiB)"
    )
    # Without a cache every expert is a miss: dropping would be a plain weight cut, and there is nothing to read ahead into.
    for flag, is_set in (("--drop-cold-experts", config.drop is not None), ("--prefetch", config.prefetch > 0)):
        if is_set:
            message = f"{flag} needs an expert cache, but there is {reason}. Free memory, or leave {flag} out"
            raise BudgetError(message, budget_bytes=size, limit_bytes=needs.working_set)
    return Budget(0, source, (reason,))


def _below_working_set(cache_mb: int, wanted: int, needs: _Needs, limit: MemoryLimit) -> BudgetError:
    least, most = _mib_up(needs.working_set), _mib_down(needs.left_of(limit))
    step = f"Use 0, or at least {least} MiB"
    if most < least:
        step = f"Use 0: at least {least} MiB would be needed and {limit.source} leaves {most} MiB"
    return BudgetError(
        f"--cache-mb {cache_mb} is below one token's working set of {_size(needs.working_set)}: every read would miss. {step}",
        budget_bytes=wanted,
        limit_bytes=needs.working_set,
    )


def _does_not_fit(cache_mb: int, wanted: int, needs: _Needs, limit: MemoryLimit) -> BudgetError:
    most = needs.left_of(limit)
    whole = f"{_mib_down(limit.available_bytes)} MiB are available"
    if limit.limit_bytes is not None:
        whole = f"of the limit of {_mib_down(limit.limit_bytes)} MiB {whole}"
    step = f"Use at most {_mib_down(most)} MiB, or auto"
    if _mib_down(most) * MIB < needs.working_set:
        step = f"The {_mib_down(most)} MiB left are below one token's working set of {_mib_up(needs.working_set)} MiB: use 0"
    if limit.limit_bytes is None:
        step += ", or --force-cache to take it all the same"
    return BudgetError(
        f"--cache-mb {cache_mb} does not fit: {whole} ({limit.source}), and {needs.describe()} are needed beside it. {step}",
        budget_bytes=wanted,
        limit_bytes=most,
    )


def _never_hits(size: int, needs: _Needs) -> str:
    return f"the forced cache of {_mib_down(size)} MiB is below one token's working set of {_size(needs.working_set)}: it will never hit"


def _size(nbytes: int) -> str:
    return f"{nbytes} bytes ({_mib_up(nbytes)} MiB)"


# What is needed is rounded up and what there is rounded down, so that a number taken from a message always works.
def _mib_up(nbytes: int) -> int:
    return -(-nbytes // MIB)


def _mib_down(nbytes: int) -> int:
    return nbytes // MIB
