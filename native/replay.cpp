#include "replay.h"

#include <algorithm>
#include <climits>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>

namespace moetriage {
namespace {

class RecordedReplay : public Replay {
   public:
    using Replay::Replay;

   protected:
    void look(const Batch &batch) override {
        if (batch.resident == nullptr) throw std::invalid_argument("the trace's residency is missing");
        resident_.assign(batch.resident, batch.resident + batch.cells * options_.top_k);
    }
    void advance(const Batch &, const std::vector<Needed> &) override {}
};

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

    void advance(const Batch &batch, const std::vector<Needed> &needed) override {
        missing_.clear();
        for (const Needed &need : needed) {
            const int32_t slot = cache_.slot(batch.layer, need.expert);
            if constexpr (std::is_same_v<Cache, PolicyCache>) {
                const int32_t next = batch.next_use == nullptr ? INT32_MAX : batch.next_use[need.at];
                cache_.expect(slot, next == INT32_MAX ? kNever : next);
            }
            if (!cache_.lookup(slot)) {
                missing_.push_back(slot);
            } else if (!ahead_.empty()) {
                tally_[batch.phase].ahead_hits += std::exchange(ahead_[static_cast<size_t>(slot)], 0);
            }
        }
        for (const int32_t slot : missing_) cache_.insert(slot);
        evict();
        if (options_.prefetch_depth > 0) look_ahead(batch);
    }

