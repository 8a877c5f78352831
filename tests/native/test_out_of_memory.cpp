// Whatever allocation fails, the process goes on: the batch is stopped and told of, the next one is right. An exception must neither
// leave the eval callback (it would have to cross llama.cpp) nor end a lane.

#include <sys/resource.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "eval_hook.h"
#include "expert_file.h"
#include "fake_graph.h"

using namespace moetriage;

namespace {

thread_local int allocations_left = -1;  // this thread's, until the one that fails; below 0: none does
thread_local bool is_main = false;
std::atomic<bool> lanes_find_none{false};

bool finds_none() {
    if (!is_main) return lanes_find_none;
    return allocations_left >= 0 && allocations_left-- == 0;
}

}  // namespace

void *operator new(size_t bytes) {
    void *memory = finds_none() ? nullptr : std::malloc(bytes);
    if (memory == nullptr) throw std::bad_alloc();
    return memory;
}
void operator delete(void *memory) noexcept {
    std::free(memory);
}
void operator delete(void *memory, size_t) noexcept {
    std::free(memory);
}

namespace {

constexpr int kLayers = 2;
constexpr int kExperts = 8;

fake::Moe moe() {
    fake::Moe out;
    out.tokens = 2;
    out.top_k = 3;
    out.n_expert = kExperts;
    return out;
}
const fake::Moe kMoe = moe();

struct Model {
    Model() {
        GgmlTensor *input = fake::add_embedding(graph, kMoe.tokens);
        for (int layer = 0; layer < kLayers; ++layer) input = fake::add_moe(graph, layer, kMoe, input);
    }

    GraphPlan learn(EvalHook &hook) const {
        hook.begin_learning();
        fake::run(graph, hook, [](GgmlTensor *) {});
        std::unordered_map<std::string, int> blocks;
        for (const ExpertTensor &tensor : file.tensors) blocks[tensor.name] = tensor.layer;
        return hook.finish_learning(blocks);
    }

    // Evaluate a batch whose tokens route to `first` and the experts behind it.
    Stop evaluate(EvalHook &hook, int first) const {
        hook.begin_batch(Phase::decode, first, first);
        fake::run(graph, hook, [&](GgmlTensor *node) {
            const int left = std::exchange(allocations_left, -1);  // the kernels' own are not meant
            if (std::string(node->name).rfind("ffn_moe_topk", 0) == 0) route(node, first);
            if (std::string(node->name).rfind("ffn_moe_weights_norm", 0) == 0) weigh(node);
            if (node->op == fake::kOps.mul_mat_id) check_product(node);
            allocations_left = left;
        });
        return hook.end_batch();
    }

    void route(GgmlTensor *ids, int first) const {
        for (int64_t t = 0; t < ids->ne[1]; ++t) {
            auto *row = reinterpret_cast<int32_t *>(static_cast<char *>(ids->data) + static_cast<size_t>(t) * ids->nb[1]);
            for (int k = 0; k < kMoe.top_k; ++k) row[k] = static_cast<int32_t>((first + t + k) % kExperts);
        }
    }
    void weigh(GgmlTensor *weights) const {
        for (int64_t i = 0; i < weights->elements(); ++i) static_cast<float *>(weights->data)[i] = i % 3 == 0 ? 0.6f : 0.2f;
    }
    // A kernel runs only on what is there.
    void check_product(const GgmlTensor *node) const {
        const GgmlTensor *ids = node->src[2];
        for (int64_t t = 0; t < ids->ne[1]; ++t) {
            const auto *row = reinterpret_cast<const int32_t *>(static_cast<const char *>(ids->data) + static_cast<size_t>(t) * ids->nb[1]);
            for (int k = 0; k < kMoe.top_k; ++k) CHECK(ExpertFile::holds(file.tensor(node->src[0]->name), row[k]));
        }
    }

