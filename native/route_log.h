// Routing records of the batches evaluated since the last take(), as columns. Bounded: Python takes them after every batch.
#pragma once

#include <cstdint>
#include <vector>

namespace moetriage {

struct RouteColumns {
    std::vector<int8_t> phase;
    std::vector<int32_t> step;
    std::vector<int16_t> layer;
    std::vector<int16_t> slot;
    std::vector<int32_t> expert;
    std::vector<float> weight;
    std::vector<int8_t> residency;
    std::vector<int64_t> expert_bytes;
    std::vector<int8_t> dropped;

    size_t size() const { return phase.size(); }
    void add(int8_t phase_, int32_t step_, int16_t layer_, int16_t slot_, int32_t expert_, float weight_, bool resident, int64_t bytes,
             bool dropped_) {
        phase.push_back(phase_);
        step.push_back(step_);
        layer.push_back(layer_);
        slot.push_back(slot_);
        expert.push_back(expert_);
        weight.push_back(weight_);
        residency.push_back(resident ? 1 : 0);
        expert_bytes.push_back(bytes);
        dropped.push_back(dropped_ ? 1 : 0);
    }
};

}  // namespace moetriage
