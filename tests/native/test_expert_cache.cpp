// The cache evicts in LRU order, in bytes, never what the current batch touched, and counts every lookup once.

#include <cstdint>
#include <list>
#include <random>
#include <set>
#include <vector>

#include "check.h"
#include "expert_cache.h"

using moetriage::ExpertCache;

namespace {

// One batch as the engine runs it; returns the evicted slots.
std::vector<int32_t> batch(ExpertCache &cache, const std::vector<int32_t> &slots) {
    cache.begin_batch();
    std::vector<int32_t> missing;
    for (const int32_t slot : slots) {
        if (!cache.lookup(slot)) missing.push_back(slot);
    }
    for (const int32_t slot : missing) cache.insert(slot);
    return cache.evict();
}

void evicts_the_least_recent_first() {
    ExpertCache cache({10, 10}, 4, 30);
    batch(cache, {0});
    batch(cache, {1});
    batch(cache, {2});
    CHECK(batch(cache, {0}).empty());
    CHECK((batch(cache, {5}) == std::vector<int32_t>{1}));
    CHECK((batch(cache, {6}) == std::vector<int32_t>{2}));
    CHECK(cache.resident(0) && cache.resident(5) && cache.resident(6));
    CHECK(cache.counters().hits == 1 && cache.counters().misses == 5 && cache.counters().evictions == 2);
}

void budget_is_in_bytes_not_entries() {
    ExpertCache cache({10, 100}, 4, 120);
    batch(cache, {0, 1});
    batch(cache, {4});
    CHECK(cache.resident_bytes() == 120);
    CHECK((batch(cache, {5}) == std::vector<int32_t>{0, 1, 4}));
    CHECK(cache.resident_bytes() == 100);
}

void a_batch_never_evicts_its_own() {
    ExpertCache cache({10}, 8, 20);
    CHECK(batch(cache, {0, 1, 2, 3}).empty());
    CHECK(cache.resident_bytes() == 40 && cache.counters().peak_bytes == 40);
    CHECK((batch(cache, {4}) == std::vector<int32_t>{0, 1, 2}));
    CHECK(cache.resident_bytes() == 20);
}

void off_means_every_lookup_misses() {
    ExpertCache cache({10}, 4, 0);
    batch(cache, {0, 1});
    batch(cache, {0, 1});
    CHECK(cache.counters().hits == 0 && cache.counters().misses == 4);
}

// The cliff: cycling through T bytes of experts, a budget one layer's batch short of T never hits; with exactly T every later lookup does.
// (In between some do: a batch is evicted for only after it was looked up.)
void below_the_working_set_nothing_hits() {
    for (const uint64_t budget : {60u, 80u}) {
        ExpertCache cache({10, 10, 10, 10}, 4, budget);
        for (int token = 0; token < 5; ++token) {
            for (int layer = 0; layer < 4; ++layer) batch(cache, {cache.slot(layer, 0), cache.slot(layer, 1)});
        }
        CHECK(cache.counters().hits == (budget < 80 ? 0u : 32u));
    }
}

// Against a list-based model: same hits, same residents, after thousands of random batches.
void agrees_with_a_plain_model() {
    std::mt19937 random(7);
    ExpertCache cache({3, 5, 7}, 16, 60);
    const uint64_t bytes[] = {3, 5, 7};
    std::list<int32_t> order;
    for (int round = 0; round < 5000; ++round) {
        const int layer = round % 3;
        std::set<int32_t> wanted;
        while (wanted.size() < 1 + random() % 4) wanted.insert(cache.slot(layer, static_cast<int>(random() % 16)));
        const std::vector<int32_t> slots(wanted.begin(), wanted.end());
        const uint64_t hits = cache.counters().hits;
        uint64_t expected = 0;
        std::vector<int32_t> missing;
        for (const int32_t slot : slots) {
            const size_t before = order.size();
            order.remove(slot);
            if (order.size() < before) {
                ++expected;
                order.push_back(slot);
            } else {
                missing.push_back(slot);
            }
        }
        order.insert(order.end(), missing.begin(), missing.end());
        uint64_t used = 0;
        for (const int32_t slot : order) used += bytes[slot / 16];
        while (used > 60 && !wanted.count(order.front())) {
            used -= bytes[order.front() / 16];
            order.pop_front();
        }
        batch(cache, slots);
        CHECK(cache.counters().hits - hits == expected);
        CHECK(cache.resident_bytes() == used);
        for (const int32_t slot : order) CHECK(cache.resident(slot));
    }
    CHECK(cache.counters().hits > 0 && cache.counters().evictions > 0);
}

}  // namespace

int main() {
    evicts_the_least_recent_first();
    budget_is_in_bytes_not_entries();
    a_batch_never_evicts_its_own();
    off_means_every_lookup_misses();
    below_the_working_set_nothing_hits();
    agrees_with_a_plain_model();
}
