"""Cache sizing: pinned sizes and messages, and two properties that hold for every input."""

from __future__ import annotations

import re
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moetriage.config import DropConfig, StreamConfig
from moetriage.errors import BudgetError
from moetriage.stream.budget import FLOOR_BYTES, Budget, resolve_budget
from moetriage.stream.memory_limit import MemoryLimit
from moetriage.types import MIB

CGROUP_8G = MemoryLimit(8000 * MIB, "/sys/fs/cgroup/memory.max", 8192 * MIB)
HOST_8G = MemoryLimit(8000 * MIB, "/proc/meminfo MemAvailable", None)


def resolve(config: StreamConfig, limit: MemoryLimit = CGROUP_8G, **sizes: int) -> Budget:
    """A model of 16 GiB of experts with T = 1000 MiB and 1000 MiB (dense 500, KV 200, compute 100, layer 200) beside the cache."""
    defaults = {
        "layout_expert_total": 16384 * MIB,
        "working_set_bytes": 1000 * MIB,
        "largest_layer_bytes": 200 * MIB,
        "dense_bytes": 500 * MIB,
        "kv_bytes": 200 * MIB,
        "compute_bytes": 100 * MIB,
    }
    return resolve_budget(config, limit=limit, **(defaults | sizes))


def test_zero_turns_the_cache_off() -> None:
    assert resolve(StreamConfig(cache_mb=0)) == Budget(0, "--cache-mb 0")


def test_a_fixed_size_that_fits_is_taken_exactly() -> None:
    assert resolve(StreamConfig(cache_mb=4000)) == Budget(4000 * MIB, "--cache-mb 4000")


def test_a_fixed_size_may_use_all_that_is_left_but_not_one_mib_more() -> None:
    assert resolve(StreamConfig(cache_mb=7000)).bytes == 7000 * MIB
    with pytest.raises(BudgetError) as error:
        resolve(StreamConfig(cache_mb=7001))
    assert error.value.budget_bytes == 7001 * MIB
    assert error.value.limit_bytes == 7000 * MIB


def test_a_size_above_the_cgroup_names_limit_needs_and_the_largest_that_fits() -> None:
    with pytest.raises(BudgetError) as error:
        resolve(StreamConfig(cache_mb=9000))
    assert str(error.value) == (
        "--cache-mb 9000 does not fit: of the limit of 8192 MiB 8000 MiB are available (/sys/fs/cgroup/memory.max), and dense weights 500, "
        "KV cache 200, compute buffers 100 and one layer's experts 200 MiB are needed beside it. Use at most 7000 MiB, or auto"
    )


def test_forcing_does_not_cross_a_cgroup_limit() -> None:
    with pytest.raises(BudgetError, match="does not fit"):
        resolve(StreamConfig(cache_mb=9000, force_cache=True))


def test_forcing_does_not_cross_a_cgroup_limit_that_is_looser_than_the_host() -> None:
    limit = MemoryLimit(3000 * MIB, "/proc/meminfo MemAvailable", None, cgroup=CGROUP_8G)
    assert resolve(StreamConfig(cache_mb=6000, force_cache=True), limit).bytes == 6000 * MIB
    with pytest.raises(BudgetError, match=r"memory\.max"):
        resolve(StreamConfig(cache_mb=7001, force_cache=True), limit)


def test_the_host_s_memory_refuses_until_forced() -> None:
    with pytest.raises(BudgetError, match="Use at most 7000 MiB, or auto, or --force-cache"):
        resolve(StreamConfig(cache_mb=9000), HOST_8G)
    forced = resolve(StreamConfig(cache_mb=9000, force_cache=True), HOST_8G)
    assert forced.bytes == 9000 * MIB
    assert "forced past the 7000 MiB" in forced.notes[0]


