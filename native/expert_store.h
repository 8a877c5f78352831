// The experts of a model in memory: joins the cache's decisions with reads and released pages.
//
// In: for each layer batch the distinct experts it needs. Out: their bytes in place, or the failure of a read. All methods run on the
// eval thread, the only writer of the cache; the lanes of the reader only move bytes.
// Memory rule: an expert's place is fixed (its offset in the tensor), resident or not. Evicting gives its pages back.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "expert_cache.h"
#include "expert_reader.h"
#include "mapping_quota.h"

namespace moetriage {

struct ExpertTensor {
    std::string name;
    int layer = 0;  // MoE layer index
    int32_t shard = 0;
    uint64_t offset = 0;        // of expert 0 in the shard
    uint64_t expert_bytes = 0;  // distance between two experts, in the file and in memory
    std::byte *base = nullptr;  // where expert 0 belongs
    int stage = 0;              // products run stage by stage; a stage's reads may go on while the one before it is computed
};

constexpr int kStages = 4;

struct PrefetchCounters {
    uint64_t issued = 0;     // experts read ahead
    uint64_t hits = 0;       // of those, found by a lookup before they were evicted
    uint64_t cancelled = 0;  // taken back because the layer came first
};

class ExpertStore {
   public:
    ExpertStore(std::vector<ExpertTensor> tensors, int n_layers, int n_expert, ReaderOptions options, std::vector<std::string> shards,
                MappingQuota &mappings = MappingQuota::of_process());
    ~ExpertStore();
    ExpertStore(const ExpertStore &) = delete;
    ExpertStore &operator=(const ExpertStore &) = delete;

    // Let a tensor's reads be waited for with another stage. Only between batches.
    void set_stage(const std::string &name, int stage);

    // Finish what speculation has under way on this layer, so that residency is settled.
    void settle(int layer);

    // Look up the layer's distinct experts, evict, and plan the reads of the missing ones. missed[i] tells whether experts[i] is read.
    void load(int layer, const std::vector<int32_t> &experts, std::vector<uint8_t> &missed);

    // Hand the planned reads to the lanes; must follow every load().
    void start_reads();

    // Wait until a stage of the batch is read. False: a read failed, nothing of this batch is resident, see failure().
    bool wait_stage(int stage);
    // Whether wait_stage() has anything to do (or to report) for this layer's stage.
    bool stage_pending(int layer, int stage) const;

    // Read ahead what the previous token used in the `depth` layers after this one, wrapping into the next token. Only after
    // allow_prefetch().
    void prefetch(int layer, int depth);
    // From now on pages of evicted experts go only to the first stage's reads, which are over when prefetch() is called: a later stage's
    // read might still be about to move away pages that a guess is being read into.
    void allow_prefetch() { stages_with_leavings_ = 1; }
    void remember_used(int layer, const std::vector<int32_t> &experts) { last_used_[layer] = experts; }

    // After a stopped generation: no read is under way any more, and what was not completely loaded is forgotten.
    void quiesce();

    // No read is under way any more and no expert resident, whatever state this was left in. Takes no memory.
    void forget_all();

    // Give everything back for good, before the experts' address space goes; what was counted stays. A second call does nothing.
    void close();

    uint64_t layer_expert_bytes(int layer) const { return layer_bytes_[layer]; }
    ExpertCache &cache() { return cache_; }
    const ExpertCache &cache() const { return cache_; }
    ExpertReader &reader() { return *reader_; }
    const ExpertReader &reader() const { return *reader_; }
    const PrefetchCounters &prefetch_counters() const { return prefetch_; }
    const ReadFailure &failure() const { return failure_; }
    // MoE layer and expert that a byte of a shard belongs to; {-1, -1} if none.
    std::pair<int, int> locate(int32_t shard, uint64_t offset) const;

   private:
    // Pages that an evicted expert leaves behind: those that were its alone, and up to two borders that no neighbour needs.
    struct Leavings {
        std::byte *first = nullptr, *last = nullptr;                    // its own whole pages
        std::byte *released_first = nullptr, *released_last = nullptr;  // the same with the unneeded borders
        size_t own_bytes() const { return static_cast<size_t>(last - first); }
    };

    Leavings leavings(const ExpertTensor &tensor, int expert) const;
    void collect_leavings(const std::vector<int32_t> &slots);
    Leavings take_leavings(size_t bytes);
    bool may_move_to(const ExpertTensor &tensor, int expert);
    void add_releases(std::vector<ReadJob> &jobs);
    void add_reads(const ExpertTensor &tensor, const std::vector<int32_t> &experts, ReadTicket *ticket, std::vector<ReadJob> &jobs);
    bool page_in_use(const ExpertTensor &tensor, const std::byte *page) const;
    void forget(const std::vector<int32_t> &slots);
    void release_now(const std::vector<int32_t> &slots);
    void speculate(int layer, int expert);

    std::vector<ExpertTensor> tensors_;
    std::vector<std::vector<int>> layer_tensors_;
    std::vector<uint64_t> layer_bytes_;
    ExpertCache cache_;
    std::array<ReadTicket, kStages> stages_;
    int loading_layer_ = -1;
    std::vector<int32_t> loading_;  // slots of the current batch whose reads may be under way
    std::vector<int32_t> missing_;
    std::vector<int32_t> evicted_;
    int stages_with_leavings_ = kStages;
    MappingQuota &mappings_;
    size_t mappings_taken_ = 0;
    std::vector<uint8_t> may_move_to_;  // by tensor and expert: its share of the mappings is taken
    std::vector<Leavings> leavings_;    // of this batch's evictions, not yet taken over or released
    std::vector<ReadJob> jobs_;
    std::vector<std::unique_ptr<ReadTicket>> ahead_;  // one ticket per layer for its speculative reads
    std::vector<std::vector<int32_t>> ahead_slots_;
    std::vector<uint8_t> speculated_;
    std::vector<std::vector<int32_t>> last_used_;
    PrefetchCounters prefetch_;
    ReadFailure failure_;
    bool closed_ = false;
    std::unique_ptr<ExpertReader> reader_;  // last: its lanes must end before the tickets they report to
};

}  // namespace moetriage
