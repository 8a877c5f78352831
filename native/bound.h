// What no schedule can beat: a lower bound on the bytes read for a trace, with at most a given router weight discarded.
//
// In: a trace in layer batches, prices. Out: the value of a Lagrangian relaxation at these prices, which is a true lower bound whatever
// they are, its slope, and the plan behind it. Relaxed are the budget (a price per byte held after each batch) and the discarded weight (a
// price per unit); what is left falls apart into one small dynamic program per expert, which is solved exactly.
//
// Source of the interval view: Berger, Beckmann, Harchol-Balter, "Practical bounds on optimal caching with variable object sizes" (2018);
// the drops and the batch rule (nothing that a batch used goes before the next) are ours.
#pragma once

#include <cstdint>
#include <vector>

#include "replay.h"

namespace moetriage {

class BoundProblem {
   public:
    // What a schedule pays: the bytes it reads in a phase (0 prefill, 1 decode, 2 both), or its misses there. Only decode may drop, and
    // never a token's top expert. Throws std::invalid_argument for batches that do not fit.
    BoundProblem(const RouteBatches &batches, std::vector<uint64_t> expert_bytes, int n_expert, int top_k, uint64_t budget, int phase,
                 bool count_misses);

    // Lower bound at these prices: price[b] per byte held after batch b, weight_price per unit of weight. Fills `held` with the bytes that
    // the relaxed schedule holds after each batch (its slope is held - capacity) and `discarded` with the weight it drops. Without
    // weight_price < infinity nothing is dropped. The price of a weight limit W (weight_price * W) is not yet taken off.
    double evaluate(const double *price, double weight_price, double *held, double *discarded);

    // The relaxed schedule's plan for each routing: whether to drop it if it is not resident, and its order of eviction (a next use, those
    // that the plan does not keep after all that it keeps). To be called after evaluate(); a replay makes a feasible schedule of it.
    void plan(double weight_price, uint8_t *drop, int32_t *next_use) const;

    size_t routings() const { return routings_; }
    int64_t batches() const { return static_cast<int64_t>(capacity_.size()); }
    // Bytes that may be held after each batch: the budget, or what the batch itself needs.
    const std::vector<double> &capacity() const { return capacity_; }

   private:
    // One distinct expert of a layer batch; requests of one expert follow each other in time.
    struct Request {
        int64_t batch = 0;
        int64_t routing = 0;  // the first that names the expert
        double bytes = 0;
        double cost = 0;                                     // of loading it
        double weight = 0;                                   // lost if it is dropped; infinite if it may not be
        double kept = 0, absent = 0;                         // cheapest cost so far with the expert resident after the batch, or not
        bool drops = false, hits = false, was_kept = false;  // the cheapest way: filled in backwards
        bool via_hit = false, from_kept = false;
    };
    void forward(size_t begin, size_t end, const double *price, double weight_price);
    void backward(size_t begin, size_t end, double *change, double *discarded);

    size_t routings_ = 0;
    std::vector<Request> requests_;
    std::vector<size_t> first_request_;  // per expert slot that occurs, and the end
    std::vector<double> capacity_;
    std::vector<double> price_sum_;  // price_sum_[b]: prices of the batches before b
};

}  // namespace moetriage
