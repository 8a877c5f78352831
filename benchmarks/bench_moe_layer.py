#!/usr/bin/env python3
"""How long an MoE layer takes on a CPU, beside the least that its products can take and beside a Python loop over experts.

Three regimes, all in eager mode, inputs new in each round (so that loads and shapes change as they do in training):

- ``capacity``: 4096 tokens, width 256, experts of width 512, capsel2 at 1.25, float32. The floor is torch.bmm alone on buffers of the
  same size, two products for GELU experts and three for SwiGLU; what the layer adds is router, admission, gathers, activation, combine
  and counts.
- ``dropless``: 4096 tokens, width 256, SwiGLU experts of width 96, six of 32, under bfloat16 autocast and in float32: the layer of the
  bundled model. Beside the layer's own way: F.grouped_mm, and torch.bmm on buffers padded to the batch's largest load.
- ``step``: forward and backward of the study's model (six layers of eight GELU experts, capsel2 at 1.25) on 4 x 128 tokens, with and
  without a Python loop over experts in its layers.

Computing limits the products, memory bandwidth most of the rest. Freed memory is kept in the process, as ``moetriage train`` does. All
ways must give the same result first. Runs follow each other in changing order and ratios are taken within a round.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from harness import Spread, Table, add_timing, chosen_clock, machine, plain, say, watched

try:
    import torch
except ImportError:
    print(json.dumps({"skipped": "needs torch: pip install 'moetriage[train]'"}))
    sys.exit(0)

from torch import Tensor, nn

from moetriage.train.allocator import keep_freed_memory
from moetriage.train.dispatch import ROW_MULTIPLE, combine, gather, padded_slots, sorted_slots
from moetriage.train.experts import activate
from moetriage.train.lm import NanoMoE
from moetriage.train.model_config import study
from moetriage.train.moe import MoELayer
from moetriage.train.moe_config import MoEConfig
from moetriage.train.plan import Plan
from moetriage.train.router import Routing, gates_of

#: The layer may take so many times what the products alone take, forward.
LIMIT_RATIO = 1.3
N, LENGTH, D = 4096, 128, 256
Way = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Case:
    """One layer with all ways to compute it; the first is the layer itself. ``floor`` computes less, so its result is not compared."""

    name: str
    module: nn.Module
    draw: Callable[[], Tensor]
    ways: dict[str, Way]
    floor: str | None
    autocast: bool


def capacity_case(num_experts: int, activation: Literal["gelu", "swiglu"]) -> Case:
    config = MoEConfig(
        d_model=D,
        d_expert=512,
        num_experts=num_experts,
        renormalise=False,
        policy="capsel2",
        capacity_factor=1.25,
        margin_threshold=0.05,
        activation=activation,
    )
    layer = MoELayer(config)
    room = -(-5 * N // (4 * num_experts))
    buffer_ECD = torch.randn(num_experts, room, D, requires_grad=True)

    def products(x_BSD: Tensor) -> Tensor:
        hidden_ECH = [torch.bmm(buffer_ECD, weight) for weight in layer.experts.inputs()]
        y_ECD = torch.bmm(hidden_ECH[-1], layer.experts.down_proj)
        if len(hidden_ECH) == 1 or not torch.is_grad_enabled():
            return y_ECD
        return y_ECD + 0 * hidden_ECH[0].flatten()[0]  # so that the backward has the gate's products, too

    def loop(x_BSD: Tensor) -> Tensor:
        routing = layer.router(x_BSD.view(-1, D))
        return looping_experts(layer, x_BSD.view(-1, D), routing, layer._admit(routing, None, LENGTH, drop_free=False))

    ways = {"layer": lambda x_BSD: layer(x_BSD).y_BSD, "bmm alone": products, "python loop": loop}
    return Case(f"capsel2 1.25, {num_experts} {activation} experts", layer, hidden_states, ways, "bmm alone", False)


def dropless_case(*, autocast: bool) -> Case:
    config = MoEConfig(d_model=D, d_expert=96, num_experts=32, top_k=6, renormalise=True, load_balance_weight=0.01, z_loss_weight=1e-3)
    layer = MoELayer(config)
    dtype = torch.bfloat16 if autocast else torch.float32

    def routed(x_BSD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        routing = layer.router(x_BSD.view(-1, D))
        expert_TK = layer.router.choose(routing.probs_TE, 6)
        return x_BSD.view(-1, D).to(dtype), gates_of(routing.probs_TE, expert_TK, renormalise=True), expert_TK

    def grouped(x_BSD: Tensor, multiple: int) -> Tensor:
        x_TD, gates_TK, expert_TK = routed(x_BSD)
        slots, rows_E = sorted_slots(expert_TK, 32, multiple=multiple)
        return combine(layer.experts.grouped(gather(x_TD, slots), rows_E), gates_TK, slots)

    def padded(x_BSD: Tensor) -> Tensor:
        x_TD, gates_TK, expert_TK = routed(x_BSD)
        slots, load_E = sorted_slots(expert_TK, 32)
        room = int(load_E.max())
        slots = padded_slots(expert_TK, slots.slot_TK - (load_E.cumsum(0) - load_E)[expert_TK], 32, room)
        return combine(layer.experts.padded(gather(x_TD, slots).view(32, room, D)).flatten(0, 1), gates_TK, slots)

    ways = {
        "layer": lambda x_BSD: layer(x_BSD).y_BSD,
        "grouped_mm": lambda x_BSD: grouped(x_BSD, 1),
        f"grouped_mm, rows by {ROW_MULTIPLE}": lambda x_BSD: grouped(x_BSD, ROW_MULTIPLE),
        "bmm to the largest load": padded,
        "python loop": lambda x_BSD: python_loop(layer, *routed(x_BSD)),
    }
    return Case(f"dropless 6 of 32, {'bfloat16' if autocast else 'float32'}", layer, hidden_states, ways, None, autocast)


def step_case() -> Case:
    config = study()
    model, looping = NanoMoE(config), NanoMoE(config)
    looping.load_state_dict(model.state_dict())
    for layer in looping.moe_layers:
        layer._padded = partial(looping_experts, layer)  # type: ignore[method-assign]
    # One row of random tokens more, so that inputs and targets come as one.
    ways: dict[str, Way] = {
        name: lambda rows, model=model: model(rows[:4], rows[4:]).loss  # type: ignore[misc]
        for name, model in (("layer", model), ("python loop", looping))
    }
    return Case("study model, step", model, lambda: torch.randint(0, config.vocab_size, (8, config.context)), ways, None, False)


def hidden_states() -> Tensor:
    return torch.randn(N // LENGTH, LENGTH, D)


def looping_experts(layer: MoELayer, x_TD: Tensor, routing: Routing, plan: Plan) -> Tensor:
    return python_loop(layer, x_TD, gates_of(routing.probs_TE, plan.expert_TK, renormalise=layer.config.renormalise), plan.expert_TK)


def python_loop(layer: MoELayer, x_TD: Tensor, gates_TK: Tensor, expert_TK: Tensor) -> Tensor:
    """Select each expert's tokens, run it, add the weighted result to theirs."""
    y_TD = torch.zeros_like(x_TD)
    for expert in range(layer.config.num_experts):
        token, choice = (expert_TK == expert).nonzero(as_tuple=True)
        x_CD, experts = x_TD[token], layer.experts
        up_bias_H, down_bias_D = (0 if bias is None else bias[expert] for bias in (experts.up_bias, experts.down_bias))
        hidden_CH = activate([x_CD @ weight[expert] + up_bias_H for weight in experts.inputs()], layer.config.activation)
        y_CD = (hidden_CH @ experts.down_proj[expert] + down_bias_D) * gates_TK[token, choice, None]
        y_TD = y_TD.index_add(0, token, y_CD.to(y_TD.dtype))
    return y_TD


