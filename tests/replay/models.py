"""What the tests of the replay hold it against: traces made from lists, plain eviction orders in Python, and exhaustive search.

The orders here are written from their descriptions, with lists and no care for speed; they share no line with the native ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from hypothesis import strategies as st

from moetriage.replay.routes import RouteShape, RouteTable

#: (phase, layer, tokens), a token being ((expert, weight), ...)
Batch = tuple[int, int, tuple[tuple[tuple[int, float], ...], ...]]


def table_from(batches: Sequence[Batch], *, n_expert: int, expert_bytes: Sequence[int]) -> RouteTable:
    """Return a table of layer batches given as plain values."""
    top_k = len(batches[0][2][0])
    routings = [routing for _, _, tokens in batches for token in tokens for routing in token]
    shape = RouteShape(n_expert=n_expert, top_k=top_k, layers=tuple(range(len(expert_bytes))), expert_bytes=tuple(expert_bytes))
    return RouteTable(
        shape=shape,
        layer=np.array([layer for _, layer, _ in batches], np.int32),
        phase=np.array([phase for phase, _, _ in batches], np.uint8),
        first_cell=np.cumsum([0, *(len(tokens) for _, _, tokens in batches)]).astype(np.int64),
        expert=np.array([expert for expert, _ in routings], np.int32),
        weight=np.array([weight for _, weight in routings], np.float32),
        resident=np.zeros(len(routings), np.uint8),
    )


def constant_routing(n_tokens: int, *, top_k: int, expert_bytes: Sequence[int], n_expert: int = 8) -> RouteTable:
    """Return decoding in which every token uses the same experts of every layer, in the same order."""
    token = tuple((expert, 1.0 / top_k) for expert in range(top_k))
    batches = [(1, layer, (token,)) for _ in range(n_tokens) for layer in range(len(expert_bytes))]
    return table_from(batches, n_expert=n_expert, expert_bytes=expert_bytes)


@st.composite
def tables(
    draw: st.DrawFn, *, one_size: bool | None = None, max_tokens: int = 12, max_layers: int = 3, max_experts: int = 6, prefill: bool = True
) -> RouteTable:
    """Draw a small trace: perhaps a prompt of several tokens, then decoding, over layers that may differ in size."""
    n_layers = draw(st.integers(1, max_layers))
    n_expert = draw(st.integers(2, max_experts))
    top_k = draw(st.integers(1, min(3, n_expert)))
    same = draw(st.booleans()) if one_size is None else one_size
    sizes = [draw(st.integers(2, 9))] * n_layers if same else [draw(st.integers(2, 9)) for _ in range(n_layers)]

    def token() -> tuple[tuple[int, float], ...]:
        experts = draw(st.permutations(range(n_expert)))[:top_k]
        return tuple((expert, draw(st.integers(1, 16)) / 16) for expert in experts)

    batches: list[Batch] = []
    if prefill and draw(st.booleans()):
        n_prompt = draw(st.integers(1, 4))
        batches += [(0, layer, tuple(token() for _ in range(n_prompt))) for layer in range(n_layers)]
    for _ in range(draw(st.integers(1, max_tokens))):
        batches += [(1, layer, (token(),)) for layer in range(n_layers)]
    return table_from(batches, n_expert=n_expert, expert_bytes=sizes)


def budgets(table: RouteTable) -> st.SearchStrategy[int]:
    return st.integers(1, table.shape.total_bytes + 1)


def distinct_batches(table: RouteTable) -> list[list[int]]:
    """Return each batch's distinct slots (layer x n_expert + expert) in order of first appearance."""
    shape = table.shape
    found = []
    for index, layer in enumerate(table.layer):
        begin, end = (int(table.first_cell[index + at]) * shape.top_k for at in (0, 1))
        found.append([int(layer) * shape.n_expert + expert for expert in dict.fromkeys(table.expert[begin:end].tolist())])
    return found


