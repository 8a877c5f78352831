// The replay with a simulated cache: what ExpertStore does around ExpertCache, without memory and reads. See replay.h.
#include <algorithm>
#include <climits>
#include <string>
#include <type_traits>
#include <utility>

#include "replay.h"

namespace moetriage {
namespace {

template <typename Cache>
class CacheReplay : public Replay {
   public:
    CacheReplay(Cache cache, std::vector<uint64_t> expert_bytes, int n_expert, const ReplayOptions &options)
        : Replay(std::move(expert_bytes), n_expert, options),
          cache_(std::move(cache)),
          last_used_(expert_bytes_.size()),
          ahead_(options.prefetch_depth > 0 ? expert_bytes_.size() * static_cast<size_t>(n_expert) : 0, 0) {}

    CacheCounters cache_counters() const override { return cache_.counters(); }
    uint64_t resident_bytes() const override { return cache_.resident_bytes(); }

   protected:
    void look(const Batch &batch) override {
        cache_.begin_batch();
        const int32_t first = cache_.slot(batch.layer, 0);
        const auto n = static_cast<size_t>(batch.cells * options_.top_k);
        resident_.resize(n);
        for (size_t i = 0; i < n; ++i) resident_[i] = cache_.resident(first + batch.expert[i]);
    }

    bool feed_plain(const RouteBatches &batches) override {
        double mass[2] = {0.0, 0.0};
        for (int64_t b = 0; b < batches.count; ++b) {
            const Batch batch = batch_at(batches, b);
            const int64_t n = batch.cells * options_.top_k;
            for (int64_t i = 0; i < n; ++i) mass[batch.phase] += batch.weight[i];
            cache_.begin_batch();
            missing_.clear();
            uint64_t distinct = static_cast<uint64_t>(n);
            if (batch.cells == 1) {  // a routing names no expert twice
                for (int64_t i = 0; i < n; ++i) look_up(batch, batch.expert[i], i);
            } else {
                collect(batch, false, needed_);
                distinct = needed_.size();
                for (const Needed &need : needed_) look_up(batch, need.expert, need.at);
            }
            for (const int32_t slot : missing_) cache_.insert(slot);
            // LRU has nothing to do where nothing came in, unless the batch before was alone above the budget.
            if (!std::is_same_v<Cache, ExpertCache> || !missing_.empty() || cache_.resident_bytes() > cache_.budget_bytes()) cache_.evict();
            count(batch.layer, batch.phase, batch.cells, distinct - missing_.size(), missing_.size());
        }
        for (const int phase : {0, 1}) tally_[phase].mass += mass[phase];
        return true;
    }

    void advance(const Batch &batch, const std::vector<Needed> &needed) override {
        missing_.clear();
        for (const Needed &need : needed) {
            if (!look_up(batch, need.expert, need.at) || ahead_.empty()) continue;
            const auto slot = static_cast<size_t>(cache_.slot(batch.layer, need.expert));
            tally_[batch.phase].ahead_hits += std::exchange(ahead_[slot], 0);
        }
        for (const int32_t slot : missing_) cache_.insert(slot);
        evict();
        if (options_.prefetch_depth > 0) look_ahead(batch);
    }

   private:
    bool look_up(const Batch &batch, int32_t expert, int64_t at) {
        const int32_t slot = cache_.slot(batch.layer, expert);
        if constexpr (std::is_same_v<Cache, PolicyCache>) {
            const int32_t next = batch.next_use == nullptr ? INT32_MAX : batch.next_use[at];
            cache_.expect(slot, next == INT32_MAX ? kNever : next);
        }
        const bool hit = cache_.lookup(slot);
        if (!hit) missing_.push_back(slot);
        return hit;
    }

    void evict() {
        const std::vector<int32_t> &gone = cache_.evict();
        if (ahead_.empty()) return;
        for (const int32_t slot : gone) ahead_[static_cast<size_t>(slot)] = 0;
    }

    void look_ahead(const Batch &batch) {
        remember(batch);
        if (batch.phase == 0) return;
        const int layers = static_cast<int>(expert_bytes_.size());
        for (int ahead = 1; ahead <= std::min(options_.prefetch_depth, layers - 1); ++ahead) {
            const int target = (batch.layer + ahead) % layers;
            for (const int32_t expert : last_used_[static_cast<size_t>(target)]) speculate(target, expert, tally_[batch.phase]);
        }
    }

    // What the batch's last token used; a dropped slot was repointed at an expert that is there anyway.
    void remember(const Batch &batch) {
        std::vector<int32_t> &used = last_used_[static_cast<size_t>(batch.layer)];
        used.clear();
        for (int64_t at = (batch.cells - 1) * options_.top_k; at < batch.cells * options_.top_k; ++at) {
            if (!options_.closed_loop || !dropped_[static_cast<size_t>(at)]) used.push_back(batch.expert[at]);
        }
    }

    void speculate(int layer, int32_t expert, ReplayTally &tally) {
        const int32_t slot = cache_.slot(layer, expert);
        if (cache_.resident(slot)) return;
        cache_.insert(slot);
        evict();
        if (cache_.resident_bytes() > cache_.budget_bytes()) {
            cache_.erase(slot);
            return;
        }
        ahead_[static_cast<size_t>(slot)] = 1;
        ++tally.ahead;
        tally.ahead_bytes += expert_bytes_[static_cast<size_t>(layer)];
        tally.read_bytes += expert_bytes_[static_cast<size_t>(layer)];
    }

    Cache cache_;
    std::vector<int32_t> missing_;
    std::vector<std::vector<int32_t>> last_used_;
    std::vector<uint8_t> ahead_;  // per slot: read ahead and not looked up since
};

}  // namespace

std::unique_ptr<Replay> cache_replay(const std::string &policy, std::vector<uint64_t> expert_bytes, int n_expert, uint64_t budget,
                                     uint64_t seed, const ReplayOptions &options) {
    if (policy == "lru") {
        ExpertCache cache(expert_bytes, n_expert, budget);
        return std::make_unique<CacheReplay<ExpertCache>>(std::move(cache), std::move(expert_bytes), n_expert, options);
    }
    PolicyCache cache(policy, {expert_bytes, n_expert, budget, seed});
    return std::make_unique<CacheReplay<PolicyCache>>(std::move(cache), std::move(expert_bytes), n_expert, options);
}

}  // namespace moetriage
