// The drop decision: cold and below the share goes, the top expert never does, the routing's mass survives.

#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <limits>

#include "check.h"
#include "drop_policy.h"

using namespace moetriage;

namespace {

int decide(double threshold, const float *weight, const uint8_t *resident, uint8_t *dropped, bool raw = false) {
    return decide_drops({threshold, raw, true, false}, weight, resident, 4, dropped);
}

void only_cold_and_light_experts_go() {
    const float weight[] = {0.55f, 0.24f, 0.11f, 0.10f};
    const uint8_t resident[] = {0, 0, 1, 0};
    uint8_t dropped[4];
    CHECK(decide(1.0, weight, resident, dropped) == 2);
    CHECK(!dropped[0] && dropped[1] && !dropped[2] && dropped[3]);
    CHECK(decide(0.75, weight, resident, dropped) == 1 && dropped[3]);
    CHECK(decide(0.1, weight, resident, dropped) == 0);
    CHECK(decide(0.0, weight, resident, dropped) == 0);
}

void the_top_expert_stays_even_when_all_are_equal() {
    const float weight[] = {0.25f, 0.25f, 0.25f, 0.25f};
    const uint8_t resident[] = {0, 0, 0, 0};
    uint8_t dropped[4];
    CHECK(decide(1.0, weight, resident, dropped) == 0);  // nothing is below the uniform share
    const float rounded[] = {0.2499f, 0.2499f, 0.2499f, 0.2499f};
    CHECK(decide(1.0, rounded, resident, dropped, true) == 3);  // compared raw, all four are below 1/4: the pin alone holds
    CHECK(!dropped[0]);
}

void the_share_makes_scaled_and_unnormalised_gates_alike() {
    const float normal[] = {0.55f, 0.24f, 0.11f, 0.10f};
    const uint8_t resident[] = {0, 0, 0, 0};
    uint8_t expected[4], dropped[4];
    const int count = decide(0.75, normal, resident, expected);
    for (const float scale : {0.3f, 2.5f}) {
        float weight[4];
        for (int k = 0; k < 4; ++k) weight[k] = normal[k] * scale;
        CHECK(decide(0.75, weight, resident, dropped) == count);
        for (int k = 0; k < 4; ++k) CHECK(dropped[k] == expected[k]);
        CHECK(decide(0.75, weight, resident, dropped, true) != count);  // the literal comparison is off by the scale
    }
}

void mass_is_kept_and_ids_point_at_the_top() {
    float weight[] = {0.5f, 1.1f, 0.2f, 0.2f};
    int32_t expert[] = {7, 3, 9, 12};
    const uint8_t dropped[] = {0, 0, 1, 1};
    const double lost = apply_drops({1.0, false, true, false}, dropped, 4, weight, expert);
    CHECK(std::abs(lost - 0.4) < 1e-6);
    CHECK(weight[2] == 0.0f && weight[3] == 0.0f && expert[2] == 3 && expert[3] == 3 && expert[0] == 7);
    CHECK(std::abs(weight[0] + weight[1] - 2.0f) < 1e-6f);
    CHECK(std::abs(weight[1] / weight[0] - 2.2f) < 1e-5f);
}

void without_renorm_survivors_keep_their_weight() {
    float weight[] = {0.6f, 0.3f, 0.1f, 0.0f};
    int32_t expert[] = {0, 1, 2, 3};
    const uint8_t dropped[] = {0, 0, 1, 0};
    apply_drops({1.0, false, false, false}, dropped, 4, weight, expert);
    CHECK(weight[0] == 0.6f && weight[1] == 0.3f && weight[2] == 0.0f);
}

void nothing_dropped_changes_no_bit() {
    float weight[] = {0.1f, 0.7f, 0.15f, 0.05f};
    int32_t expert[] = {0, 1, 2, 3};
    const uint8_t dropped[] = {0, 0, 0, 0};
    CHECK(apply_drops({1.0, false, true, false}, dropped, 4, weight, expert) == 0.0);
    CHECK(weight[0] == 0.1f && weight[1] == 0.7f && weight[2] == 0.15f && weight[3] == 0.05f && expert[3] == 3);
}

void a_routing_without_mass_is_left_alone() {
    const uint8_t resident[] = {0, 0, 0, 0};
    uint8_t dropped[4];
    const float zero[] = {0, 0, 0, 0};
    const float nan = std::numeric_limits<float>::quiet_NaN();
    const float broken[] = {nan, 0.1f, 0.1f, 0.1f};
    const float huge[] = {std::numeric_limits<float>::infinity(), 0.1f, 0.1f, 0.1f};
    CHECK(decide(1.0, zero, resident, dropped) == 0);
    CHECK(decide(1.0, broken, resident, dropped) == 0);
    CHECK(decide(1.0, huge, resident, dropped) == 0);
}

}  // namespace

int main() {
    only_cold_and_light_experts_go();
    the_top_expert_stays_even_when_all_are_equal();
    the_share_makes_scaled_and_unnormalised_gates_alike();
    mass_is_kept_and_ids_point_at_the_top();
    without_renorm_survivors_keep_their_weight();
    nothing_dropped_changes_no_bit();
    a_routing_without_mass_is_left_alone();
}
