// Python bindings of the replay. Arguments are converted and their shapes checked, nothing is decided.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "bound.h"
#include "replay.h"

namespace nb = nanobind;
using namespace moetriage;

namespace {

template <typename T>
using Column = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <typename T>
using Routings = std::optional<Column<T>>;

using Dict = nb::typed<nb::dict, std::string, nb::object>;

template <typename T>
nb::object column(std::vector<T> &&values) {
    auto *owned = new std::vector<T>(std::move(values));
    nb::capsule owner(owned, [](void *p) noexcept { delete static_cast<std::vector<T> *>(p); });
    return nb::cast(nb::ndarray<nb::numpy, T, nb::ndim<1>>(owned->data(), {owned->size()}, owner));
}

template <typename T>
const T *routings(const Routings<T> &values, size_t n, const char *name) {
    if (!values) return nullptr;
    if (values->size() != n) throw std::invalid_argument(std::string(name) + " has another length than expert");
    return values->data();
}

RouteBatches batches_of(const Column<int32_t> &layer, const Column<uint8_t> &phase, const Column<int64_t> &first_cell,
                        const Column<int32_t> &expert, int top_k) {
    const size_t count = layer.size();
    if (phase.size() != count || first_cell.size() != count + 1)
        throw std::invalid_argument("layer, phase and first_cell disagree in length");
    const int64_t *cell = first_cell.data();
    const bool fits = cell[0] == 0 && std::is_sorted(cell, cell + count + 1) && cell[count] * top_k == static_cast<int64_t>(expert.size());
    if (!fits) throw std::invalid_argument("first_cell does not fit the routings");
    return {static_cast<int64_t>(count), layer.data(), phase.data(), cell, expert.data(), nullptr, nullptr, nullptr, nullptr};
}

Dict feed(Replay &replay, const Column<int32_t> &layer, const Column<uint8_t> &phase, const Column<int64_t> &first_cell,
          const Column<int32_t> &expert, const Column<float> &weight, const Routings<uint8_t> &resident, const Routings<int32_t> &next_use,
          const Routings<uint8_t> &plan, bool marks) {
    RouteBatches batches = batches_of(layer, phase, first_cell, expert, replay.top_k());
    const size_t n = expert.size();
    if (weight.size() != n) throw std::invalid_argument("weight has another length than expert");
    batches.weight = weight.data();
    batches.resident = routings(resident, n, "resident");
    batches.next_use = routings(next_use, n, "next_use");
    batches.plan = routings(plan, n, "plan");
    std::vector<uint8_t> was_resident(marks ? n : 0), dropped(marks ? n : 0);
    std::vector<int64_t> bytes(marks ? n : 0);
    {
        const nb::gil_scoped_release unlocked;
        replay.feed(batches, marks ? RouteMarks{was_resident.data(), dropped.data(), bytes.data()} : RouteMarks{});
    }
    Dict out;
    if (!marks) return out;
    out["residency"] = column(std::move(was_resident));
    out["dropped"] = column(std::move(dropped));
    out["expert_bytes"] = column(std::move(bytes));
    return out;
}

Dict tally(const Replay &replay, int phase) {
    const ReplayTally &t = replay.tally(phase == 0 ? 0 : 1);
    Dict out;
    out["tokens"] = t.tokens;
    out["routed"] = t.cells * static_cast<uint64_t>(replay.top_k());
    out["cells"] = t.cells;
    out["dropped"] = t.dropped;
    out["hits"] = t.hits;
    out["misses"] = t.misses;
    out["skipped"] = t.skipped;
    out["read_bytes"] = t.read_bytes;
    out["skipped_bytes"] = t.skipped_bytes;
    out["ahead"] = t.ahead;
    out["ahead_hits"] = t.ahead_hits;
    out["ahead_bytes"] = t.ahead_bytes;
    out["weight"] = t.mass;
    out["weight_dropped"] = t.mass_dropped;
    return out;
}

std::unique_ptr<Replay> make_replay(const std::optional<std::string> &evict, std::vector<uint64_t> expert_bytes, int n_expert, int top_k,
                                    uint64_t budget, uint64_t seed, double drop_threshold, bool drop_raw, bool drop_in_prefill, int keep,
                                    bool closed_loop, int prefetch) {
    ReplayOptions options;
    options.drop.threshold = drop_threshold;
    options.drop.raw_weight = drop_raw;
    options.drop.in_prefill = drop_in_prefill;
    options.top_k = top_k;
    options.keep = keep;
    options.closed_loop = closed_loop;
    options.prefetch_depth = prefetch;
    if (!evict) return recorded_replay(std::move(expert_bytes), n_expert, options);
    return cache_replay(*evict, std::move(expert_bytes), n_expert, budget, seed, options);
}

std::unique_ptr<BoundProblem> make_bound(const Column<int32_t> &layer, const Column<uint8_t> &phase, const Column<int64_t> &first_cell,
                                         const Column<int32_t> &expert, const Column<float> &weight, std::vector<uint64_t> expert_bytes,
                                         int n_expert, int top_k, uint64_t budget, int counted_phase, bool count_misses) {
    RouteBatches batches = batches_of(layer, phase, first_cell, expert, top_k);
    if (weight.size() != expert.size()) throw std::invalid_argument("weight has another length than expert");
    batches.weight = weight.data();
    return std::make_unique<BoundProblem>(batches, std::move(expert_bytes), n_expert, top_k, budget, counted_phase, count_misses);
}

nb::tuple evaluate(BoundProblem &problem, const Column<double> &price, double weight_price) {
    if (static_cast<int64_t>(price.size()) != problem.batches()) throw std::invalid_argument("there must be a price for each layer batch");
    std::vector<double> held(price.size());
    double value = 0.0, discarded = 0.0;
    {
        const nb::gil_scoped_release unlocked;
        value = problem.evaluate(price.data(), weight_price, held.data(), &discarded);
    }
    return nb::make_tuple(value, column(std::move(held)), discarded);
}

nb::tuple plan(const BoundProblem &problem, double weight_price, size_t n) {
    std::vector<uint8_t> drop(n, 0);
    std::vector<int32_t> next_use(n, INT32_MAX);
    if (problem.routings() > n) throw std::invalid_argument("the plan has fewer routings than the trace");
    problem.plan(weight_price, drop.data(), next_use.data());
    return nb::make_tuple(column(std::move(drop)), column(std::move(next_use)));
}

}  // namespace

