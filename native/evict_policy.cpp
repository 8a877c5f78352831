#include "evict_policy.h"

#include <stdexcept>

namespace moetriage {

std::unique_ptr<EvictPolicy> make_policy(const std::string &name, const EvictSpace &space) {
    if (name == "lfu") return make_lfu(space, false);
    if (name == "lfuda") return make_lfu(space, true);
    if (name == "s3fifo") return make_s3fifo(space);
    if (name == "partition") return make_partition(space);
    if (name == "random") return make_random(space);
    if (name == "belady") return make_belady(space, false);
    if (name == "belady-bytes") return make_belady(space, true);
    throw std::invalid_argument("no eviction policy is called " + name);
}

}  // namespace moetriage