@dataclass(frozen=True)
class Measured:
    """Milliseconds of one way, and its ratio to the layer's (to the floor's, for the layer itself) of the same round."""

    case: str
    backward: bool
    way: str
    time: Spread
    ratio: Spread | None
    others_cpu: float


def run(case: Case, way: Way, x_BSD: Tensor, backward: bool) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast), torch.set_grad_enabled(backward):
        y = way(x_BSD)
    if backward:
        y.backward(torch.ones_like(y))
    return y


def check_same(case: Case, x_BSD: Tensor) -> None:
    with torch.no_grad():
        found = {name: run(case, way, x_BSD, False).float().view(-1) for name, way in case.ways.items() if name != case.floor}
    for name, y in found.items():
        if (y - found["layer"]).norm() > (0.02 if case.autocast else 1e-5) * y.norm():
            raise SystemExit(f"{case.name}: {name} computes something else: nothing to compare")


def measure(case: Case, rounds: int, clock: Callable[[], float], *, backward: bool) -> list[Measured]:
    check_same(case, case.draw())
    times: dict[str, list[float]] = {name: [] for name in case.ways}
    with watched() as disturbance:
        for number in range(rounds + 2):
            x_BSD = case.draw()
            x_BSD.requires_grad_(backward and x_BSD.is_floating_point())
            for name in list(case.ways)[:: 1 if number % 2 else -1]:
                case.module.zero_grad()
                began = clock()
                run(case, case.ways[name], x_BSD, backward)
                if number > 1:  # the first two warm up
                    times[name].append(1000 * (clock() - began))
    found = []
    for name, values in times.items():
        base = times[case.floor] if name == "layer" and case.floor else times["layer"]
        ratio = None if base is values else Spread.of([one / other for one, other in zip(values, base, strict=True)])
        found.append(Measured(case.name, backward, name, Spread.of(values), ratio, disturbance.others_cpu))
    return found


