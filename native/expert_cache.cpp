#include "expert_cache.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace moetriage {

ExpertCache::ExpertCache(std::vector<uint64_t> expert_bytes, int n_expert, uint64_t budget_bytes)
    : expert_bytes_(std::move(expert_bytes)), n_expert_(n_expert), budget_(budget_bytes) {
    if (n_expert_ < 1 || expert_bytes_.empty()) throw std::invalid_argument("an expert cache needs at least one layer and one expert");
    where_.resize(expert_bytes_.size() * static_cast<size_t>(n_expert_));
}

const std::vector<int32_t> &ExpertCache::begin_batch() {
    ++batch_;
    gone_.clear();
    if (budget_ == 0) {
        while (oldest_ >= 0) {
            gone_.push_back(oldest_);
            remove(oldest_);
        }
    }
    return gone_;
}

bool ExpertCache::lookup(int32_t slot) {
    Node &node = where_[slot];
    if (!node.resident) {
        ++counters_.misses;
        return false;
    }
    ++counters_.hits;
    node.batch = batch_;
    if (slot != newest_) {
        unlink(slot);
        push_newest(slot);
    }
    return true;
}

void ExpertCache::insert(int32_t slot) {
    Node &node = where_[slot];
    if (node.resident) return;
    node.resident = true;
    node.batch = batch_;
    push_newest(slot);
    used_ += expert_bytes_[layer_of(slot)];
}

const std::vector<int32_t> &ExpertCache::evict(uint64_t room) {
    gone_.clear();
    // Slots of the current batch are the most recent ones, so the first of them ends the search.
    while (used_ + room > budget_ && oldest_ >= 0 && where_[oldest_].batch != batch_) {
        ++counters_.evictions;
        gone_.push_back(oldest_);
        remove(oldest_);
    }
    counters_.peak_bytes = std::max(counters_.peak_bytes, used_);
    return gone_;
}

void ExpertCache::erase(int32_t slot) {
    if (where_[slot].resident) remove(slot);
}

void ExpertCache::clear() {
    while (oldest_ >= 0) remove(oldest_);
}

void ExpertCache::remove(int32_t slot) {
    unlink(slot);
    where_[slot].resident = false;
    used_ -= expert_bytes_[layer_of(slot)];
}

void ExpertCache::unlink(int32_t slot) {
    Node &node = where_[slot];
    (node.older >= 0 ? where_[node.older].newer : oldest_) = node.newer;
    (node.newer >= 0 ? where_[node.newer].older : newest_) = node.older;
    node.older = node.newer = -1;
}

void ExpertCache::push_newest(int32_t slot) {
    where_[slot].older = newest_;
    (newest_ >= 0 ? where_[newest_].newer : oldest_) = slot;
    newest_ = slot;
}

}  // namespace moetriage
