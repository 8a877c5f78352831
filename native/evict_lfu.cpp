// LFU: the least often used since it came in goes, the least recent of equals first. LFUDA adds dynamic aging: a use is worth as much as
// the value of the last victim plus the uses so far, so that what was popular once does not stay for ever.
//
// Source: Arlitt, Cherkasova, Dilley, Friedrich, Jin, "Evaluating content management techniques for Web proxy caches" (2000), section 3.
#include <cstdint>
#include <memory>
#include <vector>

#include "evict_heap.h"
#include "evict_policy.h"

namespace moetriage {
namespace {

struct Value {
    uint64_t value = 0;
    uint64_t order = 0;  // of use; unique
    bool operator<(const Value &other) const { return value != other.value ? value < other.value : order < other.order; }
};

class Lfu : public EvictPolicy {
   public:
    Lfu(const EvictSpace &space, bool aged) : aged_(aged), uses_(space.slots(), 0), values_(space.slots()), heap_(space.slots()) {}

    void use(int32_t slot, bool hit, int64_t) override {
        const auto at = static_cast<size_t>(slot);
        heap_.leave(slot);
        uses_[at] = hit ? uses_[at] + 1 : 1;
        values_[at] = {uses_[at] + (aged_ ? age_ : 0), ++clock_};
    }
    void release(int32_t slot) override { heap_.put(slot, values_[static_cast<size_t>(slot)]); }
    int32_t victim(bool over_budget, int64_t) override {
        const int32_t slot = over_budget ? heap_.top() : -1;
        if (slot < 0) return -1;
        age_ = heap_.key().value;
        heap_.leave(slot);
        return slot;
    }
    void forget(int32_t slot) override { heap_.leave(slot); }

   private:
    bool aged_;
    uint64_t age_ = 0;
    uint64_t clock_ = 0;
    std::vector<uint64_t> uses_;
    std::vector<Value> values_;
    SlotHeap<Value> heap_;
};

}  // namespace

std::unique_ptr<EvictPolicy> make_lfu(const EvictSpace &space, bool aged) {
    return std::make_unique<Lfu>(space, aged);
}

}  // namespace moetriage
