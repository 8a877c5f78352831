// How many of the kernel's mappings page moves may take: a share of vm.max_map_count, for the whole process.
//
// Pages that moved keep a mapping of their own, and beyond the limit nothing in the process can map memory any more: no large allocation,
// no thread, no file. The experts of large models are more than that limit allows, so moving has to stop before it.
#pragma once

#include <atomic>
#include <cstddef>

namespace moetriage {

class MappingQuota {
   public:
    explicit MappingQuota(size_t mappings) : left_(mappings) {}

    static MappingQuota &of_process();

    bool take(size_t mappings);
    void give_back(size_t mappings) { left_.fetch_add(mappings, std::memory_order_relaxed); }

   private:
    std::atomic<size_t> left_;
};

}  // namespace moetriage
