// Which routed experts of one token are not worth a read: the whole policy as one pure function.
//
// Source: cache-aware expert dropping (reference document "Cache-aware expert dropping", sections 1 and 5). The engine and the
// replay both call decide_drops(); nobody else repeats the rule.
#pragma once

#include <cstdint>

namespace moetriage {

struct DropPolicy {
    double threshold = 0.0;   // fraction F of the uniform share 1/top_k; 0 drops nothing
    bool raw_weight = false;  // compare the raw weight instead of its share of the routing's mass
    bool renorm = true;       // scale the survivors back to the routing's original mass
    bool in_prefill = false;  // also decide during prefill
};

// Index of the largest weight; the lowest index wins a tie.
inline int top_slot(const float *weight, int top_k) {
    int top = 0;
    for (int k = 1; k < top_k; ++k) {
        if (weight[k] > weight[top]) top = k;
    }
    return top;
}

// Mark the slots to drop (1) and return how many. weight[k] and resident[k] describe slot k of one token's routing.
// A slot goes only if its expert is not resident and its share w / sum(w) is below threshold / top_k. The largest weight always stays.
// A routing without a positive finite mass is left alone: no share is defined on it.
inline int decide_drops(const DropPolicy &policy, const float *weight, const uint8_t *resident, int top_k, uint8_t *dropped) {
    double mass = 0.0;
    for (int k = 0; k < top_k; ++k) {
        dropped[k] = 0;
        mass += weight[k];
    }
    if (!(policy.threshold > 0.0) || !(mass > 0.0) || mass > 1e30) return 0;
    const double limit = policy.threshold / top_k * (policy.raw_weight ? 1.0 : mass);
    const int top = top_slot(weight, top_k);
    int count = 0;
    for (int k = 0; k < top_k; ++k) {
        if (k == top || resident[k] || !(weight[k] < limit)) continue;
        dropped[k] = 1;
        ++count;
    }
    return count;
}

// Apply a decision to one routing in place: zero the dropped weights, give their mass to the survivors, and repoint the dropped ids at
// the top expert, which is certain to be loaded: the kernel then multiplies valid memory by exactly zero. Returns the discarded mass.
inline double apply_drops(const DropPolicy &policy, const uint8_t *dropped, int top_k, float *weight, int32_t *expert) {
    const int top = top_slot(weight, top_k);
    double mass = 0.0, lost = 0.0;
    for (int k = 0; k < top_k; ++k) {
        mass += weight[k];
        if (dropped[k]) lost += weight[k];
    }
    const double kept = mass - lost;
    const float scale = policy.renorm && kept > 0.0 ? static_cast<float>(mass / kept) : 1.0f;
    for (int k = 0; k < top_k; ++k) {
        if (dropped[k]) {
            weight[k] = 0.0f;
            expert[k] = expert[top];
        } else if (lost > 0.0) {
            weight[k] *= scale;
        }
    }
    return lost;
}

}  // namespace moetriage
