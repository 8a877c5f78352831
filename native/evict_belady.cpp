// The offline policy: what is used again last goes first. Optimal in hits where all experts have one size; where they differ the exact
// optimum is NP-hard, and weighing the distance by the bytes it would free is one more good guess.
//
// Source: Belady, "A study of replacement algorithms for a virtual-storage computer" (1966); sizes: Berger, Beckmann, Harchol-Balter,
// "Practical bounds on optimal caching with variable object sizes" (2018), section 5.
#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "evict_heap.h"
#include "evict_policy.h"

namespace moetriage {
namespace {

// The latest next use is on top; of equals the one that came in first.
struct Farthest {
    int64_t next_use = 0;
    uint64_t order = 0;
    bool operator<(const Farthest &other) const { return next_use != other.next_use ? next_use > other.next_use : order < other.order; }
};

// One heap for each size of expert: within a size the order by distance is also the order by distance x bytes, at any time.
class Belady : public EvictPolicy {
   public:
    Belady(const EvictSpace &space, bool by_bytes) : by_bytes_(by_bytes), n_expert_(space.n_expert), next_use_(space.slots(), kNever) {
        std::map<uint64_t, int> index;
        for (const uint64_t bytes : space.expert_bytes) index.emplace(bytes, 0);
        for (auto &[bytes, at] : index) {
            at = static_cast<int>(sizes_.size());
            sizes_.push_back({static_cast<double>(bytes), SlotHeap<Farthest>(space.slots())});
        }
        for (const uint64_t bytes : space.expert_bytes) size_of_layer_.push_back(index.at(bytes));
    }

    void use(int32_t slot, bool, int64_t next_use) override {
        heap(slot).leave(slot);
        next_use_[static_cast<size_t>(slot)] = next_use;
    }
    void release(int32_t slot) override { heap(slot).put(slot, {next_use_[static_cast<size_t>(slot)], ++clock_}); }
    int32_t victim(bool over_budget, int64_t batch) override {
        if (!over_budget) return -1;
        int32_t best = -1;
        double most = -1.0;
        for (Size &size : sizes_) {
            const int32_t slot = size.heap.top();
            if (slot < 0) continue;
            const double worth = value(size, size.heap.key().next_use, batch);
            if (worth < most) continue;  // of equals the larger: sizes_ is in ascending order
            most = worth;
            best = slot;
        }
        if (best >= 0) heap(best).leave(best);
        return best;
    }
    void forget(int32_t slot) override { heap(slot).leave(slot); }

   private:
    struct Size {
        double bytes;
        SlotHeap<Farthest> heap;
    };
    SlotHeap<Farthest> &heap(int32_t slot) {
        return sizes_[static_cast<size_t>(size_of_layer_[static_cast<size_t>(slot / n_expert_)])].heap;
    }
    double value(const Size &size, int64_t next_use, int64_t batch) const {
        if (next_use == kNever) return 1e300;
        const auto distance = static_cast<double>(next_use - batch);
        return by_bytes_ ? distance * size.bytes : distance;
    }

    bool by_bytes_;
    int n_expert_;
    uint64_t clock_ = 0;
    std::vector<int64_t> next_use_;
    std::vector<int> size_of_layer_;
    std::vector<Size> sizes_;
};

}  // namespace

std::unique_ptr<EvictPolicy> make_belady(const EvictSpace &space, bool by_bytes) {
    return std::make_unique<Belady>(space, by_bytes);
}

}  // namespace moetriage
