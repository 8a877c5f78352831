#include "graph_plan.h"

#include <algorithm>
#include <cstring>

namespace moetriage {
namespace {

constexpr size_t kMaxStages = 4;  // gate, up and down are three
constexpr int kMaxChain = 16;     // longest walk from a weighted product back to the router; build_moe_ffn needs at most seven steps

// ggml names nodes it was given no name for after their position, which differs from graph to graph.
bool stable_name(const GgmlTensor *node) {
    return node->name[0] != '\0' && std::strncmp(node->name, "node_", 5) != 0 && std::strncmp(node->name, "leaf_", 5) != 0;
}

struct Product {
    int index;
    const GgmlTensor *node;
};

class Learner {
   public:
    Learner(const GgmlOps &ops, const std::vector<GgmlTensor *> &nodes, const std::unordered_map<std::string, int> &block_of)
        : ops_(ops), nodes_(nodes), block_of_(block_of) {
        for (size_t i = 0; i < nodes_.size(); ++i) {
            position_[nodes_[i]] = static_cast<int>(i);
            ++name_count_[nodes_[i]->name];
        }
    }

    GraphPlan run() {
        GraphPlan plan;
        find_pinned(plan.pinned);
        for (size_t i = 0; i < nodes_.size(); ++i) {
            const GgmlTensor *node = nodes_[i];
            if (node->op != ops_.mul_mat_id || !streamed(node->src[0])) continue;
            if (contains(plan.pinned, node->src[0]->base()->name)) continue;
            const int block = block_of_.at(node->src[0]->base()->name);
            if (products_.empty() || products_.back().block != block) products_.push_back({block, {}});
            products_.back().products.push_back({static_cast<int>(i), node});
        }
        if (products_.empty()) throw GraphFault("MUL_MAT_ID", "no routed product reads any expert of this file");
        for (const BlockProducts &entry : products_) {
            for (const LayerPlan &other : plan.layers) {
                if (other.block == entry.block) throw GraphFault(entry.products[0].node->name, "the layer's experts run in two places");
            }
            plan.layers.push_back(learn_layer(entry.products));
            plan.layers.back().block = entry.block;
        }
        return plan;
    }

   private:
    struct BlockProducts {
        int block;
        std::vector<Product> products;
    };

    static bool contains(const std::vector<std::string> &names, const std::string &name) {
        return std::find(names.begin(), names.end(), name) != names.end();
    }

    bool streamed(const GgmlTensor *tensor) const { return tensor != nullptr && block_of_.count(tensor->base()->name) != 0; }

    void find_pinned(std::vector<std::string> &pinned) const {
        for (const GgmlTensor *node : nodes_) {
            for (int s = 0; s < 10; ++s) {
                const GgmlTensor *source = node->src[s];
                const bool routed = node->op == ops_.mul_mat_id && s == 0;
                if (!streamed(source) || routed || contains(pinned, source->base()->name)) continue;
                pinned.emplace_back(source->base()->name);
            }
        }
    }

    LayerPlan learn_layer(const std::vector<Product> &products) const {
        const GgmlTensor *ids = products.front().node->src[2];
        for (const Product &product : products) {
            if (product.node->src[2] != ids) throw GraphFault(product.node->name, "routed by other ids than the layer's first product");
        }
        require_usable(ids);
        LayerPlan plan;
        plan.ids = ids->name;
        plan.top_k = static_cast<int>(ids->ne[0]);
        plan.weights = find_weights(ids, products.front().index);
        for (size_t i = 0; i < products.size(); ++i) {
            const std::string wait = i == 0 ? std::string() : node_before(products[i].index, products[i - 1].index);
            if (i == 0 || (!wait.empty() && plan.stages.size() < kMaxStages)) plan.stages.push_back({wait, {}});
            plan.stages.back().tensors.emplace_back(products[i].node->src[0]->base()->name);
        }
        return plan;
    }

    // The name of the last node before position `index`, not earlier than `first`, that can be found again; empty if there is none.
    std::string node_before(int index, int first) const {
        for (int at = index - 1; at >= first; --at) {
            if (usable(nodes_[static_cast<size_t>(at)])) return nodes_[static_cast<size_t>(at)]->name;
        }
        return {};
    }

    bool usable(const GgmlTensor *node) const {
        const auto it = name_count_.find(node->name);
        return stable_name(node) && it != name_count_.end() && it->second == 1;
    }

    void require_usable(const GgmlTensor *ids) const {
        if (!usable(ids)) throw GraphFault(ids->name, "the node that holds the chosen experts has no name of its own to find it by");
        if (ids->type != kTypeI32 || ids->nb[0] != sizeof(int32_t))
            throw GraphFault(ids->name, "the chosen experts are not 32-bit integers");
    }

    bool between(int after, const GgmlTensor *node, int before) const {
        const auto it = position_.find(node);
        return it != position_.end() && it->second > after && it->second < before;
    }

    // The weights that the products are multiplied by: a MUL whose one operand leads back to GET_ROWS(router output, ids).
    std::string find_weights(const GgmlTensor *ids, int first_product) const {
        for (size_t i = 0; i < nodes_.size(); ++i) {
            const GgmlTensor *node = nodes_[i];
            if (node->op != ops_.mul) continue;
            for (const GgmlTensor *operand : {node->src[1], node->src[0]}) {
                if (operand->elements() >= node->elements() || !leads_to_router(operand, ids)) continue;
                return name_of_weights(operand, ids, std::min(first_product, static_cast<int>(i)));
            }
        }
        return {};
    }

    // The name under which the next graph shows the weights: their own, or that of a view of them (a softmax over the chosen ones gets its
    // name after it was reshaped). Empty if they have none, or if they are not plainly there before `before`.
    std::string name_of_weights(const GgmlTensor *operand, const GgmlTensor *ids, int before) const {
        const GgmlTensor *base = operand->base();
        if (base->type != kTypeF32 || base->elements() != ids->ne[0] * ids->ne[1] || operand->view_offs != 0) return {};
        std::string name;
        for (const GgmlTensor *node = operand; node != nullptr; node = node == base ? nullptr : node->src[0]) {
            if (usable(node) && between(-1, node, before)) name = node->name;
        }
        return name;
    }

    bool leads_to_router(const GgmlTensor *tensor, const GgmlTensor *ids) const {
        for (int step = 0; step < kMaxChain && tensor != nullptr && tensor->op != 0; ++step) {
            if (tensor->op == ops_.get_rows) return tensor->src[1] == ids && !is_constant(tensor->src[0]);
            tensor = tensor->src[0];
        }
        return false;
    }

    // Gathered by the same ids, but made of a weight alone (reshaped, repeated): a per-expert scale, not the router's output.
    static bool is_constant(const GgmlTensor *tensor) {
        while (!tensor->is_leaf() && tensor->src[0] != nullptr && tensor->src[1] == nullptr) tensor = tensor->src[0];
        return tensor->is_leaf();
    }

    const GgmlOps &ops_;
    const std::vector<GgmlTensor *> &nodes_;
    const std::unordered_map<std::string, int> &block_of_;
    std::vector<BlockProducts> products_;
    std::unordered_map<const GgmlTensor *, int> position_;
    std::unordered_map<std::string, int> name_count_;
};

}  // namespace

GraphPlan GraphPlan::learn(const GgmlOps &ops, const std::vector<GgmlTensor *> &nodes,
                           const std::unordered_map<std::string, int> &block_of) {
    return Learner(ops, nodes, block_of).run();
}

}  // namespace moetriage
