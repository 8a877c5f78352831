// What the engine knows about a model's compute graph, learned from one graph instead of listed per architecture.
//
// In: the nodes of a graph in execution order, and the names of the streamed expert tensors. Out: per MoE layer the names of the nodes
// where the routing is ready, where its weights are final, and which node each later product follows. Names are the only thing that
// stays the same between graphs. Knows no cache, no file and no policy.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

#include "ggml_view.h"

namespace moetriage {

// A graph that cannot be streamed; `node` is the node at fault.
struct GraphFault : std::runtime_error {
    GraphFault(std::string node_name, const std::string &reason) : std::runtime_error(reason), node(std::move(node_name)) {}
    std::string node;
};

// Expert tensors that are read together: while one stage's product runs, the next stage may still be on its way from the disk.
struct StagePlan {
    std::string wait;  // the last node before the stage's first product; empty for the first stage, which the routing itself waits for
    std::vector<std::string> tensors;
};

struct LayerPlan {
    int block = -1;       // the model's layer number, as in its tensor names
    std::string ids;      // the chosen experts, i32 [top_k, tokens]
    std::string weights;  // the final router weights, f32 [top_k, tokens]; empty: not found before the experts run, never dropped
    std::vector<StagePlan> stages;
    int top_k = 0;
};

struct GraphPlan {
    std::vector<LayerPlan> layers;    // the MoE layers, in the order the graph runs them
    std::vector<std::string> pinned;  // streamed tensors that something else than MUL_MAT_ID reads: to be loaded whole

    // Learn from one graph. `block_of` maps the name of every streamed tensor to the layer number in its name.
    // Throws GraphFault if nothing is routed, for two routings in one layer, or for a routing node without a stable name.
    static GraphPlan learn(const GgmlOps &ops, const std::vector<GgmlTensor *> &nodes,
                           const std::unordered_map<std::string, int> &block_of);
};

}  // namespace moetriage