def test_below_the_working_set_is_refused_with_t_and_the_next_step() -> None:
    with pytest.raises(BudgetError) as error:
        resolve(StreamConfig(cache_mb=64), working_set_bytes=212 * MIB + 1)
    assert str(error.value) == (
        "--cache-mb 64 is below one token's working set of 222298113 bytes (213 MiB): every read would miss. Use 0, or at least 213 MiB"
    )
    assert error.value.limit_bytes == 212 * MIB + 1
    assert resolve(StreamConfig(cache_mb=213), working_set_bytes=212 * MIB + 1).bytes == 213 * MIB


def test_a_working_set_that_cannot_fit_is_not_proposed() -> None:
    with pytest.raises(BudgetError, match=r"Use 0: at least 7500 MiB would be needed and .* leaves 7000 MiB"):
        resolve(StreamConfig(cache_mb=64), working_set_bytes=7500 * MIB)
    with pytest.raises(BudgetError, match="The 7000 MiB left are below one token's working set of 7500 MiB: use 0"):
        resolve(StreamConfig(cache_mb=8000), working_set_bytes=7500 * MIB)


def test_a_forced_size_below_the_working_set_is_taken_with_a_note() -> None:
    budget = resolve(StreamConfig(cache_mb=64, force_cache=True))
    assert budget.bytes == 64 * MIB
    assert "never hit" in budget.notes[0]


def test_more_than_all_experts_is_lowered_to_them_with_a_note() -> None:
    budget = resolve(StreamConfig(cache_mb=5000), layout_expert_total=2000 * MIB)
    assert budget.bytes == 2000 * MIB
    assert "lowered to their 2000 MiB" in budget.notes[0]


def test_auto_leaves_the_floor_and_everything_else_that_is_needed() -> None:
    five_percent = 8192 * MIB // 20
    assert resolve(StreamConfig()) == Budget(7000 * MIB - five_percent, "auto: /sys/fs/cgroup/memory.max")


def test_auto_leaves_at_least_the_fixed_floor_on_a_small_limit() -> None:
    limit = MemoryLimit(3000 * MIB, "/sys/fs/cgroup/memory.max", 3000 * MIB)
    assert resolve(StreamConfig(), limit).bytes == 2000 * MIB - FLOOR_BYTES


def test_auto_takes_no_more_than_the_experts_or_the_ceiling() -> None:
    assert resolve(StreamConfig(), layout_expert_total=2000 * MIB) == Budget(2000 * MIB, "auto: all experts fit")
    assert resolve(StreamConfig(cache_ceil_mb=1500)) == Budget(1500 * MIB, "auto: --cache-ceil-mb 1500")


def test_a_cache_of_all_experts_needs_no_room_for_a_layer_beside_it() -> None:
    exact = MemoryLimit(2800 * MIB, "/sys/fs/cgroup/memory.max", 2800 * MIB)
    assert resolve(StreamConfig(cache_mb=2000), exact, layout_expert_total=2000 * MIB).bytes == 2000 * MIB
    with pytest.raises(BudgetError, match="Use at most 1800 MiB"):
        resolve(StreamConfig(cache_mb=2000), exact, layout_expert_total=2001 * MIB)
    with_floor = MemoryLimit(2800 * MIB + FLOOR_BYTES, "/sys/fs/cgroup/memory.max", 2800 * MIB + FLOOR_BYTES)
    assert resolve(StreamConfig(), with_floor, layout_expert_total=2000 * MIB) == Budget(2000 * MIB, "auto: all experts fit")
    assert resolve(StreamConfig(), with_floor, layout_expert_total=2001 * MIB).bytes == 1800 * MIB


def test_auto_below_the_working_set_turns_the_cache_off_and_says_so() -> None:
    budget = resolve(StreamConfig(), working_set_bytes=7000 * MIB)
    assert budget.bytes == 0
    assert "could never hit" in budget.notes[0]
    assert "available 8000 MiB" in budget.notes[0]