void bind_replay(nb::module_ &m) {
    nb::class_<Replay>(m, "Replay")
        .def_static("make", make_replay, nb::arg("evict").none(), nb::kw_only(), nb::arg("expert_bytes"), nb::arg("n_expert"),
                    nb::arg("top_k"), nb::arg("budget"), nb::arg("seed"), nb::arg("drop_threshold"), nb::arg("drop_raw"),
                    nb::arg("drop_in_prefill"), nb::arg("keep"), nb::arg("closed_loop"), nb::arg("prefetch"),
                    "Without a policy the trace's own residency is replayed.")
        .def("feed", feed, nb::arg("layer"), nb::arg("phase"), nb::arg("first_cell"), nb::arg("expert"), nb::arg("weight"),
             nb::arg("resident") = nb::none(), nb::arg("next_use") = nb::none(), nb::arg("plan") = nb::none(), nb::arg("marks") = false)
        .def("tally", tally, nb::arg("phase"))
        .def_prop_ro("evictions", [](const Replay &r) { return r.cache_counters().evictions; })
        .def_prop_ro("peak_bytes", [](const Replay &r) { return r.cache_counters().peak_bytes; })
        .def_prop_ro("resident_bytes", &Replay::resident_bytes)
        .def_prop_ro("layer_hits", &Replay::layer_hits)
        .def_prop_ro("layer_dropped", &Replay::layer_dropped);

    nb::class_<BoundProblem>(m, "BoundProblem")
        .def_static("make", make_bound, nb::arg("layer"), nb::arg("phase"), nb::arg("first_cell"), nb::arg("expert"), nb::arg("weight"),
                    nb::kw_only(), nb::arg("expert_bytes"), nb::arg("n_expert"), nb::arg("top_k"), nb::arg("budget"),
                    nb::arg("counted_phase"), nb::arg("count_misses"))
        .def("evaluate", evaluate, nb::arg("price"), nb::arg("weight_price"),
             nb::sig("def evaluate(self, price: object, weight_price: float) -> tuple[float, object, float]"),
             "Lower bound, bytes held after each batch, weight discarded.")
        .def("plan", plan, nb::arg("weight_price"), nb::arg("n"),
             nb::sig("def plan(self, weight_price: float, n: int) -> tuple[object, object]"), "Drop flags and next uses of n routings.")
        .def_prop_ro("capacity", [](const BoundProblem &p) { return p.capacity(); });

    m.def(
        "next_uses",
        [](const Column<int32_t> &layer, const Column<uint8_t> &phase, const Column<int64_t> &first_cell, const Column<int32_t> &expert,
           int n_layers, int n_expert, int top_k, int keep) {
            const RouteBatches batches = batches_of(layer, phase, first_cell, expert, top_k);
            return column(next_uses(batches, static_cast<size_t>(n_layers), n_expert, top_k, keep));
        },
        nb::arg("layer"), nb::arg("phase"), nb::arg("first_cell"), nb::arg("expert"), nb::kw_only(), nb::arg("n_layers"),
        nb::arg("n_expert"), nb::arg("top_k"), nb::arg("keep"));
}
