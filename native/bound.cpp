#include "bound.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

namespace moetriage {
namespace {

constexpr double kInfinite = std::numeric_limits<double>::infinity();
// Plans hold next uses as int32; what the plan does not keep is ordered after all that it keeps.
constexpr int32_t kNotKept = 1 << 30;

}  // namespace

BoundProblem::BoundProblem(const RouteBatches &batches, std::vector<uint64_t> expert_bytes, int n_expert, int top_k, uint64_t budget,
                           int phase, bool count_misses) {
    check_batches(batches, expert_bytes.size(), n_expert, top_k);
    routings_ = batches.count > 0 ? static_cast<size_t>(batches.first_cell[batches.count] * top_k) : 0;
    std::vector<std::vector<Request>> of_slot(expert_bytes.size() * static_cast<size_t>(n_expert));
    for (int64_t b = 0; b < batches.count; ++b) {
        const auto layer = static_cast<size_t>(batches.layer[b]);
        const auto bytes = static_cast<double>(expert_bytes[layer]);
        const bool counted = phase == 2 || batches.phase[b] == phase;
        double needed = 0;
        for (int64_t cell = batches.first_cell[b]; cell < batches.first_cell[b + 1]; ++cell) {
            const int64_t at = cell * top_k;
            const int top = top_slot(batches.weight + at, top_k);
            for (int k = 0; k < top_k; ++k) {
                auto &requests = of_slot[layer * static_cast<size_t>(n_expert) + static_cast<size_t>(batches.expert[at + k])];
                const bool droppable = batches.phase[b] == 1 && k != top;
                if (requests.empty() || requests.back().batch != b) {
                    needed += bytes;
                    requests.push_back({});
                    requests.back().batch = b;
                    requests.back().routing = at + k;
                    requests.back().bytes = bytes;
                    requests.back().cost = !counted ? 0.0 : count_misses ? 1.0 : bytes;
                }
                // Several tokens of a batch may want it: it is spared only if all of them do without.
                requests.back().weight += droppable ? static_cast<double>(batches.weight[at + k]) : kInfinite;
            }
        }
        capacity_.push_back(std::max(static_cast<double>(budget), needed));
    }
    for (const auto &requests : of_slot) {
        if (requests.empty()) continue;
        first_request_.push_back(requests_.size());
        requests_.insert(requests_.end(), requests.begin(), requests.end());
    }
    first_request_.push_back(requests_.size());
}

double BoundProblem::evaluate(const double *price, double weight_price, double *held, double *discarded) {
    const size_t n = capacity_.size();
    price_sum_.assign(n + 1, 0.0);
    double value = 0.0;
    for (size_t b = 0; b < n; ++b) {
        price_sum_[b + 1] = price_sum_[b] + price[b];
        value -= price[b] * capacity_[b];
    }
    std::fill_n(held, n, 0.0);
    *discarded = 0.0;
    for (size_t i = 0; i + 1 < first_request_.size(); ++i) {
        const size_t begin = first_request_[i], end = first_request_[i + 1];
        forward(begin, end, price, weight_price);
        value += std::min(requests_[end - 1].kept, requests_[end - 1].absent);
        backward(begin, end, held, discarded);
    }
    for (size_t b = 1; b < n; ++b) held[b] += held[b - 1];
    return value;
}

// After each of an expert's batches it is resident (and held at that batch's price) or was dropped. In between it is held or not.
void BoundProblem::forward(size_t begin, size_t end, const double *price, double weight_price) {
    double kept = kInfinite, absent = 0.0;
    int64_t last = -1;
    for (size_t i = begin; i < end; ++i) {
        Request &request = requests_[i];
        const auto batch = static_cast<size_t>(request.batch);
        const double hold = i == begin ? 0.0 : (price_sum_[batch] - price_sum_[static_cast<size_t>(last) + 1]) * request.bytes;
        const double hit = kept + hold;
        request.from_kept = kept < absent;
        const double cold = std::min(kept, absent);
        request.via_hit = hit <= cold + request.cost;
        const double drop = std::isinf(request.weight) || std::isinf(weight_price) ? kInfinite : cold + weight_price * request.weight;
        request.kept = kept = std::min(hit, cold + request.cost) + price[batch] * request.bytes;
        request.absent = absent = drop;
        last = request.batch;
    }
}

// Follow the cheapest way back. `change` gets the differences of the bytes held from batch to batch.
void BoundProblem::backward(size_t begin, size_t end, double *change, double *discarded) {
    const size_t n = capacity_.size();
    bool resident = requests_[end - 1].kept <= requests_[end - 1].absent;
    bool keeps = false;
    for (size_t i = end; i-- > begin;) {
        Request &request = requests_[i];
        const auto batch = static_cast<size_t>(request.batch);
        request.drops = !resident;
        request.was_kept = keeps;
        request.hits = resident && request.via_hit;
        if (resident) {
            const size_t until = keeps ? static_cast<size_t>(requests_[i + 1].batch) : batch + 1;
            change[batch] += request.bytes;
            if (until < n) change[until] -= request.bytes;
        } else {
            *discarded += request.weight;
        }
        keeps = request.hits;
        resident = request.hits || request.from_kept;
    }
}

void BoundProblem::plan(double weight_price, uint8_t *drop, int32_t *next_use) const {
    for (size_t i = 0; i + 1 < first_request_.size(); ++i) {
        for (size_t at = first_request_[i]; at < first_request_[i + 1]; ++at) {
            const Request &request = requests_[at];
            const bool is_last = at + 1 == first_request_[i + 1];
            const int64_t next = is_last ? INT32_MAX : requests_[at + 1].batch + (request.was_kept ? 0 : kNotKept);
            next_use[request.routing] = static_cast<int32_t>(next);
            // A planned hit that the real budget had no room for is dropped if that is cheaper than the read.
            drop[request.routing] = request.drops || (request.hits && weight_price * request.weight < request.cost);
        }
    }
}

}  // namespace moetriage