def test_a_ceiling_below_the_working_set_is_named_as_the_reason() -> None:
    budget = resolve(StreamConfig(cache_ceil_mb=500))
    assert budget.bytes == 0
    assert "--cache-ceil-mb 500 leaves 500 MiB" in budget.notes[0]


def test_auto_below_the_working_set_is_kept_when_forced() -> None:
    budget = resolve(StreamConfig(cache_ceil_mb=500, force_cache=True))
    assert budget.bytes == 500 * MIB
    assert "never hit" in budget.notes[0]


@pytest.mark.parametrize(
    ("config", "flag"), [(StreamConfig(drop=DropConfig(threshold=0.5)), "--drop-cold-experts"), (StreamConfig(prefetch=1), "--prefetch")]
)
def test_auto_without_room_refuses_what_needs_a_cache(config: StreamConfig, flag: str) -> None:
    with pytest.raises(BudgetError, match=f"{flag} needs an expert cache"):
        resolve(config, working_set_bytes=7000 * MIB)


def test_no_memory_at_all_gives_no_cache_instead_of_a_negative_one() -> None:
    assert resolve(StreamConfig(), MemoryLimit(0, "nothing", None)).bytes == 0
    assert resolve(StreamConfig(force_cache=True), MemoryLimit(0, "nothing", None)).bytes == 0


sizes = st.integers(0, 40_000 * MIB)


@st.composite
def limits(draw: st.DrawFn) -> MemoryLimit:
    available = draw(sizes)
    if draw(st.booleans()):
        return MemoryLimit(available, "cgroup", available + draw(sizes))
    looser = available + draw(sizes)
    cgroup = MemoryLimit(looser, "cgroup", looser + draw(sizes)) if draw(st.booleans()) else None
    return MemoryLimit(available, "host", None, cgroup=cgroup)


@given(
    cache_mb=st.one_of(st.just("auto"), st.integers(0, 50_000)),
    ceil_mb=st.one_of(st.none(), st.integers(1, 50_000)),
    force=st.booleans(),
    limit=limits(),
    expert_total=sizes,
    working_set=sizes,
    layer=sizes,
    dense=sizes,
    kv=st.integers(0, 4000 * MIB),
    compute=st.integers(0, 1000 * MIB),
)
def test_a_budget_fits_and_is_never_between_zero_and_the_working_set_and_a_refusal_proposes_one_that_works(
    cache_mb: int | Literal["auto"],
    ceil_mb: int | None,
    force: bool,
    limit: MemoryLimit,
    expert_total: int,
    working_set: int,
    layer: int,
    dense: int,
    kv: int,
    compute: int,
) -> None:
    config = StreamConfig(cache_mb=cache_mb, cache_ceil_mb=ceil_mb if cache_mb == "auto" else None, force_cache=force)
    model = {
        "layout_expert_total": expert_total,
        "working_set_bytes": working_set,
        "largest_layer_bytes": layer,
        "dense_bytes": dense,
        "kv_bytes": kv,
        "compute_bytes": compute,
    }
    refusal = ""
    try:
        budget = resolve(config, limit, **model)
    except BudgetError as error:
        refusal = str(error)
    if refusal:
        assert cache_mb not in ("auto", 0), "auto and 0 need no luck"
        assert "\n" not in refusal
        proposed = re.search(r"[Uu]se (?:at most (\d+)|0, or at least (\d+)|(0))", refusal)
        assert proposed is not None, refusal
        budget = resolve(StreamConfig(cache_mb=int(proposed[proposed.lastindex or 0])), limit, **model)
    assert 0 <= budget.bytes <= expert_total
    peak = min(budget.bytes + layer, expert_total) + dense + kv + compute
    if budget.bytes and limit.hard is not None:
        assert peak <= limit.hard.available_bytes
    if budget.bytes and (cache_mb == "auto" or not force):
        assert peak <= limit.available_bytes
    if not force and budget.bytes:
        assert budget.bytes >= min(working_set, expert_total)