    ExpertFile file{kLayers, kExperts};
    fake::Graph graph;
};

EvalHook make_hook() {
    HookOptions options;
    options.record_routes = true;
    options.prefetch_depth = 1;
    options.drop.threshold = 0.5;
    return EvalHook(fake::kOps, options);
}

// A hook and a store are made anew each time, so that every buffer has to grow again.
void every_allocation_in_the_eval_callback_may_fail() {
    int failures = 0;
    for (int until = 0;; ++until) {
        const Model model;
        EvalHook hook = make_hook();
        hook.arm(model.learn(hook), model.file.store(2 * kMoe.top_k + 2));
        CHECK(model.evaluate(hook, 1) == Stop::none);
        hook.take_routes();
        allocations_left = until;
        const Stop stop = model.evaluate(hook, 4);
        const bool failed = allocations_left < 0;
        allocations_left = -1;
        CHECK((stop == Stop::out_of_memory) == failed);
        failures += failed;
        for (int first = 0; first < kExperts; ++first) CHECK(model.evaluate(hook, first) == Stop::none);
        if (!failed) break;
    }
    CHECK(failures > 10);
}

void learning_without_memory_is_told() {
    const Model model;
    EvalHook hook = make_hook();
    hook.begin_learning();
    allocations_left = 2;
    fake::run(model.graph, hook, [](GgmlTensor *) {});
    CHECK(allocations_left < 0);
    bool told = false;
    try {
        hook.finish_learning({});
    } catch (const std::bad_alloc &) {
        told = true;
    }
    CHECK(told);
    CHECK(model.learn(hook).layers.size() == kLayers);
}

ssize_t broken_preadv(int, const iovec *, int, off_t) {
    errno = EIO;
    return -1;
}

void a_lane_without_memory_fails_its_read_and_lives() {
    const ExpertFile file(1, kExperts);
    auto store = file.store(kExperts, {.lanes = 2, .direct = false, .preadv_fn = broken_preadv});
    lanes_find_none = true;
    CHECK(!load(*store, 0, {0, 1}));
    CHECK(!load(*store, 0, {0, 1, 2}));
    lanes_find_none = false;
    CHECK(store->failure().reason == "out of memory");
    CHECK(!load(*store, 0, {0, 1}));
    CHECK(store->failure().reason == std::strerror(EIO));
}

size_t open_files() {
    size_t count = 0;
    for ([[maybe_unused]] const auto &entry : std::filesystem::directory_iterator("/proc/self/fd")) ++count;
    return count;
}

size_t address_space() {
    FILE *file = std::fopen("/proc/self/statm", "r");
    size_t pages = 0;
    CHECK(file != nullptr && std::fscanf(file, "%zu", &pages) == 1);
    std::fclose(file);
    return pages * kPage;
}

void limit_address_space(rlim_t bytes) {
    rlimit limit{};
    CHECK(getrlimit(RLIMIT_AS, &limit) == 0);
    limit.rlim_cur = bytes;
    CHECK(setrlimit(RLIMIT_AS, &limit) == 0);
}

void threads_that_cannot_start_are_told_and_leave_nothing() {
    const TempFile file(5000);
    const size_t before = open_files();
    limit_address_space(address_space() + (20 << 20));  // two stacks
    std::string reason;
    try {
        ExpertReader({file.path}, {.lanes = 32});
    } catch (const std::runtime_error &error) {
        reason = error.what();
    }
    limit_address_space(RLIM_INFINITY);
    CHECK(reason.find("of 32 threads") != std::string::npos);
    CHECK(open_files() == before);
}

// At a limit of address space the kernel unmaps the destination of a move and then gives up.
void a_move_that_fails_leaves_no_hole_for_good() {
    const ExpertFile file(1, kExperts);
    auto store = file.store(2, {.lanes = 2});
    CHECK(load(*store, 0, {0, 1}));
    limit_address_space(1 << 20);
    const bool loaded = load(*store, 0, {2, 3});
    limit_address_space(RLIM_INFINITY);
    CHECK(loaded || !store->failure().reason.empty());
    for (const std::vector<int32_t> &experts : {std::vector<int32_t>{2, 3}, {4, 6}, {2, 7}, {3, 0}}) {
        CHECK(load(*store, 0, experts));
        for (const int32_t expert : experts) CHECK(file.holds(0, expert));
    }
}

size_t mappings() {
    FILE *file = std::fopen("/proc/self/maps", "r");
    CHECK(file != nullptr);
    size_t lines = 0;
    for (int c = std::fgetc(file); c != EOF; c = std::fgetc(file)) lines += c == '\n';
    std::fclose(file);
    return lines;
}

void page_moves_leave_mappings_to_others() {
    constexpr int kMany = 64;
    const ExpertFile file(1, kMany);
    for (const size_t quota : {size_t{20}, size_t{100}, size_t{100000}}) {
        MappingQuota left(quota);
        {
            ExpertStore store(file.tensors, 1, kMany, {.lanes = 2}, {file.path()}, left);
            store.cache().set_budget(2 * 3 * ExpertFile::kExpertBytes);
            const size_t before = mappings();
            for (int32_t expert = 0; expert < 3 * kMany; ++expert) {
                CHECK(load(store, 0, {expert % kMany, (expert + 7) % kMany}));
                CHECK(file.holds(0, expert % kMany) && file.holds(0, (expert + 7) % kMany));
            }
            CHECK(store.reader().counters().recycled > 0);
            CHECK(mappings() <= before + quota + 4);  // and whatever the C library maps meanwhile
        }
        CHECK(left.take(quota) && !left.take(1));
    }
}

}  // namespace

int main() {
    is_main = true;
    every_allocation_in_the_eval_callback_may_fail();
    learning_without_memory_is_told();
    a_lane_without_memory_fails_its_read_and_lives();
    page_moves_leave_mappings_to_others();
    if (std::string(MOETRIAGE_SANITIZE).empty()) {  // sanitizers need address space of their own
        threads_that_cannot_start_are_told_and_leave_nothing();
        a_move_that_fails_leaves_no_hole_for_good();
    }
}
