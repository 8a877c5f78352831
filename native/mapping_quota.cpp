#include "mapping_quota.h"

#include <algorithm>
#include <cstdio>

namespace moetriage {
namespace {

constexpr size_t kDefaultLimit = 65530;  // the kernel's own
constexpr size_t kForOthers = 16384;     // llama.cpp, Python, numpy, threads: some hundreds in practice

size_t kernel_limit() {
    size_t limit = kDefaultLimit;
    if (FILE *file = std::fopen("/proc/sys/vm/max_map_count", "re")) {
        if (std::fscanf(file, "%zu", &limit) != 1) limit = kDefaultLimit;
        std::fclose(file);
    }
    return limit;
}

}  // namespace

MappingQuota &MappingQuota::of_process() {
    static MappingQuota quota([] {
        const size_t limit = kernel_limit();
        return limit - std::min(limit / 2, kForOthers);
    }());
    return quota;
}

bool MappingQuota::take(size_t mappings) {
    size_t left = left_.load(std::memory_order_relaxed);
    do {
        if (left < mappings) return false;
    } while (!left_.compare_exchange_weak(left, left - mappings, std::memory_order_relaxed));
    return true;
}

}  // namespace moetriage
