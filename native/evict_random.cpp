// Random eviction, repeatable by its seed: the floor that an order has to beat to be worth keeping.
#include <cstdint>
#include <memory>
#include <random>
#include <vector>

#include "evict_policy.h"

namespace moetriage {
namespace {

class Random : public EvictPolicy {
   public:
    explicit Random(const EvictSpace &space) : place_(space.slots(), -1), random_(space.seed) {}

    void use(int32_t slot, bool, int64_t) override { leave(slot); }
    void release(int32_t slot) override {
        place_[static_cast<size_t>(slot)] = static_cast<int32_t>(slots_.size());
        slots_.push_back(slot);
    }
    int32_t victim(bool over_budget, int64_t) override {
        if (!over_budget || slots_.empty()) return -1;
        // Not std::uniform_int_distribution: its numbers differ between standard libraries. The bias of the modulo is below 1e-12.
        const int32_t slot = slots_[random_() % slots_.size()];
        leave(slot);
        return slot;
    }
    void forget(int32_t slot) override { leave(slot); }

   private:
    void leave(int32_t slot) {
        const int32_t at = place_[static_cast<size_t>(slot)];
        if (at < 0) return;
        slots_[static_cast<size_t>(at)] = slots_.back();
        place_[static_cast<size_t>(slots_.back())] = at;
        slots_.pop_back();
        place_[static_cast<size_t>(slot)] = -1;
    }

    std::vector<int32_t> place_;  // in slots_, -1 outside
    std::vector<int32_t> slots_;
    std::mt19937_64 random_;
};

}  // namespace

std::unique_ptr<EvictPolicy> make_random(const EvictSpace &space) {
    return std::make_unique<Random>(space);
}

}  // namespace moetriage
