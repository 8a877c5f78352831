// S3-FIFO: a small queue for newcomers, a main queue for what was used again, and a ghost queue that remembers who left the small one.
//
// Source: Yang, Zhang, Qiu, Yue, Rashmi, "FIFO queues are all you need for cache eviction" (SOSP 2023), algorithm 1; sizes in bytes: the
// small queue has a tenth of the budget, the ghost as much as the main queue; two uses move a slot to the main queue, as in libCacheSim.
// A slot that the current batch uses is passed over as one that was just used: from the small queue into the main one.
#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "evict_policy.h"
#include "slot_list.h"

namespace moetriage {
namespace {

constexpr uint8_t kMaxUses = 3;
constexpr uint8_t kPromoteAt = 2;

class S3Fifo : public EvictPolicy {
   public:
    explicit S3Fifo(const EvictSpace &space)
        : space_(space), small_bytes_(space.budget / 10), links_(space.slots()), ghost_links_(space.slots()), nodes_(space.slots()) {}

    void use(int32_t slot, bool hit, int64_t) override {
        Node &node = nodes_[static_cast<size_t>(slot)];
        node.in_use = true;
        if (hit) {
            node.uses = std::min<uint8_t>(kMaxUses, static_cast<uint8_t>(node.uses + 1));
            return;
        }
        node.uses = 0;
        node.in_main = leave_ghost(slot);
        queue(slot).push(links_, slot, space_.bytes(slot));
    }
    void release(int32_t slot) override { nodes_[static_cast<size_t>(slot)].in_use = false; }
    int32_t victim(bool over_budget, int64_t) override {
        if (!over_budget) return -1;
        const bool small_first = small_.bytes > small_bytes_ || main_.count == 0;
        const int32_t slot = small_first ? from_small() : from_main();
        return slot >= 0 ? slot : small_first ? from_main() : from_small();
    }
    void forget(int32_t slot) override { queue(slot).remove(links_, slot, space_.bytes(slot)); }

   private:
    struct Node {
        uint8_t uses = 0;
        bool in_main = false, in_ghost = false, in_use = false;
    };
    SlotList &queue(int32_t slot) { return nodes_[static_cast<size_t>(slot)].in_main ? main_ : small_; }

    int32_t from_small() {
        for (size_t left = small_.count; left > 0; --left) {
            const int32_t slot = small_.oldest;
            Node &node = nodes_[static_cast<size_t>(slot)];
            small_.remove(links_, slot, space_.bytes(slot));
            if (!node.in_use && node.uses < kPromoteAt) {
                enter_ghost(slot);
                return slot;
            }
            node.uses = 0;
            node.in_main = true;
            main_.push(links_, slot, space_.bytes(slot));
        }
        return -1;
    }

    int32_t from_main() {
        // Each pass takes one use off what it goes round, so as many passes as there can be uses find a victim if there is one.
        for (size_t left = main_.count * (kMaxUses + 1); left > 0; --left) {
            const int32_t slot = main_.oldest;
            Node &node = nodes_[static_cast<size_t>(slot)];
            main_.remove(links_, slot, space_.bytes(slot));
            if (!node.in_use && node.uses == 0) return slot;
            if (!node.in_use) --node.uses;
            main_.push(links_, slot, space_.bytes(slot));
        }
        return -1;
    }

    void enter_ghost(int32_t slot) {
        nodes_[static_cast<size_t>(slot)].in_ghost = true;
        ghost_.push(ghost_links_, slot, space_.bytes(slot));
        while (ghost_.bytes > space_.budget - small_bytes_) leave_ghost(ghost_.oldest);
    }
    bool leave_ghost(int32_t slot) {
        Node &node = nodes_[static_cast<size_t>(slot)];
        if (!node.in_ghost) return false;
        node.in_ghost = false;
        ghost_.remove(ghost_links_, slot, space_.bytes(slot));
        return true;
    }

    EvictSpace space_;
    uint64_t small_bytes_;
    SlotLinks links_, ghost_links_;
    std::vector<Node> nodes_;
    SlotList small_, main_, ghost_;
};

}  // namespace

std::unique_ptr<EvictPolicy> make_s3fifo(const EvictSpace &space) {
    return std::make_unique<S3Fifo>(space);
}

}  // namespace moetriage
