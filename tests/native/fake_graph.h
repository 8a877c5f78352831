// Compute graphs made by hand in the shapes that llama.cpp builds, and a scheduler that treats the eval callback as ggml's does.
#pragma once

#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <initializer_list>
#include <string>
#include <vector>

#include "check.h"
#include "eval_hook.h"
#include "ggml_view.h"

namespace fake {

using moetriage::GgmlTensor;

constexpr moetriage::GgmlOps kOps{1, 2, 3};  // mul_mat_id, get_rows, mul
constexpr int32_t kOther = 9;                // any other operation
constexpr int64_t kWidth = 16;

using Shape = std::initializer_list<int64_t>;

class Graph {
   public:
    std::vector<GgmlTensor *> nodes;  // in execution order; leaves are not among them

    GgmlTensor *leaf(const std::string &name, Shape shape) { return make(0, name, moetriage::kTypeF32, shape, {}); }

    GgmlTensor *node(int32_t op, const std::string &name, Shape shape, std::initializer_list<GgmlTensor *> sources,
                     int32_t type = moetriage::kTypeF32) {
        GgmlTensor *tensor = make(op, name, type, shape, sources);
        memory_.emplace_back(static_cast<size_t>(tensor->elements()) * 4);
        tensor->data = memory_.back().data();
        nodes.push_back(tensor);
        return tensor;
    }

    // A reshape, or the first ne[0] entries of each row.
    GgmlTensor *view(GgmlTensor *of, const std::string &name, Shape shape) {
        GgmlTensor *tensor = make(kOther, name, of->type, shape, {of});
        tensor->view_src = const_cast<GgmlTensor *>(of->base());
        tensor->data = of->data;
        if (tensor->elements() != of->elements()) tensor->nb[1] = of->nb[1];
        nodes.push_back(tensor);
        return tensor;
    }

    GgmlTensor *find(const std::string &name) const {
        for (GgmlTensor *each : nodes) {
            if (name == each->name) return each;
        }
        std::fprintf(stderr, "no node %s\n", name.c_str());
        std::exit(1);
    }

   private:
    GgmlTensor *make(int32_t op, const std::string &name, int32_t type, Shape shape, std::initializer_list<GgmlTensor *> sources) {
        GgmlTensor &tensor = tensors_.emplace_back();
        std::memset(&tensor, 0, sizeof tensor);
        tensor.op = op;
        tensor.type = type;
        int axis = 0;
        for (int64_t &extent : tensor.ne) extent = 1;
        for (const int64_t extent : shape) tensor.ne[axis++] = extent;
        tensor.nb[0] = 4;
        for (int i = 1; i < 4; ++i) tensor.nb[i] = tensor.nb[i - 1] * static_cast<size_t>(tensor.ne[i - 1]);
        axis = 0;
        for (GgmlTensor *source : sources) tensor.src[axis++] = source;
        std::strncpy(tensor.name, name.c_str(), sizeof tensor.name - 1);
        return &tensor;
    }

