#include "eval_hook.h"

#include <algorithm>
#include <chrono>
#include <climits>
#include <cstring>
#include <new>

namespace moetriage {
namespace {

constexpr int64_t kPollNanos = 50'000'000;

int64_t now_nanos() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Adds the time it lives to a counter.
class Timed {
   public:
    explicit Timed(uint64_t &sum) : sum_(sum), start_(now_nanos()) {}
    ~Timed() { sum_ += static_cast<uint64_t>(now_nanos() - start_); }

   private:
    uint64_t &sum_;
    int64_t start_;
};

}  // namespace

EvalHook::EvalHook(const GgmlOps &ops, HookOptions options) : ops_(ops), options_(options) {}

bool EvalHook::on_eval(GgmlTensor *node, bool ask, void *self) {
    auto *hook = static_cast<EvalHook *>(self);
    try {
        return ask ? hook->ask(node) : hook->after(node);
    } catch (...) {
        // An exception that left here would have to cross llama.cpp and Python's ctypes, and would end the process on the way.
        hook->stop_without_memory();
        return false;
    }
}

bool EvalHook::on_abort(void *self) {
    return static_cast<EvalHook *>(self)->abort_.load(std::memory_order_relaxed);
}

void EvalHook::begin_learning() {
    learning_ = true;
    learning_nodes_.clear();
    stop_ = Stop::none;
    abort_ = true;  // the graph is announced node by node before its first node runs; there the evaluation ends
}

GraphPlan EvalHook::finish_learning(const std::unordered_map<std::string, int> &block_of) {
    learning_ = false;
    abort_ = false;
    const std::vector<GgmlTensor *> nodes = std::exchange(learning_nodes_, {});
    if (std::exchange(stop_, Stop::none) == Stop::out_of_memory) throw std::bad_alloc();  // some nodes are missing
    return GraphPlan::learn(ops_, nodes, block_of);
}

void EvalHook::arm(GraphPlan plan, std::unique_ptr<ExpertStore> store) {
    plan_ = std::move(plan);
    if (store != nullptr) store_ = std::move(store);
    if (store_ != nullptr && options_.prefetch_depth > 0) store_->allow_prefetch();
    roles_.clear();
    products_.clear();
    layers_.assign(plan_.layers.size(), {});
    layer_products_.assign(plan_.layers.size(), 0);
    for (size_t i = 0; i < plan_.layers.size(); ++i) {
        const LayerPlan &layer = plan_.layers[i];
        const int index = static_cast<int>(i);
        roles_[layer.ids] = {Role::ids, index, 0};
        if (!layer.weights.empty()) roles_[layer.weights] = {Role::weights, index, 0};
        for (size_t stage = 0; stage < layer.stages.size(); ++stage) {
            const StagePlan &part = layer.stages[stage];
            if (!part.wait.empty()) roles_[part.wait] = {Role::wait, index, static_cast<int>(stage)};
            layer_products_[i] += static_cast<int>(part.tensors.size());
            for (const std::string &name : part.tensors) {
                products_[name] = {index, static_cast<int>(stage)};
                // A graph that was learned again may run its products in other stages than the first one did.
                if (store_ != nullptr) store_->set_stage(name, static_cast<int>(stage));
            }
        }
    }
}

void EvalHook::begin_batch(Phase phase, int32_t step, int64_t phase_token) {
    phase_ = phase;
    step_ = step;
    phase_token_ = phase_token;
    learning_ = false;  // left over if learning was interrupted
    for (LayerState &state : layers_) state = {};
    done_tokens_ = graph_tokens_ = next_tokens_ = 0;
    last_layer_ = INT_MAX;  // the first routing of the batch opens a graph
    range_open_ = false;
    stop_ = Stop::none;
    abort_ = false;
    next_poll_nanos_ = now_nanos() + kPollNanos;
}

Stop EvalHook::end_batch() {
    abort_ = false;
    if (stop_ == Stop::none || store_ == nullptr) return stop_;
    try {
        if (stop_ != Stop::out_of_memory) store_->quiesce();
    } catch (const std::bad_alloc &) {
        stop_without_memory();
        abort_ = false;
    }
    if (stop_ == Stop::out_of_memory) store_->forget_all();  // it may have been left in the middle of anything
    return stop_;
}

bool EvalHook::needs_weights() const {
    return options_.record_routes || options_.drop.threshold > 0.0 || forced_ != nullptr || replayed_ != nullptr;
}

const EvalHook::NodeRole *EvalHook::find_role(const GgmlTensor *node) const {
    const auto it = roles_.find(std::string_view(node->name));
    return it == roles_.end() ? nullptr : &it->second;
}

bool EvalHook::ask(GgmlTensor *node) {
    if (learning_) {
        learning_nodes_.push_back(node);
        return false;
    }
    if (stop_ != Stop::none) return false;
    bool wanted = false;
    if (node->op == ops_.mul_mat_id) {
        guard_product(node);
    } else if (node->op == ops_.get_rows && node->src[0]->is_leaf() && node->src[1]->is_leaf()) {
        next_tokens_ = node->ne[1];  // the token embedding: one row a token
    }
    if (const NodeRole *role = find_role(node)) wanted = ask_role(node, *role);
    range_open_ = true;
    return wanted;
}

bool EvalHook::ask_role(GgmlTensor *node, const NodeRole &role) {
    LayerState &state = layers_[role.layer];
    const bool at_weights = needs_weights() && !plan_.layers[role.layer].weights.empty();
    switch (role.role) {
        case Role::ids:
            if (role.layer <= last_layer_) begin_graph();
            last_layer_ = role.layer;
            state.ids = node;
            state.weights = nullptr;
            return !at_weights;
        case Role::weights:
            state.weights = node;
            return at_weights && state.ids != nullptr;
        case Role::wait:
            state.waits_seen |= 1u << role.stage;
            return store_ != nullptr && store_->stage_pending(role.layer, role.stage);
    }
    return false;
}

void EvalHook::begin_graph() {
    done_tokens_ += graph_tokens_;
    graph_tokens_ = next_tokens_;
    for (LayerState &state : layers_) state = {};
}

// Before a product is computed its experts must be there. In a graph that matches the plan they are; this holds for any other graph too.
void EvalHook::guard_product(const GgmlTensor *node) {
    if (store_ == nullptr && !needs_weights()) return;
    const auto it = products_.find(std::string_view(node->src[0]->base()->name));
    if (it == products_.end()) return;
    const ProductRole product = it->second;
    LayerState &state = layers_[product.layer];
    if (state.loaded) {
        const bool announced = product.stage == 0 || (state.waits_seen & (1u << product.stage)) != 0;
        if (!announced && store_ != nullptr && store_->stage_pending(product.layer, product.stage)) wait_for(product.stage);
        pass_product(product.layer);
        return;
    }
    if (range_open_) {
        // The ids may not be computed yet: stop before this product and learn the graph again.
        fail(Stop::moved, node->name, "its experts were not loaded when the graph reached it");
        return;
    }
    Timed timed(counters_.hook_nanos);
    state.ids = node->src[2];
    state.weights = nullptr;
    route_layer(product.layer);
    for (int stage = 1; stage < kStages; ++stage) wait_for(stage);
    pass_product(product.layer);
}

// After its last product a layer counts as not loaded: a graph that comes without announcing its routing under the known name must not
// run on what another graph had loaded.
void EvalHook::pass_product(int layer) {
    LayerState &state = layers_[static_cast<size_t>(layer)];
    if (++state.products == layer_products_[static_cast<size_t>(layer)]) state.loaded = false;
}

bool EvalHook::after(GgmlTensor *node) {
    range_open_ = false;
    if (stop_ != Stop::none) return false;
    const NodeRole *role = find_role(node);
    if (role == nullptr) return true;
    ++counters_.barriers;
    Timed timed(counters_.hook_nanos);
    return role->role == Role::wait ? wait_for(role->stage) : route_layer(role->layer);
}

bool EvalHook::route_layer(int layer) {
    if (poll_ != nullptr && now_nanos() >= next_poll_nanos_) {
        next_poll_nanos_ = now_nanos() + kPollNanos;
        if (poll_()) return fail(Stop::interrupted, "", "interrupted");
    }
    Routing routing;
    if (!read_routing(layer, routing)) return false;
    layers_[layer].loaded = true;
    if (routing.tokens == 0) return true;
    if (store_ != nullptr) store_->settle(layer);
    if (forced_ != nullptr && !force(layer, routing)) return false;
    decide(layer, routing);
    load(layer, routing);
    if (stop_ != Stop::none) return false;
    if (options_.record_routes) record(layer, routing);
    if (store_ == nullptr) return true;
    {
        // Waking the lanes is part of reading: on few cores they run at once, in this thread's place.
        Timed timed(counters_.wait_nanos);
        store_->start_reads();
    }
    if (!wait_for(0)) return false;
    if (options_.prefetch_depth > 0 && phase_ == Phase::decode) store_->prefetch(layer, options_.prefetch_depth);
    return true;
}

bool EvalHook::wait_for(int stage) {
    if (store_ == nullptr || stop_ != Stop::none) return stop_ == Stop::none;
    bool ok = false;
    {
        Timed timed(counters_.wait_nanos);
        ok = store_->wait_stage(stage);
    }
    return ok || fail(Stop::read_failed, "", store_->failure().reason);
}

bool EvalHook::fail(Stop stop, const std::string &node, const std::string &reason) {
    if (stop_ == Stop::none) {
        stop_ = stop;
        fault_node_ = node;
        fault_reason_ = reason;
    }
    abort_ = true;
    return false;
}

void EvalHook::stop_without_memory() {
    stop_ = Stop::out_of_memory;
    abort_ = true;
    fault_node_.clear();
    fault_reason_.clear();
}

}  // namespace moetriage
