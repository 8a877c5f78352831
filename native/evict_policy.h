// What an eviction order is, other than the engine's LRU: told which slots each batch uses, asked which one should go.
//
// In: slots (layer * n_expert + expert). Out: victims. A policy holds an order, PolicyCache the bytes, so a policy is all that differs
// between two simulated caches. Slots that the current batch uses are out of reach until release() gives them back.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace moetriage {

// Index of a batch that never comes: "not used again".
constexpr int64_t kNever = INT64_MAX;

class EvictPolicy {
   public:
    virtual ~EvictPolicy() = default;

    // The current batch uses a slot: found resident (`hit`) or just made so. `next_use` is the batch that uses it next, for the policy that
    // knows the future; the others ignore it.
    virtual void use(int32_t slot, bool hit, int64_t next_use) = 0;

    // The batch that used it is over: the slot may be chosen again.
    virtual void release(int32_t slot) = 0;

    // Take the slot that should go out of the order and return it, or -1. `over_budget`: the cache holds too much. At time `batch`.
    virtual int32_t victim(bool over_budget, int64_t batch) = 0;

    // A slot that the current batch uses is gone without having been chosen.
    virtual void forget(int32_t slot) = 0;
};

struct EvictSpace {
    std::vector<uint64_t> expert_bytes;  // per MoE layer
    int n_expert = 0;
    uint64_t budget = 0;
    uint64_t seed = 0;  // of the random policy

    size_t slots() const { return expert_bytes.size() * static_cast<size_t>(n_expert); }
    uint64_t bytes(int32_t slot) const { return expert_bytes[static_cast<size_t>(slot / n_expert)]; }
};

// Names that make_policy() knows. "belady" evicts what is used last, "belady-bytes" what is used last weighed by its bytes.
std::unique_ptr<EvictPolicy> make_policy(const std::string &name, const EvictSpace &space);

std::unique_ptr<EvictPolicy> make_lfu(const EvictSpace &space, bool aged);
std::unique_ptr<EvictPolicy> make_s3fifo(const EvictSpace &space);
std::unique_ptr<EvictPolicy> make_partition(const EvictSpace &space);
std::unique_ptr<EvictPolicy> make_random(const EvictSpace &space);
std::unique_ptr<EvictPolicy> make_belady(const EvictSpace &space, bool by_bytes);

}  // namespace moetriage
