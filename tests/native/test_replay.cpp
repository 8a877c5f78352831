// Under any order, with drops, read-ahead and prompts, a replay stays within its budget and accounts for every routing.

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "bound.h"
#include "check.h"
#include "replay.h"

using namespace moetriage;

namespace {

constexpr int kExperts = 12, kTopK = 3;
const std::vector<uint64_t> kBytes = {5, 7, 5, 9};

struct Trace {
    std::vector<int32_t> layer, expert;
    std::vector<uint8_t> phase;
    std::vector<int64_t> first_cell = {0};
    std::vector<float> weight;

    RouteBatches view() const {
        RouteBatches batches;
        batches.count = static_cast<int64_t>(layer.size());
        batches.layer = layer.data();
        batches.phase = phase.data();
        batches.first_cell = first_cell.data();
        batches.expert = expert.data();
        batches.weight = weight.data();
        return batches;
    }
};

// A prompt of nine tokens, then `tokens` decoded ones.
Trace random_trace(uint64_t seed, int tokens) {
    std::mt19937_64 random(seed);
    Trace trace;
    std::vector<int32_t> experts(kExperts);
    std::iota(experts.begin(), experts.end(), 0);
    for (int token = 0; token <= tokens; ++token) {
        for (size_t layer = 0; layer < kBytes.size(); ++layer) {
            const int cells = token == 0 ? 9 : 1;
            for (int cell = 0; cell < cells; ++cell) {
                std::shuffle(experts.begin(), experts.end(), random);
                for (int k = 0; k < kTopK; ++k) {
                    trace.expert.push_back(experts[static_cast<size_t>(k)]);
                    trace.weight.push_back(static_cast<float>(1 + random() % 16) / 16.0f);
                }
            }
            trace.layer.push_back(static_cast<int32_t>(layer));
            trace.phase.push_back(token == 0 ? 0 : 1);
            trace.first_cell.push_back(trace.first_cell.back() + cells);
        }
    }
    return trace;
}

void every_order_accounts_for_every_routing() {
    const Trace trace = random_trace(3, 400);
    RouteBatches batches = trace.view();
    const auto next = next_uses(batches, kBytes.size(), kExperts, kTopK, kTopK);
    batches.next_use = next.data();
    for (const char *evict : {"lru", "lfu", "lfuda", "s3fifo", "partition", "random", "belady", "belady-bytes"}) {
        for (const uint64_t budget : {0u, 20u, 90u, 150u, 400u}) {
            for (const double threshold : {0.0, 0.7}) {
                ReplayOptions options;
                options.drop.threshold = threshold;
                options.top_k = options.keep = kTopK;
                options.closed_loop = threshold > 0.0;
                options.prefetch_depth = budget > 0 && std::string(evict).rfind("belady", 0) != 0 ? 2 : 0;
                const auto replay = cache_replay(evict, kBytes, kExperts, budget, 1, options);
                std::vector<uint8_t> resident(trace.expert.size()), dropped(trace.expert.size());
                std::vector<int64_t> bytes(trace.expert.size());
                replay->feed(batches, {resident.data(), dropped.data(), bytes.data()});
                const ReplayTally &decode = replay->tally(1);
                CHECK(decode.hits + decode.misses + decode.dropped == decode.cells * kTopK);
                CHECK((decode.dropped > 0) == (threshold > 0.0));
                CHECK(replay->cache_counters().peak_bytes <= std::max<uint64_t>(budget, kExperts * 9));
                int64_t read = 0;
                for (const int64_t nbytes : bytes) read += nbytes;
                const uint64_t ahead = replay->tally(0).ahead_bytes + decode.ahead_bytes;
                CHECK(static_cast<uint64_t>(read) + ahead == replay->tally(0).read_bytes + decode.read_bytes);
                // The short way that is taken without marks counts the same.
                const auto unmarked = cache_replay(evict, kBytes, kExperts, budget, 1, options);
                unmarked->feed(batches, {});
                CHECK(unmarked->tally(1).hits == decode.hits && unmarked->tally(1).read_bytes == decode.read_bytes);
                CHECK(unmarked->tally(0).misses == replay->tally(0).misses && unmarked->tally(1).mass == decode.mass);
            }
        }
    }
}

void a_bound_is_below_the_offline_order() {
    const Trace trace = random_trace(5, 60);
    RouteBatches batches = trace.view();
    BoundProblem problem(batches, kBytes, kExperts, kTopK, 120, 2, false);
    std::vector<double> price(static_cast<size_t>(problem.batches()), 0.02), held(price.size());
    double discarded = -1.0;
    const double bound = problem.evaluate(price.data(), 1e300, held.data(), &discarded);
    CHECK(discarded == 0.0);
    std::vector<uint8_t> drop(problem.routings(), 0);
    std::vector<int32_t> next(problem.routings(), INT32_MAX);
    problem.plan(1e300, drop.data(), next.data());
    batches.next_use = next.data();
    batches.plan = drop.data();
    ReplayOptions options;
    options.top_k = options.keep = kTopK;
    options.closed_loop = true;
    const auto replay = cache_replay("belady", kBytes, kExperts, 120, 0, options);
    replay->feed(batches, {});
    const double read = static_cast<double>(replay->tally(0).read_bytes + replay->tally(1).read_bytes);
    CHECK(0.0 < bound && bound <= read && read < 2.0 * bound);
    for (const double bytes : held) CHECK(bytes > -1e-6);
}

void batches_that_do_not_fit_are_refused() {
    ReplayOptions options;
    options.top_k = options.keep = kTopK;
    int refused = 0;
    for (int fault = 0; fault < 4; ++fault) {
        Trace trace = random_trace(1, 2);
        if (fault == 0) trace.expert[5] = kExperts;
        if (fault == 1) trace.expert[5] = -1;
        if (fault == 2) trace.layer[1] = static_cast<int32_t>(kBytes.size());
        if (fault == 3) trace.phase[2] = 2;
        const auto replay = cache_replay("lru", kBytes, kExperts, 100, 0, options);
        try {
            replay->feed(trace.view(), {});
        } catch (const std::invalid_argument &) {
            ++refused;
        }
        CHECK(replay->tally(0).cells == 0);
    }
    CHECK(refused == 4);
    try {
        cache_replay("lur", kBytes, kExperts, 100, 0, options);
        CHECK(false);
    } catch (const std::invalid_argument &error) {
        CHECK(std::string(error.what()).find("lur") != std::string::npos);
    }
}

}  // namespace

int main() {
    every_order_accounts_for_every_routing();
    a_bound_is_below_the_offline_order();
    batches_that_do_not_fit_are_refused();
}
