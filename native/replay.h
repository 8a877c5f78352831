// The engine's batch flow without a model and without reads: recorded routing in, what a cache and a drop policy make of it out.
//
// In: routing in layer batches, in pieces that end where a batch ends. Out: counts per phase and, on request, one mark per routing. Drives
// ExpertCache (LRU) or PolicyCache and decide_drops(); the order of steps is that of EvalHook::decide(), ExpertStore::load() and
// ExpertStore::prefetch(), with a reader whose reads take no time. A test holds both against each other, routing by routing.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "drop_policy.h"
#include "expert_cache.h"
#include "policy_cache.h"

namespace moetriage {

// Views of a piece of a trace. A cell is the top_k routings of one token in one layer, a batch all cells of a layer's evaluation.
struct RouteBatches {
    int64_t count = 0;                    // layer batches
    const int32_t *layer = nullptr;       // MoE layer index [count]
    const uint8_t *phase = nullptr;       // 0 prefill, 1 decode [count]
    const int64_t *first_cell = nullptr;  // [count + 1], the last is the number of cells
    const int32_t *expert = nullptr;      // [cells, top_k]
    const float *weight = nullptr;        // [cells, top_k]
    const uint8_t *resident = nullptr;    // [cells, top_k], what a run recorded; only RecordedReplay reads it
    const int32_t *next_use = nullptr;    // [cells, top_k], see next_uses(); only for policies that know the future
    const uint8_t *plan = nullptr;        // [cells, top_k], 1: drop if not resident (never the top expert); beside the drop policy
};

// One mark per routing, [cells, top_k] each; null pointers are left out.
struct RouteMarks {
    uint8_t *resident = nullptr;
    uint8_t *dropped = nullptr;
    int64_t *expert_bytes = nullptr;
};

struct ReplayOptions {
    DropPolicy drop;
    int top_k = 0;
    int keep = 0;              // of the top_k slots; fewer is --n-expert-used
    bool closed_loop = false;  // what is dropped is not loaded; if not, the cache sees all that was routed
    int prefetch_depth = 0;
};

// Counts of one phase. Distinct experts of a batch are hits, misses or skipped (not needed once the policy has spoken).
struct ReplayTally {
    uint64_t tokens = 0;  // cells of the first MoE layer
    uint64_t cells = 0;
    uint64_t dropped = 0;  // routings
    uint64_t hits = 0;
    uint64_t misses = 0;
    uint64_t skipped = 0;
    uint64_t read_bytes = 0;     // misses and read-ahead
    uint64_t skipped_bytes = 0;  // of the skipped that were not resident
    uint64_t ahead = 0;          // experts read ahead
    uint64_t ahead_hits = 0;     // of those, hit before they were evicted
    uint64_t ahead_bytes = 0;
    double mass = 0.0;  // router weight
    double mass_dropped = 0.0;
};

class Replay {
   public:
    Replay(std::vector<uint64_t> expert_bytes, int n_expert, ReplayOptions options);
    virtual ~Replay() = default;

    // Throws std::invalid_argument for batches that do not fit the model; nothing is counted then.
    void feed(const RouteBatches &batches, const RouteMarks &marks);

    const ReplayTally &tally(int phase) const { return tally_[phase]; }
    virtual CacheCounters cache_counters() const { return {}; }
    virtual uint64_t resident_bytes() const { return 0; }
    const std::vector<uint64_t> &layer_hits() const { return layer_hits_; }        // decode, per MoE layer
    const std::vector<uint64_t> &layer_dropped() const { return layer_dropped_; }  // decode, per MoE layer
    int top_k() const { return options_.top_k; }

   protected:
    struct Batch {
        int layer;
        int phase;
        int64_t cells;
        const int32_t *expert;
        const float *weight;
        const uint8_t *resident;
        const int32_t *next_use;
        const uint8_t *plan;
    };
    // A distinct expert of a batch and the routing that names it first.
    struct Needed {
        int32_t expert;
        int64_t at;
    };

    // Begin a batch and fill resident_ for all of its routings.
    virtual void look(const Batch &batch) = 0;
    // All of look() to advance() in one loop, where nothing is dropped, marked or read ahead: 1.5 times as fast. False if there is no
    // cache.
    virtual bool feed_plain(const RouteBatches &) { return false; }
    Batch batch_at(const RouteBatches &batches, int64_t b) const;
    void count(int layer, int phase, int64_t cells, uint64_t hits, uint64_t misses);
    // The distinct experts of a batch; see the definition for what drops change.
    void collect(const Batch &batch, bool after_drops, std::vector<Needed> &out);

    // Let the cache see the batch; `needed` are its distinct experts in order of first appearance.
    virtual void advance(const Batch &batch, const std::vector<Needed> &needed) = 0;

    const std::vector<uint64_t> expert_bytes_;
    const int n_expert_;
    const ReplayOptions options_;
    ReplayTally tally_[2];
    std::vector<uint8_t> resident_, dropped_;
    std::vector<Needed> needed_;

   private:
    int decide(const Batch &batch);
    uint64_t hits_among(const std::vector<Needed> &needed) const;
    void count_skipped(const Batch &batch, int dropped);
    void mark(const Batch &batch, int64_t first, const RouteMarks &marks);

    std::vector<Needed> routed_;
    std::vector<uint32_t> seen_;  // per expert: the collect() that saw it last
    uint32_t collects_ = 0;
    std::vector<uint8_t> missed_;  // per expert, of the current batch
    std::vector<uint64_t> layer_hits_, layer_dropped_;
};

// The trace's own residency: what dropping would have spared in that run, were it to change nothing else.
std::unique_ptr<Replay> recorded_replay(std::vector<uint64_t> expert_bytes, int n_expert, const ReplayOptions &options);

// A simulated cache: "lru" is the engine's ExpertCache, other names are make_policy()'s.
std::unique_ptr<Replay> cache_replay(const std::string &policy, std::vector<uint64_t> expert_bytes, int n_expert, uint64_t budget,
                                     uint64_t seed, const ReplayOptions &options);

// Throws std::invalid_argument for batches that a model of this shape cannot have.
void check_batches(const RouteBatches &batches, size_t layers, int n_expert, int top_k);

// For each routing the next batch that needs its expert among the first `keep` slots, or INT32_MAX; batches are counted from 0.
std::vector<int32_t> next_uses(const RouteBatches &batches, size_t layers, int n_expert, int top_k, int keep);

}  // namespace moetriage
