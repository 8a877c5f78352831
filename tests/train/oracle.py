"""Every admission policy once more in plain Python, token by token, as docs/capacity.md words it. Knows nothing of the code under test.

Input is a list of rows of float32 values (as Python floats) and a list of booleans. Differences of scores are rounded to float32, as the
policies compare margins in that type.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

PRIMARY, RESCUE, OPTIONAL = 1, 2, 3


def float32(value: float) -> float:
    return float(struct.unpack("f", struct.pack("f", value))[0])


@dataclass
class Token:
    index: int
    experts: list[int]  # the two best, or the only one
    scores: list[float]
    slots: list[int] = field(default_factory=lambda: [-1, -1])
    passes: list[int] = field(default_factory=lambda: [0, 0])

    @property
    def margin(self) -> float:
        return float32(self.scores[0] - (self.scores[1] if len(self.scores) > 1 else 0.0))


class Buffers:
    """The experts' buffers and the counts per pass."""

    def __init__(self, num_experts: int, capacity: int) -> None:
        self.load = [0] * num_experts
        self.capacity = capacity
        self.requested, self.accepted = [0, 0, 0], [0, 0, 0]

    def ask(self, token: Token, choice: int, number: int, admitted: bool = True) -> None:
        expert = token.experts[choice]
        self.requested[number - 1] += 1
        if admitted and self.load[expert] < self.capacity:
            token.slots[choice], token.passes[choice] = self.load[expert], number
            self.load[expert] += 1
            self.accepted[number - 1] += 1


def two_best(rows: Sequence[Sequence[float]], mask: Sequence[bool]) -> list[Token]:
    """Return the unmasked tokens."""
    tokens = []
    for index, row in enumerate(rows):
        if mask[index]:
            experts = sorted(range(len(row)), key=lambda e, row=row: (-row[e], e))[:2]
            tokens.append(Token(index, experts, [row[e] for e in experts]))
    return tokens


def in_order(tokens: Iterable[Token], key: Callable[[Token], float]) -> list[Token]:
    return sorted(tokens, key=lambda token: (key(token), token.index))


def by_position(token: Token) -> float:
    return 0.0


def by_first(token: Token) -> float:
    return -token.scores[0]


def by_second(token: Token) -> float:
    return -token.scores[1]


def by_margin(token: Token) -> float:
    return token.margin


def served(token: Token) -> bool:
    return token.slots[0] >= 0


def one_choice(tokens: list[Token], buffers: Buffers, key: Callable[[Token], float]) -> None:
    for token in in_order(tokens, key):
        buffers.ask(token, 0, PRIMARY)


def every_second(tokens: list[Token], buffers: Buffers, key: Callable[[Token], float]) -> None:
    for token in in_order((t for t in tokens if len(t.experts) > 1), key):
        buffers.ask(token, 1, OPTIONAL if served(token) else RESCUE)


def rescue(tokens: list[Token], buffers: Buffers) -> None:
    for token in in_order((t for t in tokens if len(t.experts) > 1 and not served(t)), by_second):
        buffers.ask(token, 1, RESCUE)


def optional(tokens: list[Token], buffers: Buffers, threshold: float) -> None:
    uncertain = [t for t in tokens if len(t.experts) > 1 and t.passes[0] == PRIMARY and t.margin <= threshold]
    for token in in_order(uncertain, by_margin):
        buffers.ask(token, 1, OPTIONAL)


def augment(tokens: list[Token], buffers: Buffers) -> None:
    for choice in (0, 1):
        waiting: dict[int, list[Token]] = {}
        for token in in_order((t for t in tokens if len(t.experts) > 1 and t.slots == [-1, -1]), (by_first, by_second)[choice]):
            waiting.setdefault(token.experts[choice], []).append(token)
        for mover in in_order((t for t in tokens if len(t.experts) > 1 and served(t) and t.slots[1] < 0), by_margin):
            source, target = mover.experts
            if waiting.get(source) and buffers.load[target] < buffers.capacity:
                placed = waiting[source].pop(0)
                placed.slots[choice], placed.passes[choice] = mover.slots[0], RESCUE
                mover.slots, mover.passes = [-1, buffers.load[target]], [0, PRIMARY]
                buffers.load[target] += 1
                buffers.accepted[RESCUE - 1] += 1


def causal(tokens: list[Token], buffers: Buffers, threshold: float, length: int) -> None:
    named = [0 for _ in buffers.load]
    for token in sorted(tokens, key=lambda t: (t.index % length, t.index // length)):
        buffers.ask(token, 0, PRIMARY)
        named[token.experts[0]] += 1
        if len(token.experts) == 1:
            continue
        second, uncertain = token.experts[1], token.margin <= threshold
        named[second] += uncertain
        if not served(token):
            buffers.ask(token, 1, RESCUE)
        elif uncertain:
            accrued = Fraction(buffers.capacity * (token.index % length + 1), length)
            buffers.ask(token, 1, OPTIONAL, admitted=named[second] <= accrued)


def admit(
    rows: Sequence[Sequence[float]],
    num_experts: int,
    policy: str,
    capacity: int,
    threshold: float,
    mask: Sequence[bool],
    length: int = 1,
) -> tuple[list[Token], Buffers]:
    """Return the unmasked tokens with what they were granted, and the counts. ``length`` is that of the sequences (causal alone)."""
    tokens, buffers, threshold = two_best(rows, mask), Buffers(num_experts, capacity), float32(threshold)
    if policy == "capsel2-causal":
        causal(tokens, buffers, threshold, length)
    elif policy in ("top1", "top2"):
        one_choice(tokens, buffers, by_position)
        if policy == "top2":
            every_second(tokens, buffers, by_position)
    elif policy in ("bpr-top1", "bpr-top2", "fixed-top2"):
        one_choice(tokens, buffers, by_first)
        if policy != "bpr-top1":
            every_second(tokens, buffers, by_first if policy == "bpr-top2" else by_second)
    else:
        one_choice(tokens, buffers, by_first)
        if policy != "primary+optional":
            rescue(tokens, buffers)
        if policy == "augment":
            augment(tokens, buffers)
        if policy != "primary+rescue":
            optional(tokens, buffers, threshold)
    return tokens, buffers
