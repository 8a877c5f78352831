// No product is ever computed on an expert that is not there: whatever the cache holds, the graph looks like, or the disk does.

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "check.h"
#include "eval_hook.h"
#include "expert_file.h"
#include "fake_graph.h"

using namespace moetriage;
using fake::Graph;
using fake::Moe;

namespace {

constexpr int kLayers = 2, kExperts = 8, kTopK = 2;

// A model of two MoE layers, its router (random, or as told), and a count of the products that ran on loaded and on missing experts.
class Model {
   public:
    explicit Model(uint64_t budget_in_experts, HookOptions options = {}, ReaderOptions reader = {}) : hook(fake::kOps, options) {
        std::unordered_map<std::string, int> blocks;
        for (const ExpertTensor &tensor : file.tensors) blocks[tensor.name] = tensor.layer;
        const Graph graph = build(1, 1);
        hook.begin_learning();
        const bool finished = fake::run(graph, hook, [&](GgmlTensor *) { ++computed_while_learning; });
        CHECK(!finished);
        plan = hook.finish_learning(blocks);
        hook.arm(plan, file.store(budget_in_experts, reader));
    }

    // `last`: tokens that the last layer sees.
    static Graph build(int tokens, int last, const std::string &moved = "") {
        Graph graph;
        Moe moe;
        moe.moved = moved;
        moe.tokens = tokens;
        GgmlTensor *out = fake::add_moe(graph, 0, moe, fake::add_embedding(graph, tokens));
        moe.tokens = last;
        if (last != tokens)
            out = graph.node(fake::kOps.get_rows, "rows" + moved, {fake::kWidth, last}, {out, graph.leaf("inp_out_ids", {last})});
        fake::add_moe(graph, 1, moe, out);
        return graph;
    }

    Stop evaluate(const Graph &graph, Phase phase = Phase::decode) {
        hook.begin_batch(phase, 0, 0);
        run(graph);
        return hook.end_batch();
    }

    void run(const Graph &graph) {
        fake::run(graph, hook, [this](GgmlTensor *node) { compute(node); });
    }

    ExpertFile file{kLayers, kExperts};
    EvalHook hook;
    GraphPlan plan;
    int computed_while_learning = 0;
    int loaded = 0, missing = 0;
    std::vector<int32_t> told;             // ids of each token instead of random ones
    std::vector<int32_t> routed[kLayers];  // what the router last chose
    std::mt19937 random{3};
    std::function<void(GgmlTensor *)> also = [](GgmlTensor *) {};

   private:
    void compute(GgmlTensor *node) {
        const std::string name = node->name;
        if (name.rfind("ffn_moe_argsort", 0) == 0) choose(node);
        if (name.rfind("ffn_moe_weights_norm", 0) == 0 && node->view_src == nullptr) weigh(node);
        if (node->op == fake::kOps.mul_mat_id) multiply(node);
        also(node);
    }

    void choose(GgmlTensor *sorted) {
        auto &chosen = routed[sorted->name[std::strlen(sorted->name) - 1] - '0'];
        chosen.clear();
        for (int64_t t = 0; t < sorted->ne[1]; ++t) {
            auto *row = static_cast<int32_t *>(sorted->data) + t * kExperts;
            std::iota(row, row + kExperts, 0);
            std::shuffle(row, row + kExperts, random);
            if (!told.empty()) std::copy(told.begin(), told.end(), row);
            chosen.insert(chosen.end(), row, row + kTopK);
        }
    }

    void weigh(GgmlTensor *norm) {
        for (int64_t t = 0; t < norm->ne[1]; ++t) {
            auto *row = static_cast<float *>(norm->data) + t * kTopK;
            row[0] = 0.5f + 0.4f * static_cast<float>(random() % 1000) / 1000;
            row[1] = 1.0f - row[0];
        }
    }