    std::deque<GgmlTensor> tensors_;
    std::deque<std::vector<std::byte>> memory_;
};

enum class Gate { plain, normalised, softmax, scaled };

struct Moe {
    Gate gate = Gate::normalised;
    bool fused = false;         // gate and up projections are one tensor
    bool expert_scale = false;  // a per-expert factor behind the down projection, gathered by the same ids
    bool weigh_input = false;   // the router's weights are applied before the experts
    std::string moved;          // appended to the names of all routing nodes
    int tokens = 1;
    int top_k = 2;
    int n_expert = 8;
};

inline std::string expert_name(int block, const char *projection) {
    return "blk." + std::to_string(block) + ".ffn_" + projection + "_exps.weight";
}

// The router's output up to the final weights, which come back as [1, top_k, tokens].
inline GgmlTensor *add_gate(Graph &g, const std::string &tag, const Moe &moe, GgmlTensor *probs, GgmlTensor *ids) {
    GgmlTensor *rows = g.view(probs, "ffn_moe_probs" + tag + " (reshaped)", {1, moe.n_expert, moe.tokens});
    GgmlTensor *weights = g.node(kOps.get_rows, "ffn_moe_weights" + tag, {1, moe.top_k, moe.tokens}, {rows, ids});
    if (moe.gate == Gate::plain) return weights;
    if (moe.gate == Gate::scaled) return g.node(kOther, "ffn_moe_weights_scaled" + tag, {1, moe.top_k, moe.tokens}, {weights});
    GgmlTensor *flat = g.view(weights, "ffn_moe_weights" + tag + " (reshaped)", {moe.top_k, moe.tokens});
    if (moe.gate == Gate::softmax) {  // llama.cpp names only the view of it
        GgmlTensor *soft = g.node(kOther, "node_" + std::to_string(g.nodes.size()), {moe.top_k, moe.tokens}, {flat});
        return g.view(soft, "ffn_moe_weights_softmax" + tag, {1, moe.top_k, moe.tokens});
    }
    GgmlTensor *sum = g.node(kOther, "ffn_moe_weights_sum" + tag, {1, moe.tokens}, {flat});
    GgmlTensor *norm = g.node(kOther, "ffn_moe_weights_norm" + tag, {moe.top_k, moe.tokens}, {flat, sum});
    return g.view(norm, "ffn_moe_weights_norm" + tag + " (reshaped)", {1, moe.top_k, moe.tokens});
}

// One MoE layer behind `input` [kWidth, tokens]; returns its output.
inline GgmlTensor *add_moe(Graph &g, int block, const Moe &moe, GgmlTensor *input) {
    const std::string tag = moe.moved + "-" + std::to_string(block);
    const int64_t k = moe.top_k, t = moe.tokens, e = moe.n_expert;
    GgmlTensor *router = g.leaf("blk." + std::to_string(block) + ".ffn_gate_inp.weight", {kWidth, e});
    GgmlTensor *logits = g.node(kOther, "ffn_moe_logits" + tag, {e, t}, {router, input});
    GgmlTensor *probs = g.node(kOther, "ffn_moe_probs" + tag, {e, t}, {logits});
    GgmlTensor *sorted = g.node(kOther, "ffn_moe_argsort" + tag, {e, t}, {probs}, moetriage::kTypeI32);
    GgmlTensor *ids = g.view(sorted, "ffn_moe_topk" + tag, {k, t});
    GgmlTensor *weights = add_gate(g, tag, moe, probs, ids);
    GgmlTensor *rows = g.view(input, input->name + std::string(" (reshaped)"), {kWidth, 1, t});
    if (moe.weigh_input) {
        GgmlTensor *wide = g.node(kOther, "node_" + std::to_string(g.nodes.size()), {kWidth, k, t}, {rows});
        rows = g.node(kOps.mul, "ffn_moe_weighted" + tag, {kWidth, k, t}, {wide, weights});
    }
    const auto product = [&](const char *projection, const std::string &name, GgmlTensor *from, int64_t width) {
        GgmlTensor *experts = g.leaf(expert_name(block, projection), {kWidth, width, e});
        return g.node(kOps.mul_mat_id, name, {width, k, t}, {experts, from, ids});
    };
    GgmlTensor *active = nullptr;
    if (moe.fused) {
        GgmlTensor *both = product("gate_up", "ffn_moe_gate_up" + tag, rows, 2 * kWidth);
        active = g.node(kOther, "ffn_moe_geglu" + tag, {kWidth, k, t}, {both});
    } else {
        GgmlTensor *up = product("up", "ffn_moe_up" + tag, rows, kWidth);
        GgmlTensor *gate = product("gate", "ffn_moe_gate" + tag, rows, kWidth);
        active = g.node(kOther, "ffn_moe_swiglu" + tag, {kWidth, k, t}, {gate, up});
    }
    GgmlTensor *out = product("down", moe.expert_scale ? "node_" + std::to_string(g.nodes.size()) : "ffn_moe_down" + tag, active, kWidth);
    if (moe.expert_scale) {
        GgmlTensor *scale = g.leaf("blk." + std::to_string(block) + ".ffn_down_exps.scale", {e});
        GgmlTensor *row = g.view(scale, "blk." + std::to_string(block) + ".ffn_down_exps.scale (reshaped)", {1, e});
        GgmlTensor *all = g.node(kOther, "node_" + std::to_string(g.nodes.size()), {1, e, t}, {row});
        GgmlTensor *mine = g.node(kOps.get_rows, "node_" + std::to_string(g.nodes.size()), {1, k, t}, {all, ids});
        out = g.node(kOps.mul, "ffn_moe_down_scaled" + tag, {kWidth, k, t}, {out, mine});
    }
    if (!moe.weigh_input) out = g.node(kOps.mul, "ffn_moe_weighted" + tag, {kWidth, k, t}, {out, weights});
    return g.node(kOther, "ffn_moe_out" + tag, {kWidth, t}, {out});
}

// The embedding of `tokens` tokens, which tells the hook how many there are.
inline GgmlTensor *add_embedding(Graph &g, int tokens) {
    return g.node(kOps.get_rows, "embd", {kWidth, tokens}, {g.leaf("token_embd.weight", {kWidth, 100}), g.leaf("inp_tokens", {tokens})});
}

// Run a graph as ggml's scheduler does: announce nodes until one is wanted, compute that range (asking after each of its nodes but the last
// whether to stop), show the wanted one. Returns whether the whole graph was computed.
inline bool run(const Graph &graph, moetriage::EvalHook &hook, const std::function<void(GgmlTensor *)> &compute) {
    const auto &nodes = graph.nodes;
    for (size_t first = 0; first < nodes.size();) {
        size_t last = first;
        bool wanted = moetriage::EvalHook::on_eval(nodes[last], true, &hook);
        while (!wanted && last + 1 < nodes.size()) wanted = moetriage::EvalHook::on_eval(nodes[++last], true, &hook);
        for (size_t i = first; i <= last; ++i) {
            compute(nodes[i]);
            if (i < last && moetriage::EvalHook::on_abort(&hook)) return false;
        }
        if (wanted && !moetriage::EvalHook::on_eval(nodes[last], false, &hook)) return false;
        first = last + 1;
    }
    return true;
}

}  // namespace fake
