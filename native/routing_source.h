// Recorded routing as the hook consumes it: what to route (ForcedRouting) or what to drop (DroppedSet), by phase, token and layer.
//
// In: dense arrays made by moetriage.trace.steps. Out: one token's row. Knows no file format.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace moetriage {

// One phase of a trace: rows of tokens, T x L x K, row-major.
struct ForcedPhase {
    int64_t tokens = 0;
    std::vector<int32_t> expert;
    std::vector<float> weight;
    std::vector<uint8_t> present;  // T x L: the last layer of a prefill batch holds only some of its tokens
};

class ForcedRouting {
   public:
    ForcedRouting(int layers, int top_k, ForcedPhase prefill, ForcedPhase decode)
        : layers_(layers), top_k_(top_k), phases_{std::move(prefill), std::move(decode)} {}

    int top_k() const { return top_k_; }

    // The recorded row for token `token` of a phase; the trace is looped, and a phase it does not have borrows the other's rows.
    // A token whose row was not recorded gets the nearest earlier one that was. Null only for an empty trace.
    std::pair<const int32_t *, const float *> row(int phase, int64_t token, int layer) const {
        const ForcedPhase &source = phases_[phase].tokens > 0 ? phases_[phase] : phases_[1 - phase];
        for (int64_t back = 0; back < source.tokens; ++back) {
            const int64_t at = ((token - back) % source.tokens + source.tokens) % source.tokens;
            const int64_t index = at * layers_ + layer;
            if (source.present[index]) return {source.expert.data() + index * top_k_, source.weight.data() + index * top_k_};
        }
        return {nullptr, nullptr};
    }

   private:
    int layers_, top_k_;
    ForcedPhase phases_[2];
};

// T x L x K flags per phase. Beyond the recorded tokens nothing is dropped.
class DroppedSet {
   public:
    DroppedSet(int layers, int top_k, std::vector<uint8_t> prefill, std::vector<uint8_t> decode)
        : layers_(layers), top_k_(top_k), phases_{std::move(prefill), std::move(decode)} {}

    int top_k() const { return top_k_; }

    const uint8_t *row(int phase, int64_t token, int layer) const {
        const auto index = static_cast<size_t>((token * layers_ + layer) * top_k_);
        return index + static_cast<size_t>(top_k_) <= phases_[phase].size() ? phases_[phase].data() + index : nullptr;
    }

   private:
    int layers_, top_k_;
    std::vector<uint8_t> phases_[2];
};

}  // namespace moetriage
