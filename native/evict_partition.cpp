// One LRU order per layer: each layer has a share of the budget in proportion to its experts' bytes, so all hold equally many experts.
//
// The batch rule of the engine stays: where a batch alone is above its layer's share, the layers furthest above theirs give way.
#include <cstdint>
#include <memory>
#include <vector>

#include "evict_policy.h"
#include "slot_list.h"

namespace moetriage {
namespace {

class Partition : public EvictPolicy {
   public:
    explicit Partition(const EvictSpace &space) : space_(space), links_(space.slots()), in_use_(space.slots(), 0) {
        long double total = 0;
        for (const uint64_t bytes : space.expert_bytes) total += static_cast<long double>(bytes);
        for (const uint64_t bytes : space.expert_bytes) {
            share_.push_back(static_cast<uint64_t>(static_cast<long double>(space.budget) * static_cast<long double>(bytes) / total));
        }
        layers_.resize(space.expert_bytes.size());
    }

    void use(int32_t slot, bool hit, int64_t) override {
        const size_t layer = layer_of(slot);
        if (hit) layers_[layer].remove(links_, slot, space_.bytes(slot));
        layers_[layer].push(links_, slot, space_.bytes(slot));
        in_use_[static_cast<size_t>(slot)] = 1;
        last_layer_ = layer;
    }
    void release(int32_t slot) override { in_use_[static_cast<size_t>(slot)] = 0; }
    int32_t victim(bool over_budget, int64_t) override {
        if (layers_[last_layer_].bytes > share_[last_layer_]) {
            const int32_t slot = take_oldest(last_layer_);
            if (slot >= 0) return slot;
        }
        return over_budget ? take_oldest(furthest_above()) : -1;
    }
    void forget(int32_t slot) override { layers_[layer_of(slot)].remove(links_, slot, space_.bytes(slot)); }

   private:
    size_t layer_of(int32_t slot) const { return static_cast<size_t>(slot / space_.n_expert); }

    // What the current batch uses is the newest of its layer, so if the oldest is in use all are.
    bool may_give(size_t layer) const { return layers_[layer].oldest >= 0 && !in_use_[static_cast<size_t>(layers_[layer].oldest)]; }

    int32_t take_oldest(size_t layer) {
        if (!may_give(layer)) return -1;
        const int32_t slot = layers_[layer].oldest;
        layers_[layer].remove(links_, slot, space_.bytes(slot));
        return slot;
    }
    size_t furthest_above() const {
        size_t best = last_layer_;
        int64_t most = INT64_MIN;
        for (size_t layer = 0; layer < layers_.size(); ++layer) {
            const int64_t above = static_cast<int64_t>(layers_[layer].bytes) - static_cast<int64_t>(share_[layer]);
            if (above <= most || !may_give(layer)) continue;
            most = above;
            best = layer;
        }
        return best;
    }

    EvictSpace space_;
    SlotLinks links_;
    std::vector<uint8_t> in_use_;
    std::vector<uint64_t> share_;
    std::vector<SlotList> layers_;
    size_t last_layer_ = 0;
};

}  // namespace

std::unique_ptr<EvictPolicy> make_partition(const EvictSpace &space) {
    return std::make_unique<Partition>(space);
}

}  // namespace moetriage
