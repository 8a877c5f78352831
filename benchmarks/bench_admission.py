#!/usr/bin/env python3
"""How long admission takes on a CPU: every policy, beside a Python loop over experts and GShard's sums over one-hot matrices.

Regime: a layer's router probabilities of 16,384 tokens, 8, 64 and 256 experts of uneven popularity, capacity factor 1.25, the median margin
as threshold, two threads, eager mode. Computing and memory bandwidth limit it (the probabilities are 16 MB at 256 experts), no disk does.
Whatever is compared must give the same plan first. Runs follow each other in changing order, ratios are taken within a round, and a run
during which another process took a processor away is repeated. The loop cannot do the causal and the augmenting policy, where one expert's
buffer depends on the others' in both directions; the sums do ``top2`` alone.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness import Spread, Table, add_timing, chosen_clock, machine, plain, say, watched

try:
    import torch
except ImportError:
    print(json.dumps({"skipped": "needs torch: pip install 'moetriage[train]'"}))
    sys.exit(0)

from torch import Tensor

from moetriage.train.admission import POLICIES, Plan, admit, capacity
from moetriage.train.passes import two_best
from moetriage.train.plan import make_plan
from moetriage.train.threshold import median_margin

#: What admission by capsel2 may take at 16,384 tokens on two cores, in milliseconds.
LIMIT_MS = {8: 8.0, 64: 12.0, 256: 20.0}
#: No policy may take more than so many times what the faster of the two other ways takes.
LIMIT_RATIO = 2.0
LENGTH = 128
NO_LOOP = ("capsel2-causal", "augment")


@dataclass(frozen=True)
class Batch:
    """Probabilities of one router and the settings that all ways share."""

    probs_TE: Tensor
    capacity: int
    threshold: float

    @classmethod
    def of(cls, n_tokens: int, num_experts: int) -> Batch:
        generator = torch.Generator().manual_seed(num_experts)
        logits_TE = torch.randn(n_tokens, num_experts, generator=generator) + 0.5 * torch.randn(num_experts, generator=generator)
        probs_TE = logits_TE.softmax(1)
        threshold = float(median_margin(two_best(probs_TE, None).margin_T))
        return cls(probs_TE, capacity(1.25, n_tokens, num_experts), threshold)

    def ours(self, policy: str) -> Plan:
        return admit(self.probs_TE, policy, capacity=self.capacity, margin_threshold=self.threshold, sequence_length=LENGTH)

    def loop(self, policy: str) -> Plan:
        """Serve one expert after another, each pass anew."""
        choices = two_best(self.probs_TE, None)
        asks_T, nobody_T = choices.asks_T, torch.zeros_like(choices.asks_T)
        load = [0] * choices.num_experts
        best_T = None if policy.startswith("top") else choices.best_T
        first_T = self._serve(choices.first_T, asks_T, best_T, load)
        rescue_T, optional_T = first_T < 0, first_T >= 0
        if policy in ("top1", "bpr-top1"):
            second_T, rescue_T, optional_T = torch.full_like(first_T, -1), nobody_T, nobody_T
        elif policy in ("top2", "bpr-top2", "fixed-top2"):
            second_T = self._serve(choices.second_T, asks_T, choices.rest_T if policy == "fixed-top2" else best_T, load)
        else:
            rescue_T = nobody_T if policy == "primary+optional" else rescue_T
            optional_T = nobody_T if policy == "primary+rescue" else optional_T & (choices.margin_T <= self.threshold)
            second_T = self._serve(choices.second_T, rescue_T, choices.rest_T, load)
            second_T = torch.maximum(second_T, self._serve(choices.second_T, optional_T, -choices.margin_T, load))
        return make_plan(choices, first_T, second_T, rescue_T, optional_T, self.capacity)

    def _serve(self, expert_T: Tensor, asks_T: Tensor, score_T: Tensor | None, load: list[int]) -> Tensor:
        slot_T = torch.full_like(expert_T, -1)
        for expert, taken in enumerate(load):
            asking = ((expert_T == expert) & asks_T).nonzero()[:, 0]
            if score_T is not None:
                asking = asking[score_T[asking].argsort(descending=True, stable=True)]
            asking = asking[: self.capacity - taken]
            load[expert] += len(asking)
            slot_T[asking] = torch.arange(taken, load[expert])
        return slot_T

    def one_hot(self, policy: str) -> Plan:
        """Rank by running sums over (tokens, experts), as GShard does; ``top2`` alone."""
        assert policy == "top2"
        choices = two_best(self.probs_TE, None)
        first_TE, second_TE = (torch.nn.functional.one_hot(x, choices.num_experts) for x in (choices.first_T, choices.second_T))
        first_T = (first_TE * (first_TE.cumsum(0) - 1)).sum(1)
        second_T = (second_TE * (second_TE.cumsum(0) - 1 + first_TE.sum(0))).sum(1)
        first_T, second_T = (torch.where(x < self.capacity, x, -1) for x in (first_T, second_T))
        return make_plan(choices, first_T, second_T, first_T < 0, first_T >= 0, self.capacity)


@dataclass(frozen=True)
class Measured:
    """One policy at one number of experts, in milliseconds; ``ratio`` is ours over the faster other way of the same round."""

    num_experts: int
    policy: str
    ours: Spread
    loop: Spread | None
    one_hot: Spread | None
    ratio: Spread | None
    others_cpu: float


def milliseconds(run: Callable[[str], Plan], policy: str, clock: Callable[[], float]) -> float:
    """Time one run that was not interrupted; if all tries of half a second were, the shortest. Processor time needs one try."""
    tries, deadline = [], time.perf_counter() + (0.5 if clock is time.perf_counter else 0.0)
    while True:
        interrupted = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
        began = clock()
        run(policy)
        tries.append(1000 * (clock() - began))
        if resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw == interrupted:
            return tries[-1]
        if time.perf_counter() > deadline:
            return min(tries)


def check_same(ours: Plan, other: Plan, what: str) -> None:
    for name in ("expert_TK", "slot_TK", "pass_TK", "requested", "accepted"):
        if not torch.equal(getattr(ours, name), getattr(other, name)):
            raise SystemExit(f"{what}: {name} differs: nothing to compare")


def measure(batch: Batch, policy: str, rounds: int, clock: Callable[[], float]) -> Measured:
    num_experts = batch.probs_TE.shape[1]
    ways: dict[str, Callable[[str], Plan]] = {"ours": batch.ours}
    if policy not in NO_LOOP:
        ways["loop"] = batch.loop
    if policy == "top2":
        ways["one_hot"] = batch.one_hot
    for name, run in ways.items():  # which also warms up
        check_same(batch.ours(policy), run(policy), f"{num_experts} experts, {policy}, {name}")
    times: dict[str, list[float]] = {name: [] for name in ways}
    with watched() as disturbance:
        for number in range(rounds):
            for name in list(ways)[:: 1 if number % 2 else -1]:
                times[name].append(milliseconds(ways[name], policy, clock))
    others = [times[name] for name in times if name != "ours"]
    ratios = [ours / min(rest) for ours, *rest in zip(times["ours"], *others, strict=True)] if others else None
    spreads = {name: Spread.of(times[name]) if name in times else None for name in ("loop", "one_hot")}
    ratio = Spread.of(ratios) if ratios else None
    return Measured(num_experts, policy, Spread.of(times["ours"]), spreads["loop"], spreads["one_hot"], ratio, disturbance.others_cpu)


def table(found: Sequence[Measured], n_tokens: int, threads: int) -> Table:
    def text(spread: Spread | None, digits: int = 2) -> str:
        return spread.text(digits) if spread else ""

    rows = [
        (
            str(m.num_experts),
            m.policy,
            m.ours.text(),
            text(m.loop),
            text(m.one_hot),
            text(m.ratio),
            f"{LIMIT_MS[m.num_experts]:g}" if m.policy == "capsel2" and m.num_experts in LIMIT_MS else "",
            f"{m.others_cpu:.2f}",
        )
        for m in found
    ]
    columns = ("experts", "policy", "admit", "loop over experts", "one-hot sums", "admit / faster other", "limit", "others' cpu")
    what = f"Milliseconds, median (least to most) of {found[0].ours.n} rounds."
    notes = [what, f"Ratios are taken within a round; the limit for their median is {LIMIT_RATIO:g}."]
    return Table(f"Admission of {n_tokens} tokens, {threads} threads", columns, rows, notes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16384, help=f"a multiple of {LENGTH} (default: 16384)")
    parser.add_argument("--experts", type=int, nargs="+", default=[8, 64, 256], help="default: 8 64 256")
    parser.add_argument("--policies", nargs="+", default=POLICIES, choices=POLICIES, metavar="POLICY", help="default: all")
    add_timing(parser)
    options = parser.parse_args()

    clock = chosen_clock(options)
    torch.set_num_threads(options.threads)
    found = []
    for num_experts in options.experts:
        batch = Batch.of(options.tokens, num_experts)
        for policy in options.policies:
            say(f"{num_experts} experts, {policy}")
            found.append(measure(batch, policy, options.rounds, clock))
    print(table(found, options.tokens, options.threads).markdown())
    late = [m for m in found if m.policy == "capsel2" and m.ours.median > LIMIT_MS.get(m.num_experts, float("inf"))]
    slow = [m for m in found if m.ratio and m.ratio.median > LIMIT_RATIO]
    for m in (*late, *slow):
        print(f"above its limit: {m.num_experts} experts, {m.policy}")
    result = {
        "tokens": options.tokens,
        "threads": options.threads,
        "clock": clock.__name__,
        "torch": torch.__version__,
        "machine": machine(Path.cwd()),
        "limit_ms": LIMIT_MS,
        "limit_ratio": LIMIT_RATIO,
        "within_limits": not late and not slow,
        "measured": [plain(m) for m in found],
    }
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
