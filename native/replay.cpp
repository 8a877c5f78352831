#include "replay.h"

#include <algorithm>
#include <climits>
#include <stdexcept>
#include <string>
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
    const bool unmarked = marks.resident == nullptr && marks.dropped == nullptr && marks.expert_bytes == nullptr;
    const bool lossless = !(options_.drop.threshold > 0.0) && options_.keep == options_.top_k && batches.plan == nullptr;
    if (unmarked && lossless && options_.prefetch_depth == 0 && feed_plain(batches)) return;
    for (int64_t b = 0; b < batches.count; ++b) {
        const int64_t first = batches.first_cell[b] * options_.top_k;
        const Batch batch = batch_at(batches, b);
        look(batch);
        const int dropped = decide(batch);
        collect(batch, dropped > 0, needed_);
        const uint64_t hits = hits_among(needed_);
        count(batch.layer, batch.phase, batch.cells, hits, needed_.size() - hits);
        if (dropped > 0) count_skipped(batch, dropped);
        if (dropped > 0 && !options_.closed_loop) collect(batch, false, routed_);
        mark(batch, first, marks);
        advance(batch, dropped > 0 && !options_.closed_loop ? routed_ : needed_);
    }
}

Replay::Batch Replay::batch_at(const RouteBatches &batches, int64_t b) const {
    const int64_t first = batches.first_cell[b] * options_.top_k;
    const auto at = [first](const auto *routings) { return routings == nullptr ? nullptr : routings + first; };
    return {batches.layer[b],     batches.phase[b],   batches.first_cell[b + 1] - batches.first_cell[b],
            at(batches.expert),   at(batches.weight), at(batches.resident),
            at(batches.next_use), at(batches.plan)};
}

uint64_t Replay::hits_among(const std::vector<Needed> &needed) const {
    uint64_t hits = 0;
    for (const Needed &need : needed) hits += resident_[static_cast<size_t>(need.at)];
    return hits;
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

void Replay::count(int layer, int phase, int64_t cells, uint64_t hits, uint64_t misses) {
    ReplayTally &tally = tally_[phase];
    const auto at = static_cast<size_t>(layer);
    tally.hits += hits;
    tally.misses += misses;
    tally.read_bytes += misses * expert_bytes_[at];
    tally.cells += static_cast<uint64_t>(cells);
    tally.tokens += layer == 0 ? static_cast<uint64_t>(cells) : 0;
    if (phase == 1) layer_hits_[at] += hits;
}

void Replay::count_skipped(const Batch &batch, int dropped) {
    ReplayTally &tally = tally_[batch.phase];
    const auto layer = static_cast<size_t>(batch.layer);
    tally.dropped += static_cast<uint64_t>(dropped);
    if (batch.phase == 1) layer_dropped_[layer] += static_cast<uint64_t>(dropped);
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
