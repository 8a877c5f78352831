// A priority queue of slots from which a slot can leave early: stale entries stay in the heap and are passed over when they surface.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

namespace moetriage {

// Key needs operator<; the smallest key is on top. Keys of one slot must grow or differ each time it is put (a use count will do).
template <typename Key>
class SlotHeap {
   public:
    explicit SlotHeap(size_t slots) : stamp_(slots, 0), inside_(slots, 0) {}

    void put(int32_t slot, const Key &key) {
        if (heap_.size() > 2 * live_ + 64) sweep();
        heap_.push_back({key, slot, ++stamp_[static_cast<size_t>(slot)]});
        std::push_heap(heap_.begin(), heap_.end(), after);
        inside_[static_cast<size_t>(slot)] = 1;
        ++live_;
    }

    void leave(int32_t slot) {
        if (!std::exchange(inside_[static_cast<size_t>(slot)], 0)) return;
        ++stamp_[static_cast<size_t>(slot)];
        --live_;
    }

    // The slot with the smallest key, or -1; key() is then its key.
    int32_t top() {
        while (!heap_.empty() && stale(heap_.front())) pop();
        return heap_.empty() ? -1 : heap_.front().slot;
    }
    const Key &key() const { return heap_.front().key; }

   private:
    struct Entry {
        Key key;
        int32_t slot;
        uint32_t stamp;
    };
    static bool after(const Entry &a, const Entry &b) { return b.key < a.key; }
    bool stale(const Entry &entry) const { return stamp_[static_cast<size_t>(entry.slot)] != entry.stamp; }
    void pop() {
        std::pop_heap(heap_.begin(), heap_.end(), after);
        heap_.pop_back();
    }
    void sweep() {
        std::erase_if(heap_, [this](const Entry &entry) { return stale(entry); });
        std::make_heap(heap_.begin(), heap_.end(), after);
    }

    std::vector<Entry> heap_;
    std::vector<uint32_t> stamp_;
    std::vector<uint8_t> inside_;
    size_t live_ = 0;
};

}  // namespace moetriage