   private:
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

Replay::Replay(std::vector<uint64_t> expert_bytes, int n_expert, ReplayOptions options)
    : expert_bytes_(std::move(expert_bytes)),
      n_expert_(n_expert),
      options_(options),
      seen_(static_cast<size_t>(std::max(0, n_expert)), 0),
      missed_(static_cast<size_t>(std::max(0, n_expert)), 0),
      layer_hits_(expert_bytes_.size(), 0),
      layer_dropped_(expert_bytes_.size(), 0) {
    if (n_expert < 1 || expert_bytes_.empty()) throw std::invalid_argument("a replay needs at least one layer and one expert");
    if (options_.top_k < 1 || options_.keep < 1 || options_.keep > options_.top_k) throw std::invalid_argument("keep is not within top_k");
}

void Replay::feed(const RouteBatches &batches, const RouteMarks &marks) {
    check_batches(batches, expert_bytes_.size(), n_expert_, options_.top_k);
    for (int64_t b = 0; b < batches.count; ++b) {
        const int64_t first = batches.first_cell[b] * options_.top_k;
        const Batch batch = {batches.layer[b],
                             batches.phase[b],
                             batches.first_cell[b + 1] - batches.first_cell[b],
                             batches.expert + first,
                             batches.weight + first,
                             batches.resident == nullptr ? nullptr : batches.resident + first,
                             batches.next_use == nullptr ? nullptr : batches.next_use + first,
                             batches.plan == nullptr ? nullptr : batches.plan + first};
        look(batch);
        const int dropped = decide(batch);
        collect(batch, dropped > 0, needed_);
        count(batch, dropped);
        if (dropped > 0 && !options_.closed_loop) collect(batch, false, routed_);
        mark(batch, first, marks);
        advance(batch, dropped > 0 && !options_.closed_loop ? routed_ : needed_);
    }
}

// Fill dropped_ and return how many routings of the batch are.
int Replay::decide(const Batch &batch) {
    const int top_k = options_.top_k;
    const auto n = static_cast<size_t>(batch.cells * top_k);
    ReplayTally &tally = tally_[batch.phase];
    dropped_.assign(n, 0);
    for (size_t i = 0; i < n; ++i) tally.mass += batch.weight[i];
    int count = 0;
    const bool armed = options_.drop.threshold > 0.0 && (batch.phase == 1 || options_.drop.in_prefill);
    for (size_t at = 0; at < n; at += static_cast<size_t>(top_k)) {
        if (armed) count += decide_drops(options_.drop, batch.weight + at, resident_.data() + at, top_k, dropped_.data() + at);
        if (batch.plan != nullptr) {
            const auto top = static_cast<size_t>(top_slot(batch.weight + at, top_k));
            for (size_t i = at; i < at + static_cast<size_t>(top_k); ++i) {
                if (batch.plan[i] && !resident_[i] && i != at + top) count += 1 - std::exchange(dropped_[i], 1);
            }
        }
        for (int k = options_.keep; k < top_k; ++k) count += 1 - std::exchange(dropped_[at + static_cast<size_t>(k)], 1);
    }
    return count;
}

// The distinct experts of the batch in the order in which the kernel's ids would name them: with drops, a dropped slot stands for its
// token's top expert (apply_drops), and slots that are never routed for nothing.
void Replay::collect(const Batch &batch, bool after_drops, std::vector<Needed> &out) {
    out.clear();
    ++collects_;
    const int top_k = options_.top_k;
    const int slots = after_drops ? options_.keep : top_k;
    for (int64_t at = 0; at < batch.cells * top_k; at += top_k) {
        for (int k = 0; k < slots; ++k) {
            const bool repointed = after_drops && dropped_[static_cast<size_t>(at + k)];
            const int64_t named = at + (repointed ? top_slot(batch.weight + at, options_.keep) : k);
            const int32_t expert = batch.expert[named];
            if (std::exchange(seen_[static_cast<size_t>(expert)], collects_) != collects_) out.push_back({expert, named});
        }
    }
}

void Replay::count(const Batch &batch, int dropped) {
    ReplayTally &tally = tally_[batch.phase];
    const auto layer = static_cast<size_t>(batch.layer);
    uint64_t hits = 0;
    for (const Needed &need : needed_) hits += resident_[static_cast<size_t>(need.at)];
    const uint64_t misses = needed_.size() - hits;
    tally.hits += hits;
    tally.misses += misses;
    tally.read_bytes += misses * expert_bytes_[layer];
    tally.cells += static_cast<uint64_t>(batch.cells);
    tally.tokens += batch.layer == 0 ? static_cast<uint64_t>(batch.cells) : 0;
    tally.dropped += static_cast<uint64_t>(dropped);
    if (batch.phase == 1) {
        layer_hits_[layer] += hits;
        layer_dropped_[layer] += static_cast<uint64_t>(dropped);
    }
    if (dropped == 0) return;
    // seen_ still tells which experts collect() found needed; what else was routed is skipped, counted once each.
    const uint32_t needed_at = collects_++;
    for (int64_t i = 0; i < batch.cells * options_.top_k; ++i) {
        const auto at = static_cast<size_t>(i);
        if (dropped_[at]) tally.mass_dropped += batch.weight[i];
        uint32_t &seen = seen_[static_cast<size_t>(batch.expert[i])];
        if (seen == needed_at || std::exchange(seen, collects_) == collects_) continue;
        ++tally.skipped;
        tally.skipped_bytes += resident_[at] ? 0 : expert_bytes_[layer];
    }
}

void Replay::mark(const Batch &batch, int64_t first, const RouteMarks &marks) {
    const auto n = static_cast<size_t>(batch.cells * options_.top_k);
    if (marks.resident != nullptr) std::copy_n(resident_.data(), n, marks.resident + first);
    if (marks.dropped != nullptr) std::copy_n(dropped_.data(), n, marks.dropped + first);
    if (marks.expert_bytes == nullptr) return;
    // As the engine records it: the first routing that needs a missing expert, and is not dropped itself, carries its bytes.
    for (const Needed &need : needed_) missed_[static_cast<size_t>(need.expert)] = !resident_[static_cast<size_t>(need.at)];
    for (size_t i = 0; i < n; ++i) {
        const bool reads = !dropped_[i] && std::exchange(missed_[static_cast<size_t>(batch.expert[i])], 0);
        marks.expert_bytes[first + static_cast<int64_t>(i)] =
            reads ? static_cast<int64_t>(expert_bytes_[static_cast<size_t>(batch.layer)]) : 0;
    }
}

std::unique_ptr<Replay> recorded_replay(std::vector<uint64_t> expert_bytes, int n_expert, const ReplayOptions &options) {
    return std::make_unique<RecordedReplay>(std::move(expert_bytes), n_expert, options);
}

std::unique_ptr<Replay> cache_replay(const std::string &policy, std::vector<uint64_t> expert_bytes, int n_expert, uint64_t budget,
                                     uint64_t seed, const ReplayOptions &options) {
    if (policy == "lru") {
        ExpertCache cache(expert_bytes, n_expert, budget);
        return std::make_unique<CacheReplay<ExpertCache>>(std::move(cache), std::move(expert_bytes), n_expert, options);
    }
    PolicyCache cache(policy, {expert_bytes, n_expert, budget, seed});
    return std::make_unique<CacheReplay<PolicyCache>>(std::move(cache), std::move(expert_bytes), n_expert, options);
}

void check_batches(const RouteBatches &batches, size_t layers, int n_expert, int top_k) {
    for (int64_t b = 0; b < batches.count; ++b) {
        const bool fits = batches.layer[b] >= 0 && static_cast<size_t>(batches.layer[b]) < layers && batches.phase[b] <= 1 &&
                          batches.first_cell[b] < batches.first_cell[b + 1];
        if (!fits) throw std::invalid_argument("layer batch " + std::to_string(b) + " does not fit the model");
    }
    const int64_t n = batches.count > 0 ? batches.first_cell[batches.count] * top_k : 0;
    bool inside = true;
    for (int64_t i = 0; i < n; ++i) inside &= static_cast<uint32_t>(batches.expert[i]) < static_cast<uint32_t>(n_expert);
    if (!inside) throw std::invalid_argument("a routing names an expert that the model does not have");
}

std::vector<int32_t> next_uses(const RouteBatches &batches, size_t layers, int n_expert, int top_k, int keep) {
    check_batches(batches, layers, n_expert, top_k);
    const auto width = static_cast<size_t>(n_expert);
    std::vector<int32_t> next(layers * width, INT32_MAX);
    const int64_t n = batches.count > 0 ? batches.first_cell[batches.count] * top_k : 0;
    std::vector<int32_t> out(static_cast<size_t>(n), INT32_MAX);
    for (int64_t b = batches.count - 1; b >= 0; --b) {
        int32_t *of_layer = next.data() + static_cast<size_t>(batches.layer[b]) * width;
        const int64_t begin = batches.first_cell[b] * top_k, end = batches.first_cell[b + 1] * top_k;
        for (int64_t i = begin; i < end; ++i) out[static_cast<size_t>(i)] = of_layer[batches.expert[i]];
        for (int64_t i = begin; i < end; ++i) {
            if (i % top_k < keep) of_layer[batches.expert[i]] = static_cast<int32_t>(b);
        }
    }
    return out;
}

}  // namespace moetriage
