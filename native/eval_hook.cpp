#include "eval_hook.h"

#include <algorithm>
#include <chrono>
#include <climits>
#include <cstring>

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
    return ask ? hook->ask(node) : hook->after(node);
}

bool EvalHook::on_abort(void *self) {
    return static_cast<EvalHook *>(self)->abort_.load(std::memory_order_relaxed);
}

void EvalHook::begin_learning() {
    learning_ = true;
    learning_nodes_.clear();
    abort_ = true;  // the graph is announced node by node before its first node runs; there the evaluation ends
}

GraphPlan EvalHook::finish_learning(const std::unordered_map<std::string, int> &block_of) {
    learning_ = false;
    abort_ = false;
    const std::vector<GgmlTensor *> nodes = std::exchange(learning_nodes_, {});
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
    if (stop_ != Stop::none && store_ != nullptr) store_->quiesce();
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

bool EvalHook::read_routing(int layer, Routing &routing) {
    const GgmlTensor *ids = layers_[layer].ids;
    const GgmlTensor *weights = layers_[layer].weights;
    routing.tokens = ids->ne[1];
    routing.top_k = static_cast<int>(ids->ne[0]);
    routing.first_token = std::max<int64_t>(0, graph_tokens_ - routing.tokens);
    routing.ids = static_cast<char *>(ids->data);
    routing.ids_stride = ids->nb[1];
    if (weights != nullptr) {
        if (weights->elements() != routing.tokens * routing.top_k) return fail(Stop::moved, weights->name, "its shape changed");
        routing.weights = static_cast<float *>(weights->data);
    }
    return true;
}

bool EvalHook::force(int layer, const Routing &routing) {
    if (routing.weights == nullptr || routing.top_k != forced_->top_k()) {
        return fail(Stop::bad_routing, layers_[layer].ids->name, "this layer's routing cannot be replaced by the trace's");
    }
    for (int64_t t = 0; t < routing.tokens; ++t) {
        const auto [expert, weight] = forced_->row(static_cast<int>(phase_), trace_token(routing, t), layer);
        if (expert == nullptr) return fail(Stop::bad_routing, layers_[layer].ids->name, "the trace has no row for this layer");
        std::copy_n(expert, routing.top_k, routing.expert(t));
        std::copy_n(weight, routing.top_k, routing.weight(t));
    }
    return true;
}

// Fill router_expert_, router_weight_, resident_ and dropped_ for the batch, and apply the drops to the graph's tensors.
void EvalHook::decide(int layer, const Routing &routing) {
    const auto n = static_cast<size_t>(routing.tokens) * static_cast<size_t>(routing.top_k);
    router_expert_.resize(n);
    router_weight_.assign(n, 0.0f);
    resident_.assign(n, 1);
    dropped_.assign(n, 0);
    const bool allowed = routing.weights != nullptr && (phase_ == Phase::decode || options_.drop.in_prefill);
    const bool armed = allowed && options_.drop.threshold > 0.0;
    for (int64_t t = 0; t < routing.tokens; ++t) {
        const size_t at = static_cast<size_t>(t) * static_cast<size_t>(routing.top_k);
        int32_t *expert = routing.expert(t);
        std::copy_n(expert, routing.top_k, router_expert_.data() + at);
        if (store_ != nullptr) {
            for (int k = 0; k < routing.top_k; ++k) resident_[at + k] = store_->cache().resident(store_->cache().slot(layer, expert[k]));
        }
        if (routing.weights == nullptr) continue;
        float *weight = routing.weight(t);
        std::copy_n(weight, routing.top_k, router_weight_.data() + at);
        if (armed) {
            decide_drops(options_.drop, weight, resident_.data() + at, routing.top_k, dropped_.data() + at);
        } else if (replayed_ != nullptr) {
            const uint8_t *row = replayed_->row(static_cast<int>(phase_), trace_token(routing, t), layer);
            if (row == nullptr) continue;
            std::copy_n(row, routing.top_k, dropped_.data() + at);
        } else {
            continue;
        }
        counters_.routed += static_cast<uint64_t>(routing.top_k);
        for (int k = 0; k < routing.top_k; ++k) {
            counters_.dropped += dropped_[at + k];
            counters_.mass += weight[k];
        }
        counters_.mass_dropped += apply_drops(options_.drop, dropped_.data() + at, routing.top_k, weight, expert);
    }
}

// Look the batch's distinct experts up in the order they first appear, and start reading the missing ones.
void EvalHook::load(int layer, const Routing &routing) {
    if (store_ == nullptr) return;
    const int experts = store_->cache().experts();
    first_seen_.assign(static_cast<size_t>(experts), -1);
    distinct_.clear();
    for (int64_t t = 0; t < routing.tokens; ++t) {
        const int32_t *expert = routing.expert(t);
        for (int k = 0; k < routing.top_k; ++k) {
            if (expert[k] < 0 || expert[k] >= experts) {
                fail(Stop::bad_routing, layers_[layer].ids->name, "the router chose an expert that does not exist");
                return;
            }
            if (first_seen_[expert[k]] >= 0) continue;
            first_seen_[expert[k]] = static_cast<int32_t>(distinct_.size());
            distinct_.push_back(expert[k]);
        }
    }
    store_->load(layer, distinct_, missed_);
    const int32_t *last = routing.expert(routing.tokens - 1);
    used_.assign(last, last + routing.top_k);
    store_->remember_used(layer, used_);
}

void EvalHook::record(int layer, const Routing &routing) {
    const auto block = static_cast<int16_t>(plan_.layers[static_cast<size_t>(layer)].block);
    for (int64_t t = 0; t < routing.tokens; ++t) {
        for (int k = 0; k < routing.top_k; ++k) {
            const size_t at = static_cast<size_t>(t * routing.top_k + k);
            const int32_t expert = router_expert_[at];
            int64_t bytes = 0;
            if (store_ != nullptr && !dropped_[at] && first_seen_[expert] >= 0) {
                // The first routing that needs a missing expert carries its bytes.
                uint8_t &missed = missed_[static_cast<size_t>(first_seen_[expert])];
                if (std::exchange(missed, 0)) bytes = static_cast<int64_t>(store_->layer_expert_bytes(layer));
            }
            const auto step = static_cast<int32_t>(step_ + done_tokens_ + routing.first_token + t);
            routes_.add(static_cast<int8_t>(phase_), step, block, static_cast<int16_t>(k), expert,
                        router_weight_[at], resident_[at] != 0, bytes, dropped_[at] != 0);
        }
    }
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

}  // namespace moetriage
