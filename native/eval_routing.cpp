// The part of EvalHook that works on one layer's routing, once it is in memory: read it, replace it, decide, load, record.

#include <algorithm>
#include <utility>

#include "eval_hook.h"

namespace moetriage {

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
    return experts_exist(layer, routing);
}

// NaN logits have made routers choose what there is not; everything behind this indexes by the ids.
bool EvalHook::experts_exist(int layer, const Routing &routing) {
    if (store_ == nullptr) return true;
    const int32_t experts = store_->cache().experts();
    for (int64_t t = 0; t < routing.tokens; ++t) {
        for (const int32_t *expert = routing.expert(t), *end = expert + routing.top_k; expert < end; ++expert) {
            if (*expert >= 0 && *expert < experts) continue;
            return fail(Stop::bad_routing, layers_[layer].ids->name, "the router chose an expert that does not exist");
        }
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
            routes_.add(static_cast<int8_t>(phase_), step, block, static_cast<int16_t>(k), expert, router_weight_[at], resident_[at] != 0,
                        bytes, dropped_[at] != 0);
        }
    }
}

}  // namespace moetriage
