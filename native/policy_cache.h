// An expert cache with any eviction order: the verbs and the batch rule of ExpertCache, the order of an EvictPolicy.
//
// In: lookups and insertions, as ExpertCache. Out: hits and evicted slots. Only the replay uses it: the engine's LRU is ExpertCache, which
// pays no virtual call.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "evict_policy.h"
#include "expert_cache.h"

namespace moetriage {

class PolicyCache {
   public:
    PolicyCache(const std::string &policy, EvictSpace space);

    int32_t slot(int layer, int expert) const { return layer * space_.n_expert + expert; }
    int layers() const { return static_cast<int>(space_.expert_bytes.size()); }

    void begin_batch();
    // When a slot is used next, for policies that know; to be said before it is looked up.
    void expect(int32_t slot, int64_t next_use) { nodes_[static_cast<size_t>(slot)].next_use = next_use; }
    bool lookup(int32_t slot);
    void insert(int32_t slot);
    const std::vector<int32_t> &evict();
    void erase(int32_t slot);

    bool resident(int32_t slot) const { return nodes_[static_cast<size_t>(slot)].resident; }
    uint64_t resident_bytes() const { return used_; }
    uint64_t budget_bytes() const { return space_.budget; }
    const CacheCounters &counters() const { return counters_; }

   private:
    struct Node {
        int64_t next_use = kNever;
        bool resident = false;
    };
    void remove(int32_t slot);

    EvictSpace space_;
    std::unique_ptr<EvictPolicy> policy_;
    uint64_t used_ = 0;
    size_t residents_ = 0;
    int64_t batch_ = -1;
    std::vector<Node> nodes_;
    std::vector<int32_t> in_use_;  // by the current batch
    std::vector<int32_t> gone_;
    CacheCounters counters_;
};

}  // namespace moetriage
