// llama.cpp's eval callback: learn the graph, read the routing, decide, load, record.
//
// In: graph nodes in execution order, twice each (before, and for the nodes asked for, after they are computed). Out: experts in memory
// before their products run, edited routings where asked for, routing records and counters. One object per session, used by the eval
// thread alone; only `stop` may be set from elsewhere.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "drop_policy.h"
#include "expert_store.h"
#include "ggml_view.h"
#include "graph_plan.h"
#include "route_log.h"
#include "routing_source.h"

namespace moetriage {

enum class Phase : int8_t { prefill = 0, decode = 1 };

struct HookOptions {
    DropPolicy drop;
    bool stream = true;  // false: llama.cpp holds the experts itself; only routing is read or forced
    bool record_routes = false;
    int prefetch_depth = 0;
};

struct HookCounters {
    uint64_t routed = 0;  // (token, slot) routings in batches where dropping was armed
    uint64_t dropped = 0;
    double mass = 0.0;  // router weight over the same routings
    double mass_dropped = 0.0;
    uint64_t hook_nanos = 0;  // inside the callback, waiting included
    uint64_t wait_nanos = 0;  // of that, waiting for reads
    uint64_t barriers = 0;    // times the graph was interrupted for us
};

// Why an evaluation was stopped. `moved`: the graph no longer matches the plan; learn again and repeat the batch. `out_of_memory`: the
// hook itself found none; every expert is forgotten then.
enum class Stop { none, read_failed, moved, interrupted, bad_routing, out_of_memory };

class EvalHook {
   public:
    EvalHook(const GgmlOps &ops, HookOptions options);

    static bool on_eval(GgmlTensor *node, bool ask, void *self);  // ggml_backend_sched_eval_callback
    static bool on_abort(void *self);                             // ggml_abort_callback

    // Collect the next graph's nodes without computing it, then learn from them. Both may be repeated. finish_learning() throws GraphFault,
    // and std::bad_alloc if memory ran out in between.
    void begin_learning();
    GraphPlan finish_learning(const std::unordered_map<std::string, int> &block_of);

    // Use a plan from now on; layer i of the plan is layer i of the store. The store may be null if options.stream is false.
    void arm(GraphPlan plan, std::unique_ptr<ExpertStore> store);
    void force_routing(std::unique_ptr<ForcedRouting> source) { forced_ = std::move(source); }
    void replay_drops(std::unique_ptr<DroppedSet> source) { replayed_ = std::move(source); }

    // Around one llama_decode. `step`: number of the batch's first token in this generation; `phase_token`: tokens evaluated before in
    // this phase over the whole session (the position in a forced or replayed trace).
    void begin_batch(Phase phase, int32_t step, int64_t phase_token);
    Stop end_batch();

    // No evaluation comes any more: end the lanes and give the experts' memory back. What was counted stays.
    void close() {
        if (store_ != nullptr) store_->close();
    }

    // Called at most every 50 ms while the graph is interrupted; returning true stops the evaluation.
    void set_interrupt_poll(bool (*poll)()) { poll_ = poll; }

    const std::string &fault_node() const { return fault_node_; }
    const std::string &fault_reason() const { return fault_reason_; }
    ExpertStore *store() { return store_.get(); }
    const GraphPlan &plan() const { return plan_; }
    const HookCounters &counters() const { return counters_; }
    RouteColumns take_routes() { return std::exchange(routes_, {}); }

   private:
    enum class Role : uint8_t { ids, weights, wait };
    struct NodeRole {
        Role role;
        int layer;
        int stage;
    };
    struct LayerState {
        GgmlTensor *ids = nullptr;
        GgmlTensor *weights = nullptr;
        bool loaded = false;
        unsigned waits_seen = 0;  // bit per stage whose wait node was announced
        int products = 0;         // announced in this graph
    };
    struct ProductRole {
        int layer;
        int stage;
    };
    // One routing batch: pointers into the graph's tensors and what was decided for them.
    struct Routing {
        int64_t tokens = 0;
        int top_k = 0;
        int64_t first_token = 0;  // of the micro-batch; the last layer may see only its last tokens
        char *ids = nullptr;
        size_t ids_stride = 0;
        float *weights = nullptr;  // contiguous [tokens, top_k], or null if the layer's weights are unknown

        int32_t *expert(int64_t t) const { return reinterpret_cast<int32_t *>(ids + static_cast<size_t>(t) * ids_stride); }
        float *weight(int64_t t) const { return weights + t * top_k; }
    };

    bool ask(GgmlTensor *node);
    bool after(GgmlTensor *node);
    bool ask_role(GgmlTensor *node, const NodeRole &role);
    void begin_graph();
    void guard_product(const GgmlTensor *node);
    void pass_product(int layer);
    bool route_layer(int layer);
    bool read_routing(int layer, Routing &routing);
    bool experts_exist(int layer, const Routing &routing);
    bool force(int layer, const Routing &routing);
    void decide(int layer, const Routing &routing);
    void load(int layer, const Routing &routing);
    void record(int layer, const Routing &routing);
    bool wait_for(int stage);
    int64_t trace_token(const Routing &routing, int64_t t) const { return phase_token_ + done_tokens_ + routing.first_token + t; }
    bool fail(Stop stop, const std::string &node, const std::string &reason);
    void stop_without_memory();
    const NodeRole *find_role(const GgmlTensor *node) const;
    bool needs_weights() const;

    const GgmlOps ops_;
    HookOptions options_;
    GraphPlan plan_;
    std::unique_ptr<ExpertStore> store_;
    std::unique_ptr<ForcedRouting> forced_;
    std::unique_ptr<DroppedSet> replayed_;
    std::unordered_map<std::string_view, NodeRole> roles_;
    std::unordered_map<std::string_view, ProductRole> products_;  // by expert tensor; the keys live in plan_
    std::vector<LayerState> layers_;
    std::vector<int> layer_products_;  // products of each layer in the plan
    std::vector<GgmlTensor *> learning_nodes_;
    bool learning_ = false;
    bool range_open_ = false;  // nodes were asked for since the last computed one
    int last_layer_ = -1;
    int64_t next_tokens_ = 0;   // tokens of the graph that is being announced
    int64_t graph_tokens_ = 0;  // tokens of the current micro-batch
    int64_t done_tokens_ = 0;   // of earlier micro-batches of this batch
    Phase phase_ = Phase::prefill;
    int32_t step_ = 0;
    int64_t phase_token_ = 0;
    std::atomic<bool> abort_{false};
    Stop stop_ = Stop::none;
    std::string fault_node_, fault_reason_;
    bool (*poll_)() = nullptr;
    int64_t next_poll_nanos_ = 0;
    HookCounters counters_;
    RouteColumns routes_;
    // Scratch of one routing batch, kept to spare allocations: per (token, slot), per distinct expert, per expert.
    std::vector<uint8_t> resident_, dropped_;
    std::vector<float> router_weight_;
    std::vector<int32_t> router_expert_, distinct_, used_;
    std::vector<uint8_t> missed_;
    std::vector<int32_t> first_seen_;
};

}  // namespace moetriage
