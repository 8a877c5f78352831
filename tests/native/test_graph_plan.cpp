// Every gating and layout that llama.cpp builds is learned from the graph; one that cannot be followed is refused by the node's name.

#include <string>
#include <unordered_map>
#include <vector>

#include "check.h"
#include "fake_graph.h"
#include "graph_plan.h"

using namespace moetriage;
using fake::Gate;
using fake::Graph;
using fake::Moe;

namespace {

using Names = std::vector<std::string>;

std::unordered_map<std::string, int> blocks() {
    std::unordered_map<std::string, int> of;
    for (int block = 0; block < 3; ++block) {
        for (const char *projection : {"gate", "up", "down", "gate_up"}) of[fake::expert_name(block, projection)] = block;
    }
    return of;
}

GraphPlan learn(const Graph &graph) {
    return GraphPlan::learn(fake::kOps, graph.nodes, blocks());
}

LayerPlan learn_layer(const Moe &moe) {
    Graph graph;
    fake::add_moe(graph, 1, moe, fake::add_embedding(graph, moe.tokens));
    const GraphPlan plan = learn(graph);
    CHECK(plan.layers.size() == 1 && plan.pinned.empty());
    return plan.layers[0];
}

std::string fault_at(const Graph &graph) {
    try {
        learn(graph);
    } catch (const GraphFault &fault) {
        return fault.node;
    }
    return "no fault";
}

void separate_projections_are_stages_of_their_own() {
    const LayerPlan layer = learn_layer({});
    CHECK(layer.block == 1 && layer.top_k == 2 && layer.ids == "ffn_moe_topk-1");
    CHECK(layer.stages.size() == 3);
    CHECK((layer.stages[0].tensors == Names{"blk.1.ffn_up_exps.weight"}) && layer.stages[0].wait.empty());
    CHECK((layer.stages[1].tensors == Names{"blk.1.ffn_gate_exps.weight"}) && layer.stages[1].wait == "ffn_moe_up-1");
    CHECK((layer.stages[2].tensors == Names{"blk.1.ffn_down_exps.weight"}) && layer.stages[2].wait == "ffn_moe_swiglu-1");
}

void fused_projections_are_one_stage() {
    Moe moe;
    moe.fused = true;
    const LayerPlan layer = learn_layer(moe);
    CHECK(layer.stages.size() == 2);
    CHECK((layer.stages[0].tensors == Names{"blk.1.ffn_gate_up_exps.weight"}));
    CHECK((layer.stages[1].tensors == Names{"blk.1.ffn_down_exps.weight"}) && layer.stages[1].wait == "ffn_moe_geglu-1");
}

void the_last_node_of_each_gating_holds_the_weights() {
    for (const int tokens : {1, 5}) {
        for (const auto &[gate, name] : {std::pair{Gate::plain, "ffn_moe_weights-1"},
                                         {Gate::normalised, "ffn_moe_weights_norm-1"},
                                         {Gate::softmax, "ffn_moe_weights_softmax-1"},
                                         {Gate::scaled, "ffn_moe_weights_scaled-1"}}) {
            Moe moe;
            moe.gate = gate;
            moe.tokens = tokens;
            CHECK(learn_layer(moe).weights == name);
        }
    }
}

void a_per_expert_scale_is_not_taken_for_the_weights() {
    Moe moe;
    moe.expert_scale = true;
    CHECK(learn_layer(moe).weights == "ffn_moe_weights_norm-1");
    moe.fused = true;
    CHECK(learn_layer(moe).weights == "ffn_moe_weights_norm-1");
}

void weights_may_be_applied_before_the_experts() {
    Moe moe;
    moe.gate = Gate::plain;
    moe.weigh_input = true;
    CHECK(learn_layer(moe).weights == "ffn_moe_weights-1");
}

void weights_that_cannot_be_found_again_are_left_unknown() {
    Graph graph;
    Moe moe;
    moe.gate = Gate::softmax;
    fake::add_moe(graph, 1, moe, fake::add_embedding(graph, 1));
    std::strcpy(graph.find("ffn_moe_weights_softmax-1")->name, "node_44");
    CHECK(learn(graph).layers[0].weights.empty());
}

void weights_that_come_after_the_experts_are_left_unknown() {
    Graph graph;
    fake::add_moe(graph, 1, {}, fake::add_embedding(graph, 1));
    // The same graph with its weights computed only where they are needed.
    std::vector<GgmlTensor *> early, late;
    for (GgmlTensor *node : graph.nodes) {
        const bool is_weights = std::string(node->name).rfind("ffn_moe_weights", 0) == 0;
        if (std::string(node->name) == "ffn_moe_weighted-1") early.insert(early.end(), late.begin(), late.end());
        (is_weights ? late : early).push_back(node);
    }
    graph.nodes = early;
    CHECK(learn(graph).layers[0].weights.empty());
}

void products_without_a_named_node_between_them_share_a_stage() {
    Graph graph;
    fake::add_moe(graph, 1, {}, fake::add_embedding(graph, 1));
    std::strcpy(graph.find("ffn_moe_up-1")->name, "node_10");
    const LayerPlan layer = learn(graph).layers[0];
    CHECK(layer.stages.size() == 2);
    CHECK((layer.stages[0].tensors == Names{"blk.1.ffn_up_exps.weight", "blk.1.ffn_gate_exps.weight"}));
}

void layers_come_in_the_order_they_run() {
    Graph graph;
    GgmlTensor *out = fake::add_moe(graph, 2, {}, fake::add_embedding(graph, 1));
    fake::add_moe(graph, 0, {}, out);
    const GraphPlan plan = learn(graph);
    CHECK(plan.layers.size() == 2 && plan.layers[0].block == 2 && plan.layers[1].block == 0);
}

void a_tensor_that_something_else_reads_too_is_pinned() {
    Graph graph;
    GgmlTensor *out = fake::add_moe(graph, 0, {}, fake::add_embedding(graph, 1));
    graph.node(fake::kOther, "sum_of_all", {16}, {graph.find("ffn_moe_gate-0")->src[0]});
    fake::add_moe(graph, 1, {}, out);
    const GraphPlan plan = learn(graph);
    CHECK((plan.pinned == Names{"blk.0.ffn_gate_exps.weight"}));
    CHECK(plan.layers.size() == 2 && plan.layers[0].stages.size() == 2);
    for (const StagePlan &stage : plan.layers[0].stages) CHECK(stage.tensors[0] != plan.pinned[0]);
}

void two_routings_in_a_layer_are_refused() {
    Graph graph;
    fake::add_moe(graph, 1, {}, fake::add_embedding(graph, 1));
    GgmlTensor *other = graph.node(fake::kOther, "other_ids", {2, 1}, {}, kTypeI32);
    GgmlTensor *down = graph.find("ffn_moe_down-1");
    down->src[2] = other;
    CHECK(fault_at(graph) == "ffn_moe_down-1");
}

void a_layer_in_two_places_is_refused() {
    Graph graph;
    GgmlTensor *out = fake::add_moe(graph, 1, {}, fake::add_embedding(graph, 1));
    out = fake::add_moe(graph, 0, {}, out);
    Moe again;
    again.moved = "_again";
    fake::add_moe(graph, 1, again, out);
    CHECK(fault_at(graph) == "ffn_moe_up_again-1");
}

void ids_without_a_name_of_their_own_are_refused() {
    for (const char *name : {"node_7", "leaf_7", "", "ffn_moe_up-1"}) {
        Graph graph;
        fake::add_moe(graph, 1, {}, fake::add_embedding(graph, 1));
        std::strcpy(graph.find("ffn_moe_topk-1")->name, name);
        CHECK(fault_at(graph) == name);
    }
}

void ids_of_another_type_are_refused() {
    Graph graph;
    fake::add_moe(graph, 1, {}, fake::add_embedding(graph, 1));
    graph.find("ffn_moe_topk-1")->type = 27;
    CHECK(fault_at(graph) == "ffn_moe_topk-1");
}

void a_graph_without_experts_is_refused() {
    Graph graph;
    fake::add_embedding(graph, 1);
    CHECK(fault_at(graph) == "MUL_MAT_ID");
    CHECK(fault_at(Graph()) == "MUL_MAT_ID");
}

}  // namespace

int main() {
    separate_projections_are_stages_of_their_own();
    fused_projections_are_one_stage();
    the_last_node_of_each_gating_holds_the_weights();
    a_per_expert_scale_is_not_taken_for_the_weights();
    weights_may_be_applied_before_the_experts();
    weights_that_cannot_be_found_again_are_left_unknown();
    weights_that_come_after_the_experts_are_left_unknown();
    products_without_a_named_node_between_them_share_a_stage();
    layers_come_in_the_order_they_run();
    a_tensor_that_something_else_reads_too_is_pinned();
    two_routings_in_a_layer_are_refused();
    a_layer_in_two_places_is_refused();
    ids_without_a_name_of_their_own_are_refused();
    ids_of_another_type_are_refused();
    a_graph_without_experts_is_refused();
}
