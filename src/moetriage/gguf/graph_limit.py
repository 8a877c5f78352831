"""How many experts per token llama.cpp's compute graph of a model has room for.

In: a ``ModelLayout``. Out: a width. llama.cpp sizes its graphs by the number of tensors (``graph_max_nodes`` in llama-context.cpp) and sums
the used experts one by one, so a wide routing overruns them; it then ends the process instead of reporting. Knows no context and no flag.
"""

from __future__ import annotations

from moetriage.gguf.layout import ModelLayout

_MIN_NODES = 1024
_NODES_PER_TENSOR = 8
#: A view and an addition.
_NODES_PER_USED_EXPERT = 2
#: What a graph takes beside that, at most: per tensor (2.5 to 4.2 were measured, on all families of ``shapes``), and in all.
_BASE_NODES_PER_TENSOR = 4.3
_BASE_NODES = 24


def widest_top_k(layout: ModelLayout) -> int:
    """Return the largest number of experts per token that is sure to fit into llama.cpp's graph of the model.

    Good to some per cent on the safe side: llama.cpp gives a few architectures more room than is reckoned with here.
    """
    n_tensors = len(layout.experts) + len(layout.dense)
    nodes = max(_MIN_NODES, _NODES_PER_TENSOR * n_tensors)
    # Its hash table has room for nodes and weights together, rounded up to a power of two.
    entries = (1 << (nodes - 1).bit_length()) - n_tensors
    left = min(nodes, entries) - _BASE_NODES_PER_TENSOR * n_tensors - _BASE_NODES
    return max(1, int(left) // (_NODES_PER_USED_EXPERT * len(layout.moe_layers)))
