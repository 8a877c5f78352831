// Which experts are resident: LRU order over (layer, expert), a budget in bytes, counters. Knows no file and no memory.
//
// In: lookups and insertions of slots (layer * n_expert + expert), one per distinct expert and layer batch. Out: hits, and the slots
// that had to go. The engine and the replay drive the same object, so a simulated hit rate and a live one can be compared.
// Batch rule: whatever a batch touched is never evicted by that batch, so residency exceeds the budget by at most one layer's batch.
#pragma once

#include <cstdint>
#include <vector>

namespace moetriage {

struct CacheCounters {
    uint64_t hits = 0;
    uint64_t misses = 0;
    uint64_t evictions = 0;
    uint64_t peak_bytes = 0;
};

class ExpertCache {
   public:
    // expert_bytes[l]: bytes of one expert of MoE layer l. A budget of 0 is off: nothing outlives the batch that read it.
    ExpertCache(std::vector<uint64_t> expert_bytes, int n_expert, uint64_t budget_bytes);

    int32_t slot(int layer, int expert) const { return layer * n_expert_ + expert; }
    int layer_of(int32_t slot) const { return slot / n_expert_; }
    int expert_of(int32_t slot) const { return slot % n_expert_; }
    int layers() const { return static_cast<int>(expert_bytes_.size()); }
    int experts() const { return n_expert_; }

    // Start a layer batch. Returns the slots that go before it (only with the cache off: then every resident one).
    const std::vector<int32_t> &begin_batch();

    // Count one lookup; a hit becomes the most recent. A miss is not inserted: the caller may decline to load it.
    bool lookup(int32_t slot);

    // Make a slot the most recent resident without counting a lookup (after a miss, or ahead of one).
    void insert(int32_t slot);

    // Evict least recent slots until the budget holds with `room` bytes to spare, never one of the current batch. Returns them, oldest
    // first.
    const std::vector<int32_t> &evict(uint64_t room = 0);

    // Forget a slot that could not be read (no eviction is counted).
    void erase(int32_t slot);
    void clear();
    void set_budget(uint64_t budget_bytes) { budget_ = budget_bytes; }
    void reset_counters() { counters_ = {0, 0, 0, used_}; }

    bool resident(int32_t slot) const { return where_[slot].resident; }
    uint64_t resident_bytes() const { return used_; }
    uint64_t budget_bytes() const { return budget_; }
    const CacheCounters &counters() const { return counters_; }

   private:
    struct Node {
        int32_t older = -1;
        int32_t newer = -1;
        uint32_t batch = 0;
        bool resident = false;
    };

    void unlink(int32_t slot);
    void push_newest(int32_t slot);
    void remove(int32_t slot);

    std::vector<uint64_t> expert_bytes_;
    int n_expert_;
    uint64_t budget_;
    uint64_t used_ = 0;
    uint32_t batch_ = 0;
    int32_t oldest_ = -1;
    int32_t newest_ = -1;
    std::vector<Node> where_;
    std::vector<int32_t> gone_;
    CacheCounters counters_;
};

}  // namespace moetriage
