#include "policy_cache.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace moetriage {

PolicyCache::PolicyCache(const std::string &policy, EvictSpace space) : space_(std::move(space)) {
    if (space_.n_expert < 1 || space_.expert_bytes.empty()) {
        throw std::invalid_argument("an expert cache needs at least one layer and one expert");
    }
    policy_ = make_policy(policy, space_);
    nodes_.resize(space_.slots());
}

void PolicyCache::begin_batch() {
    ++batch_;
    for (const int32_t slot : in_use_) {
        if (space_.budget > 0) {
            policy_->release(slot);
        } else {
            policy_->forget(slot);
            remove(slot);
        }
    }
    in_use_.clear();
}

bool PolicyCache::lookup(int32_t slot) {
    const Node &node = nodes_[static_cast<size_t>(slot)];
    if (!node.resident) {
        ++counters_.misses;
        return false;
    }
    ++counters_.hits;
    policy_->use(slot, true, node.next_use);
    in_use_.push_back(slot);
    return true;
}

void PolicyCache::insert(int32_t slot) {
    Node &node = nodes_[static_cast<size_t>(slot)];
    if (node.resident) return;
    node.resident = true;
    ++residents_;
    used_ += space_.bytes(slot);
    policy_->use(slot, false, node.next_use);
    in_use_.push_back(slot);
}

const std::vector<int32_t> &PolicyCache::evict() {
    gone_.clear();
    // Where the batch uses all there is, the policy is not asked: S3-FIFO would move what it passes over.
    while (residents_ > in_use_.size()) {
        const int32_t slot = policy_->victim(used_ > space_.budget, batch_);
        if (slot < 0) break;
        ++counters_.evictions;
        gone_.push_back(slot);
        remove(slot);
    }
    counters_.peak_bytes = std::max(counters_.peak_bytes, used_);
    return gone_;
}

void PolicyCache::erase(int32_t slot) {
    if (!resident(slot)) return;
    policy_->forget(slot);
    std::erase(in_use_, slot);
    remove(slot);
}

void PolicyCache::remove(int32_t slot) {
    nodes_[static_cast<size_t>(slot)].resident = false;
    --residents_;
    used_ -= space_.bytes(slot);
}

}  // namespace moetriage