def needed_bytes(table: RouteTable, slots: Iterable[int]) -> int:
    return sum(table.shape.expert_bytes[slot // table.shape.n_expert] for slot in slots)


@dataclass
class Order:
    """A resident set with an order of eviction; ``victim`` picks among those that the batch does not use."""

    table: RouteTable
    budget: int
    resident: list[int] = field(default_factory=list)
    time: int = 0

    def run(self) -> int:
        """Return the hits of the whole trace."""
        hits = 0
        batches = distinct_batches(self.table)
        for self.time, slots in enumerate(batches):
            self.batches = batches
            present = [slot for slot in slots if slot in self.resident]
            hits += len(present)
            for slot in present:
                self.used(slot, hit=True)
            for slot in slots:
                if slot not in self.resident:
                    self.resident.append(slot)
                    self.used(slot, hit=False)
            while (slot := self.choose(set(slots))) is not None:
                self.resident.remove(slot)
                self.gone(slot)
        return hits

    def choose(self, pinned: set[int]) -> int | None:
        free = [slot for slot in self.resident if slot not in pinned]
        return self.victim(free) if free and needed_bytes(self.table, self.resident) > self.budget else None

    def used(self, slot: int, *, hit: bool) -> None: ...

    def gone(self, slot: int) -> None: ...

    def victim(self, free: list[int]) -> int:
        raise NotImplementedError


class Lru(Order):
    def used(self, slot, *, hit):
        self.resident.remove(slot)
        self.resident.append(slot)

    def victim(self, free):
        return free[0]


@dataclass
class Lfu(Lru):
    uses: dict[int, int] = field(default_factory=dict)
    values: dict[int, int] = field(default_factory=dict)
    age: int = 0
    aged: bool = False

    def used(self, slot, *, hit):
        super().used(slot, hit=hit)
        self.uses[slot] = self.uses[slot] + 1 if hit else 1
        self.values[slot] = self.uses[slot] + (self.age if self.aged else 0)

    def victim(self, free):
        place = {slot: at for at, slot in enumerate(self.resident)}
        slot = min(free, key=lambda slot: (self.values[slot], place[slot]))
        self.age = self.values[slot]
        return slot


class Lfuda(Lfu):
    def __init__(self, table, budget):
        super().__init__(table, budget, aged=True)


class Partition(Lru):
    def choose(self, pinned):
        shape = self.table.shape
        share = [self.budget * size // sum(shape.expert_bytes) for size in shape.expert_bytes]
        by_layer: dict[int, list[int]] = {layer: [] for layer in range(len(share))}
        for slot in self.resident:
            by_layer[slot // shape.n_expert].append(slot)
        above = {layer: needed_bytes(self.table, slots) - share[layer] for layer, slots in by_layer.items()}
        current = int(self.table.layer[self.time])
        free = {layer: [slot for slot in slots if slot not in pinned] for layer, slots in by_layer.items()}
        if above[current] > 0 and free[current]:
            return free[current][0]
        if needed_bytes(self.table, self.resident) <= self.budget or not any(free.values()):
            return None
        layer = max((layer for layer in free if free[layer]), key=lambda layer: (above[layer], -layer))
        return free[layer][0]


class Belady(Order):
    def victim(self, free):
        def next_use(slot):
            return next((t for t in range(self.time + 1, len(self.batches)) if slot in self.batches[t]), 10**9)

        return max(free, key=next_use)


@dataclass
class S3Fifo(Order):
    small: list[int] = field(default_factory=list)
    main: list[int] = field(default_factory=list)
    ghost: list[int] = field(default_factory=list)
    uses: dict[int, int] = field(default_factory=dict)

    def used(self, slot, *, hit):
        if hit:
            self.uses[slot] = min(3, self.uses[slot] + 1)
            return
        self.uses[slot] = 0
        if slot in self.ghost:
            self.ghost.remove(slot)
            self.main.append(slot)
        else:
            self.small.append(slot)

    def choose(self, pinned):
        if needed_bytes(self.table, self.resident) <= self.budget or not set(self.resident) - pinned:
            return None
        small_first = needed_bytes(self.table, self.small) > self.budget // 10 or not self.main
        orders = (self.from_small, self.from_main) if small_first else (self.from_main, self.from_small)
        first = orders[0](pinned)
        return orders[1](pinned) if first is None else first

    def from_small(self, pinned):
        for slot in list(self.small):
            self.small.remove(slot)
            if slot not in pinned and self.uses[slot] < 2:
                self.ghost.append(slot)
                while needed_bytes(self.table, self.ghost) > self.budget - self.budget // 10:
                    self.ghost.pop(0)
                return slot
            self.uses[slot] = 0
            self.main.append(slot)
        return None

    def from_main(self, pinned):
        if not set(self.main) - pinned:
            # The native queue goes round this often before it gives up.
            for _ in range(len(self.main) * 4):
                self.main.append(self.main.pop(0))
            return None
        while True:
            slot = self.main.pop(0)
            if slot not in pinned and self.uses[slot] == 0:
                return slot
            if slot not in pinned:
                self.uses[slot] -= 1
            self.main.append(slot)


ORDERS = {"lru": Lru, "lfu": Lfu, "lfuda": Lfuda, "partition": Partition, "s3fifo": S3Fifo}


def fewest_cost(
    table: RouteTable, budget: int, *, weight_limit: float = 0.0, bytes_count: bool = True, phases: tuple[int, ...] = (0, 1)
) -> float:
    """Search all schedules: fewest bytes (or misses) in these phases that at most ``weight_limit`` of discarded decode weight allows."""
    shape = table.shape
    states: dict[frozenset[int], list[tuple[float, float]]] = {frozenset(): [(0.0, 0.0)]}
    for index, slots in enumerate(distinct_batches(table)):
        counted = int(table.phase[index]) in phases
        begin = int(table.first_cell[index]) * shape.top_k
        weight = table.weight[begin : begin + shape.top_k].astype(float)
        droppable = {} if table.phase[index] == 0 else {slot: weight[k] for k, slot in enumerate(slots) if k != int(weight.argmax())}
        after: dict[frozenset[int], list[tuple[float, float]]] = {}
        for resident, costs in states.items():
            cold = [slot for slot in droppable if slot not in resident]
            for n_drops in range(len(cold) + 1):
                for drops in itertools.combinations(cold, n_drops):
                    lost = sum(droppable[slot] for slot in drops)
                    used = frozenset(slots) - frozenset(drops)
                    read = used - resident
                    cost = (needed_bytes(table, read) if bytes_count else len(read)) if counted else 0
                    ways = [(paid + cost, gone + lost) for paid, gone in costs if gone + lost <= weight_limit + 1e-9]
                    for kept in _retentions(table, resident - used, used, budget) if ways else ():
                        after.setdefault(kept, []).extend(ways)
        states = {kept: _pareto(ways) for kept, ways in after.items()}
    return min(paid for ways in states.values() for paid, _ in ways)


def _retentions(table: RouteTable, others: frozenset[int], used: frozenset[int], budget: int) -> Iterable[frozenset[int]]:
    """Yield what may be resident after a batch: what it used, and as much else as fits (less is never better)."""
    room = budget - needed_bytes(table, used)
    fitting = [
        frozenset(c)
        for n in range(len(others) + 1)
        for c in itertools.combinations(sorted(others), n)
        if needed_bytes(table, c) <= max(room, 0)
    ]
    maximal = [c for c in fitting if not any(c < other for other in fitting)]
    return [used | c for c in maximal]


def _pareto(ways: list[tuple[float, float]]) -> list[tuple[float, float]]:
    best: list[tuple[float, float]] = []
    for paid, gone in sorted(set(ways)):
        if not best or gone < best[-1][1]:
            best.append((paid, gone))
    return best
