"""The most tokens that any assignment could serve: what a policy's coverage is held against. For evaluation only, on the CPU.

Comes in: probabilities and a capacity. Goes out: one number. Deliberately unknown here: policies. It is a maximum flow from the tokens
through either of their two best experts to the experts' places. Tokens with the same pair are one node, so its size does not grow with T.

Legend: T tokens, E experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moetriage.errors import UsageError
from moetriage.train.passes import two_best


def optimum(probs_TE: Tensor, capacity: int, mask_T: Tensor | None = None) -> int:
    """Return how many tokens can have at least one of their two best experts when each takes ``capacity`` tokens.

    probs_TE, capacity and mask_T are those of ``admit``. No policy's ``covered_T`` has a higher sum.
    """
    import networkx as nx  # takes a while to load, and only evaluation needs it

    if capacity < 0:
        raise UsageError(f"capacity {capacity}: must be 0 or more tokens per expert")
    choices = two_best(probs_TE, mask_T)
    num_experts = choices.num_experts
    # With one expert both choices are that one, which makes one edge.
    pair_T = (choices.first_T * num_experts + choices.second_T)[choices.asks_T]
    pairs, counts = torch.unique(pair_T, return_counts=True)
    graph = nx.DiGraph()
    graph.add_nodes_from(("tokens", "places"))
    graph.add_edges_from((expert, "places", {"capacity": capacity}) for expert in range(num_experts))
    for pair, count in zip(pairs.tolist(), counts.tolist(), strict=True):
        graph.add_edge("tokens", ("pair", pair), capacity=count)
        for expert in divmod(pair, num_experts):
            graph.add_edge(("pair", pair), expert, capacity=count)
    return int(nx.maximum_flow_value(graph, "tokens", "places"))