    void multiply(GgmlTensor *product) {
        const GgmlTensor *ids = product->src[2];
        for (int64_t t = 0; t < ids->ne[1]; ++t) {
            const auto *row = reinterpret_cast<int32_t *>(static_cast<char *>(ids->data) + static_cast<size_t>(t) * ids->nb[1]);
            for (int k = 0; k < kTopK; ++k) ++(ExpertFile::holds(file.tensor(product->src[0]->name), row[k]) ? loaded : missing);
        }
    }
};

HookOptions recording() {
    HookOptions options;
    options.record_routes = true;
    return options;
}

void learning_computes_nothing_that_matters() {
    const Model model(4);
    CHECK(model.computed_while_learning == 1);
    CHECK(model.plan.layers.size() == 2 && model.plan.layers[0].weights == "ffn_moe_weights_norm-0");
}

void every_product_runs_on_loaded_experts() {
    for (const uint64_t budget : {0u, 2u, 5u, 100u}) {
        for (const bool record : {false, true}) {
            for (const int lanes : {1, 4}) {
                Model model(budget, record ? recording() : HookOptions(), {lanes, true, true, nullptr});
                uint64_t routings = 0;
                for (int step = 0; step < 20; ++step) {
                    const int tokens = step % 5 == 0 ? 5 : 1;
                    CHECK(model.evaluate(Model::build(tokens, step % 10 == 0 ? 1 : tokens)) == Stop::none);
                    if (tokens == 1) routings += kLayers * kTopK;
                }
                CHECK(model.missing == 0 && model.loaded > 0);
                const CacheCounters &cache = model.hook.store()->cache().counters();
                CHECK(cache.hits + cache.misses > routings && (cache.hits > 0) == (budget > 2));
            }
        }
    }
}

void prefetch_never_lets_a_product_run_early() {
    HookOptions options;
    options.prefetch_depth = 1;
    Model model(3, options, {2, true, true, nullptr});  // below T, or what was used last is always there
    for (int step = 0; step < 200; ++step) CHECK(model.evaluate(Model::build(1, 1)) == Stop::none);
    CHECK(model.missing == 0 && model.hook.store()->prefetch_counters().issued > 0);
}

void drops_are_edited_into_the_graph() {
    HookOptions options = recording();
    options.drop.threshold = 1.0;
    Model model(2, options);
    int dropped = 0;
    for (int step = 0; step < 20; ++step) {
        const Graph graph = Model::build(1, 1);
        CHECK(model.evaluate(graph) == Stop::none);
        const RouteColumns routes = model.hook.take_routes();
        CHECK(routes.size() == kLayers * kTopK);
        for (int layer = 0; layer < kLayers; ++layer) {
            const auto *weight = static_cast<float *>(graph.find("ffn_moe_weights_norm-" + std::to_string(layer))->data);
            const auto *expert = static_cast<int32_t *>(graph.find("ffn_moe_topk-" + std::to_string(layer))->data);
            const size_t at = static_cast<size_t>(layer) * kTopK;
            CHECK(routes.expert[at] == model.routed[layer][0] && routes.expert[at + 1] == model.routed[layer][1]);
            CHECK(!routes.dropped[at] && expert[0] == model.routed[layer][0]);
            CHECK(std::abs(weight[0] + weight[1] - 1.0f) < 1e-6f);
            if (!routes.dropped[at + 1]) continue;
            ++dropped;
            CHECK(weight[1] == 0.0f && expert[1] == expert[0] && routes.weight[at + 1] > 0.0f && routes.expert_bytes[at + 1] == 0);
            CHECK(model.file.pages(layer, routes.expert[at + 1]) == 0);
        }
    }
    CHECK(dropped > 0 && model.missing == 0);
    CHECK(model.hook.counters().dropped == static_cast<uint64_t>(dropped) && model.hook.counters().routed == 20 * kLayers * kTopK);
}

void a_graph_with_other_names_is_stopped_before_its_products() {
    for (const bool record : {false, true}) {
        Model model(100, record ? recording() : HookOptions());
        CHECK(model.evaluate(Model::build(1, 1, "_moved")) == Stop::moved);  // the first graph of all
        CHECK(model.evaluate(Model::build(3, 3)) == Stop::none);
        const int before = model.loaded;
        CHECK(model.evaluate(Model::build(1, 1, "_moved")) == Stop::moved);  // one after others that were as learned
        model.hook.begin_batch(Phase::prefill, 0, 0);
        model.run(Model::build(3, 3));
        const int first = model.loaded;
        model.run(Model::build(3, 3, "_moved"));  // the second micro-batch of a batch
        CHECK(model.hook.end_batch() == Stop::moved);
        CHECK(first > before && model.loaded == first && model.missing == 0);
        CHECK(model.hook.fault_node().rfind("ffn_moe_up_moved-0", 0) == 0);
    }
}

void a_moved_graph_runs_once_it_is_learned_again() {
    Model model(0);
    std::unordered_map<std::string, int> blocks;
    for (const ExpertTensor &tensor : model.file.tensors) blocks[tensor.name] = tensor.layer;
    for (const char *moved : {"_a", "_b"}) {
        CHECK(model.evaluate(Model::build(1, 1, moved)) == Stop::moved);
        Graph graph = Model::build(1, 1, moved);
        // Without this name two products share a stage, which the store was not made with.
        if (moved[1] == 'b') std::strcpy(graph.find("ffn_moe_up_b-0")->name, "node_3");
        model.hook.begin_learning();
        fake::run(graph, model.hook, [](GgmlTensor *) {});
        GraphPlan plan = model.hook.finish_learning(blocks);
        CHECK(plan.layers[0].stages.size() == (moved[1] == 'b' ? 2u : 3u));
        model.hook.arm(std::move(plan), nullptr);
        for (int step = 0; step < 20; ++step) CHECK(model.evaluate(graph) == Stop::none);
    }
    CHECK(model.missing == 0 && model.loaded == 40 * kLayers * kTopK * 3);
}

void a_product_whose_routing_is_known_is_loaded_in_place() {
    Model model(4);
    Graph graph = Model::build(1, 1);
    // Behind layer 0's routing, which is always shown, comes layer 1's first product, routed by the same ids.
    GgmlTensor *up = graph.find("ffn_moe_up-1");
    up->src[2] = graph.find("ffn_moe_topk-0");
    auto &nodes = graph.nodes;
    nodes.erase(std::find(nodes.begin(), nodes.end(), up));
    nodes.insert(std::find(nodes.begin(), nodes.end(), graph.find("ffn_moe_topk-0")) + 1, up);
    nodes.erase(std::find(nodes.begin(), nodes.end(), up) + 1, nodes.end());
    CHECK(model.evaluate(graph) == Stop::none);
    CHECK(model.loaded == kTopK && model.missing == 0);
    for (int stage = 0; stage < 3; ++stage) CHECK(ExpertFile::holds(model.file.tensor(1, stage), model.routed[0][0]));
}

void an_interrupt_is_noticed_between_two_layers() {
    Model model(4);
    static bool asked = false;
    model.hook.set_interrupt_poll([] { return asked = true; });
    model.also = [](GgmlTensor *node) {
        if (std::string(node->name) == "ffn_moe_out-0") std::this_thread::sleep_for(std::chrono::milliseconds(60));
    };
    CHECK(model.evaluate(Model::build(1, 1)) == Stop::interrupted);
    CHECK(asked && model.loaded == 3 * kTopK && model.missing == 0);
    model.hook.set_interrupt_poll([] { return false; });
    CHECK(model.evaluate(Model::build(1, 1)) == Stop::none);
}

void a_failed_read_stops_before_the_product_that_needs_it() {
    for (const int stage : {0, 1, 2}) {
        Model model(100);
        model.told = {3, 5};
        model.file.cut(model.file.tensor(1, stage).offset);
        for (int again = 0; again < 2; ++again) {
            model.loaded = 0;
            CHECK(model.evaluate(Model::build(1, 1)) == Stop::read_failed);
            CHECK(model.missing == 0);
            // Layer 0 ran whole, layer 1 at most up to the stage at fault.
            CHECK(model.loaded >= 3 * kTopK && model.loaded <= (3 + stage) * kTopK);
            CHECK(model.hook.store()->locate(0, model.hook.store()->failure().offset).first == 1);
        }
        model.file.mend();
        CHECK(model.evaluate(Model::build(1, 1)) == Stop::none);
        CHECK(model.missing == 0);
    }
}

ForcedPhase forced_rows(int64_t tokens, int32_t shift) {
    ForcedPhase rows;
    rows.tokens = tokens;
    for (int64_t i = 0; i < tokens * kLayers; ++i) {
        for (int k = 0; k < kTopK; ++k) {
            rows.expert.push_back(static_cast<int32_t>((i + k + shift) % kExperts));
            rows.weight.push_back(k == 0 ? 0.75f : 0.25f);
        }
        rows.present.push_back(1);
    }
    return rows;
}

void forced_routing_replaces_ids_and_weights_row_by_row() {
    Model model(5, recording());
    model.hook.force_routing(std::make_unique<ForcedRouting>(kLayers, kTopK, forced_rows(8, 0), forced_rows(4, 1)));
    model.hook.begin_batch(Phase::prefill, 0, 0);
    for (const int tokens : {3, 3, 2}) model.run(Model::build(tokens, tokens == 2 ? 1 : 0));  // only the last token has an output
    CHECK(model.hook.end_batch() == Stop::none);
    const RouteColumns routes = model.hook.take_routes();
    CHECK(routes.size() == (8 + 1) * kTopK && model.missing == 0);
    int step = 0;
    for (size_t at = 0; at < routes.size(); at += kTopK) {
        CHECK(routes.step[at] == (routes.layer[at] == 0 ? step++ : 7));
        CHECK(routes.expert[at] == (routes.step[at] * kLayers + routes.layer[at]) % kExperts);
        CHECK(routes.weight[at] == 0.75f && routes.weight[at + 1] == 0.25f);
    }
    model.hook.begin_batch(Phase::decode, 8, 5);  // the sixth decoded token of a trace that has four
    const Graph graph = Model::build(1, 1);
    model.run(graph);
    CHECK(model.hook.end_batch() == Stop::none);
    CHECK(static_cast<int32_t *>(graph.find("ffn_moe_topk-1")->data)[0] == (1 * kLayers + 1 + 1) % kExperts);
    CHECK(static_cast<float *>(graph.find("ffn_moe_weights_norm-1")->data)[1] == 0.25f);
}

void replayed_drops_do_not_ask_the_cache() {
    for (const uint64_t budget : {0u, 100u}) {
        Model model(budget, recording());
        std::vector<uint8_t> decode(static_cast<size_t>(2 * kLayers * kTopK), 0);
        decode[1] = decode[2 * kLayers + 3] = 1;  // token 0, layer 0, slot 1; token 1, layer 1, slot 1
        model.hook.replay_drops(std::make_unique<DroppedSet>(kLayers, kTopK, std::vector<uint8_t>(), decode));
        std::vector<int> dropped;
        for (int token = 0; token < 3; ++token) {
            model.hook.begin_batch(Phase::decode, token, token);
            model.run(Model::build(1, 1));
            CHECK(model.hook.end_batch() == Stop::none);
            for (const int8_t flag : model.hook.take_routes().dropped) dropped.push_back(flag);
        }
        CHECK((dropped == std::vector<int>{0, 1, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0}) && model.missing == 0);
        CHECK(model.hook.counters().dropped == 2);
    }
}

void routing_that_cannot_be_followed_is_refused() {
    Model model(4);
    model.told = {3, kExperts};
    CHECK(model.evaluate(Model::build(1, 1)) == Stop::bad_routing && model.hook.fault_node() == "ffn_moe_topk-0");
    model.told = {-1, 3};
    CHECK(model.evaluate(Model::build(1, 1)) == Stop::bad_routing);
    model.told.clear();
    CHECK(model.loaded == 0 && model.missing == 0);
    CHECK(model.evaluate(Model::build(1, 1)) == Stop::none && model.missing == 0);
    model.hook.force_routing(std::make_unique<ForcedRouting>(kLayers, 3, ForcedPhase(), ForcedPhase()));
    CHECK(model.evaluate(Model::build(1, 1)) == Stop::bad_routing);
}

void an_interrupted_learning_does_not_last() {
    Model model(4);
    model.hook.begin_learning();
    CHECK(model.evaluate(Model::build(1, 1)) == Stop::none);
    CHECK(model.loaded == kLayers * kTopK * 3 && model.missing == 0);
}

}  // namespace

int main() {
    learning_computes_nothing_that_matters();
    every_product_runs_on_loaded_experts();
    prefetch_never_lets_a_product_run_early();
    drops_are_edited_into_the_graph();
    a_graph_with_other_names_is_stopped_before_its_products();
    a_moved_graph_runs_once_it_is_learned_again();
    a_product_whose_routing_is_known_is_loaded_in_place();
    an_interrupt_is_noticed_between_two_layers();
    a_failed_read_stops_before_the_product_that_needs_it();
    forced_routing_replaces_ids_and_weights_row_by_row();
    replayed_drops_do_not_ask_the_cache();
    routing_that_cannot_be_followed_is_refused();
    an_interrupted_learning_does_not_last();
}