def table(found: Sequence[Measured], threads: int) -> Table:
    rows = []
    for m in found:
        limit = f"{LIMIT_RATIO:g}" if m.way == "layer" and m.ratio and not m.backward else ""
        what = "forward and backward" if m.backward else "forward"
        rows.append((m.case, what, m.way, m.time.text(), m.ratio.text() if m.ratio else "", limit, f"{m.others_cpu:.2f}"))
    columns = ("layer", "direction", "way", "ms", "ratio", "limit", "others' cpu")
    notes = [
        f"Median (least to most) of {found[0].time.n} rounds, inputs new in each.",
        "The ratio of the layer is to bmm alone, that of any other way to the layer, in the same round.",
    ]
    return Table(f"MoE layers, {threads} threads", columns, rows, notes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cells", nargs="*", default=["capacity", "dropless", "step"], help="capacity, dropless, step (default: all)")
    parser.add_argument("--experts", type=int, nargs="+", default=[8, 64], help="of the capacity cell (default: 8 64)")
    add_timing(parser)
    options = parser.parse_args()

    clock = chosen_clock(options)
    keep_freed_memory()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    cases = []
    if "capacity" in options.cells:
        cases += [capacity_case(num_experts, activation) for activation in ("gelu", "swiglu") for num_experts in options.experts]
    if "dropless" in options.cells:
        cases += [dropless_case(autocast=True), dropless_case(autocast=False)]
    if "step" in options.cells:
        cases.append(step_case())
    found = []
    for case in cases:
        for backward in (False, True):
            say(f"{case.name}, {'forward and backward' if backward else 'forward'}")
            found += measure(case, options.rounds, clock, backward=backward)
    result = table(found, options.threads)
    print(result.markdown())
    within = [m for m in found if m.way == "layer" and m.ratio and not m.backward]
    summary = {"worst_forward_ratio": max((m.ratio.median for m in within if m.ratio), default=None), "limit": LIMIT_RATIO}
    print(json.dumps({"machine": machine(Path.cwd()), "settings": vars(options), **summary, "results": [plain(m) for m in found]}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
