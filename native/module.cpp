// Python bindings of moetriage._native: the only file here that knows Python. Arguments are converted, nothing is decided.

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/unordered_map.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <map>
#include <memory>
#include <tuple>
#include <utility>

#include "eval_hook.h"
#include "model_source.h"

namespace nb = nanobind;
using namespace moetriage;

namespace {

using PlaceTuple = std::tuple<std::string, int32_t, uint64_t, uint64_t>;
using SegmentTuple = std::tuple<uint64_t, uint64_t, int32_t, uint64_t, bool>;
using PlanTuple = std::tuple<int, int, std::vector<std::vector<std::string>>, bool>;
template <typename T, size_t Dims>
using Array = nb::ndarray<const T, nb::ndim<Dims>, nb::c_contig, nb::device::cpu>;

PyObject *pending_signal = nullptr;  // the exception a signal handler raised while the eval thread was inside llama.cpp

// Run Python's signal handlers; true if one raised. Does nothing outside of Python's main thread.
bool poll_signals() {
    const nb::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() == 0) return false;
    PyObject *type = nullptr, *value = nullptr, *trace = nullptr;
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    Py_XDECREF(type);
    Py_XDECREF(trace);
    Py_XDECREF(std::exchange(pending_signal, value));
    return true;
}

void raise_pending_signal() {
    PyObject *value = std::exchange(pending_signal, nullptr);
    if (value == nullptr) return;
    PyErr_SetObject(reinterpret_cast<PyObject *>(Py_TYPE(value)), value);
    Py_DECREF(value);
    throw nb::python_error();
}

std::vector<TensorPlace> places(const std::vector<PlaceTuple> &tuples) {
    std::vector<TensorPlace> out;
    for (const auto &[name, shard, offset, nbytes] : tuples) out.push_back({name, shard, offset, nbytes});
    return out;
}

std::unique_ptr<ModelSource> make_source(const std::string &libggml_base, nb::bytes header, uint64_t size,
                                         const std::vector<SegmentTuple> &segments, std::vector<std::string> shards) {
    std::vector<std::byte> head(header.size());
    std::memcpy(head.data(), header.c_str(), header.size());
    std::vector<Segment> parts;
    for (const auto &[virtual_offset, nbytes, shard, offset, skip] : segments)
        parts.push_back({virtual_offset, nbytes, shard, offset, skip});
    return std::make_unique<ModelSource>(libggml_base, std::move(head), size, std::move(parts), std::move(shards));
}

const char *stop_name(Stop stop) {
    switch (stop) {
        case Stop::none:
            return "";
        case Stop::read_failed:
            return "read_failed";
        case Stop::moved:
            return "moved";
        case Stop::interrupted:
            return "interrupted";
        case Stop::bad_routing:
            return "bad_routing";
        case Stop::out_of_memory:
            return "out_of_memory";
    }
    return "";
}

template <typename T>
nb::object column(std::vector<T> &&values) {
    auto *owned = new std::vector<T>(std::move(values));
    nb::capsule owner(owned, [](void *p) noexcept { delete static_cast<std::vector<T> *>(p); });
    return nb::cast(nb::ndarray<nb::numpy, T, nb::ndim<1>>(owned->data(), {owned->size()}, owner));
}

nb::dict take_routes(EvalHook &hook) {
    RouteColumns routes = hook.take_routes();
    nb::dict out;
    out["phase"] = column(std::move(routes.phase));
    out["step"] = column(std::move(routes.step));
    out["layer"] = column(std::move(routes.layer));
    out["slot"] = column(std::move(routes.slot));
    out["expert"] = column(std::move(routes.expert));
    out["weight"] = column(std::move(routes.weight));
    out["residency"] = column(std::move(routes.residency));
    out["expert_bytes"] = column(std::move(routes.expert_bytes));
    out["dropped"] = column(std::move(routes.dropped));
    return out;
}

// Every counter of the session as one flat dict: Python takes differences around a batch.
std::map<std::string, double> stats(EvalHook &hook) {
    const HookCounters &h = hook.counters();
    std::map<std::string, double> out = {
        {"routed", h.routed},         {"dropped", h.dropped},       {"mass", h.mass},        {"mass_dropped", h.mass_dropped},
        {"hook_nanos", h.hook_nanos}, {"wait_nanos", h.wait_nanos}, {"barriers", h.barriers}};
    if (ExpertStore *store = hook.store()) {
        const CacheCounters &c = store->cache().counters();
        const ReaderCounters r = store->reader().counters();
        const PrefetchCounters &p = store->prefetch_counters();
        out.insert({{"hits", c.hits},
                    {"misses", c.misses},
                    {"evictions", c.evictions},
                    {"peak_bytes", c.peak_bytes},
                    {"budget_bytes", store->cache().budget_bytes()},
                    {"resident_bytes", store->cache().resident_bytes()},
                    {"reads", r.reads},
                    {"read_bytes", r.bytes},
                    {"disk_bytes", r.disk_bytes},
                    {"recycled", r.recycled},
                    {"busy_nanos", r.busy_nanos},
                    {"prefetch_issued", p.issued},
                    {"prefetch_hits", p.hits},
                    {"prefetch_cancelled", p.cancelled}});
    }
    return out;
}

std::vector<PlanTuple> describe(const GraphPlan &plan) {
    std::vector<PlanTuple> out;
    for (const LayerPlan &layer : plan.layers) {
        std::vector<std::vector<std::string>> stages;
        for (const StagePlan &stage : layer.stages) stages.push_back(stage.tensors);
        out.emplace_back(layer.block, layer.top_k, stages, !layer.weights.empty());
    }
    return out;
}

// Read whole tensors that something else than the experts' products consumes; returns the reason of a failure.
std::string read_pinned(ExpertStore &store, const ModelSource &source, const std::vector<PlaceTuple> &pinned) {
    ReadTicket ticket;
    std::vector<ReadJob> jobs;
    for (const TensorPlace &place : places(pinned)) {
        ReadJob job;
        job.shard = place.shard;
        job.offset = place.offset;
        job.nbytes = place.nbytes;
        job.dest = source.address(place.name);
        job.ticket = &ticket;
        jobs.push_back(job);
    }
    store.reader().submit(jobs, false);
    ticket.wait();
    return ticket.failed() ? store.reader().shard_path(ticket.failure().shard) + ": " + ticket.failure().reason : std::string();
}

void arm(EvalHook &hook, GraphPlan &plan, const ModelSource &source, const std::vector<PlaceTuple> &tensors,
         const std::vector<PlaceTuple> &pinned, int n_expert, int lanes, bool direct, bool in_place, bool staged) {
    std::unordered_map<std::string, TensorPlace> by_name;
    for (TensorPlace &place : places(tensors)) by_name.emplace(place.name, place);
    std::vector<ExpertTensor> experts;
    for (size_t layer = 0; layer < plan.layers.size(); ++layer) {
        std::vector<StagePlan> &stages = plan.layers[layer].stages;
        while (!staged && stages.size() > 1) {
            StagePlan last = std::move(stages.back());
            stages.pop_back();
            stages.back().tensors.insert(stages.back().tensors.end(), last.tensors.begin(), last.tensors.end());
        }
        for (size_t stage = 0; stage < stages.size(); ++stage) {
            for (const std::string &name : stages[stage].tensors) {
                const TensorPlace &place = by_name.at(name);
                experts.push_back({name, static_cast<int>(layer), place.shard, place.offset, place.nbytes / static_cast<uint64_t>(n_expert),
                                   source.address(name), static_cast<int>(stage)});
            }
        }
    }
    ReaderOptions options;
    options.lanes = lanes;
    options.direct = direct;
    options.in_place = in_place;
    auto store =
        std::make_unique<ExpertStore>(std::move(experts), static_cast<int>(plan.layers.size()), n_expert, options, source.shards());
    const std::string problem = read_pinned(*store, source, pinned);
    if (!problem.empty()) throw std::runtime_error(problem);
    hook.arm(plan, std::move(store));
}

ForcedPhase forced_phase(const Array<int32_t, 3> &expert, const Array<float, 3> &weight, const Array<uint8_t, 2> &present) {
    if (expert.size() != weight.size() || expert.shape(0) != present.shape(0) || expert.shape(1) != present.shape(1)) {
        throw std::invalid_argument("expert, weight and present disagree in shape");
    }
    ForcedPhase out;
    out.tokens = static_cast<int64_t>(expert.shape(0));
    out.expert.assign(expert.data(), expert.data() + expert.size());
    out.weight.assign(weight.data(), weight.data() + weight.size());
    out.present.assign(present.data(), present.data() + present.size());
    return out;
}

}  // namespace

void bind_replay(nb::module_ &m);  // module_replay.cpp

NB_MODULE(_native, m) {
    bind_replay(m);
    m.doc() = "The hot path of moetriage: eval callback, expert cache, reads.";
    m.attr("version") = MOETRIAGE_VERSION;
    m.def("raise_pending_signal", raise_pending_signal, "Raise the exception of a signal that arrived during an evaluation, if any.");

    nb::class_<GraphPlan>(m, "GraphPlan")
        .def_prop_ro("layers", describe, "Per MoE layer: block, top_k, tensors by stage, whether its weights are known.")
        .def_ro("pinned", &GraphPlan::pinned);

    nb::class_<ModelSource>(m, "ModelSource")
        .def_static("open", make_source, nb::arg("libggml_base"), nb::arg("header"), nb::arg("size"), nb::arg("segments"),
                    nb::arg("shards"))
        .def_prop_ro("file_pointer", [](ModelSource &s) { return reinterpret_cast<uintptr_t>(s.stream()); })
        .def_prop_ro("expert_buffer_type", [](ModelSource &s) { return reinterpret_cast<uintptr_t>(s.expert_buffer_type()); })
        .def_prop_ro("dense_buffer_type", [](ModelSource &s) { return reinterpret_cast<uintptr_t>(s.dense_buffer_type()); })
        .def_prop_ro("read_error", &ModelSource::read_error)
        .def_prop_ro("loaded_bytes", &ModelSource::loaded_bytes)
        .def_prop_ro("reserved_bytes", &ModelSource::reserved_bytes)
        .def(
            "address", [](ModelSource &s, const std::string &name) { return reinterpret_cast<uintptr_t>(s.address(name)); },
            "Address of expert 0 of a tensor; for tests that look at the memory itself.")
        .def("close", &ModelSource::close, "Give files and memory back; the model must be freed and the hook closed.")
        .def("bind_experts", [](ModelSource &s, const std::vector<PlaceTuple> &t) { s.bind_experts(places(t)); })
        .def("map_dense", [](ModelSource &s, const std::vector<PlaceTuple> &t) { s.map_dense(places(t)); });

    nb::class_<EvalHook>(m, "EvalHook")
        .def(
            "__init__",
            [](EvalHook *self, const std::string &libggml_base, double drop_threshold, bool drop_raw, bool drop_renorm,
               bool drop_in_prefill, bool stream, bool record_routes, int prefetch) {
                HookOptions options;
                options.drop = {drop_threshold, drop_raw, drop_renorm, drop_in_prefill};
                options.stream = stream;
                options.record_routes = record_routes;
                options.prefetch_depth = prefetch;
                new (self) EvalHook(GgmlApi::open(libggml_base).probe(), options);
                self->set_interrupt_poll(poll_signals);
            },
            nb::arg("libggml_base"), nb::kw_only(), nb::arg("drop_threshold"), nb::arg("drop_raw"), nb::arg("drop_renorm"),
            nb::arg("drop_in_prefill"), nb::arg("stream"), nb::arg("record_routes"), nb::arg("prefetch"))
        .def_prop_ro_static("callback", [](nb::handle) { return reinterpret_cast<uintptr_t>(&EvalHook::on_eval); })
        .def_prop_ro_static("abort_callback", [](nb::handle) { return reinterpret_cast<uintptr_t>(&EvalHook::on_abort); })
        .def_prop_ro("user_data", [](EvalHook &h) { return reinterpret_cast<uintptr_t>(&h); })
        .def("begin_learning", &EvalHook::begin_learning)
        .def("finish_learning",
             [](EvalHook &h, const std::unordered_map<std::string, int> &blocks) -> nb::object {
                 try {
                     return nb::cast(h.finish_learning(blocks));
                 } catch (const GraphFault &fault) {
                     return nb::make_tuple(fault.node, std::string(fault.what()));
                 }
             })
        .def("arm", arm, nb::arg("plan"), nb::arg("source"), nb::arg("tensors"), nb::arg("pinned"), nb::arg("n_expert"), nb::arg("lanes"),
             nb::arg("direct"), nb::arg("in_place"), nb::arg("staged"),
             // The lanes write into the source's memory until the hook, and with it its store, is gone.
             nb::keep_alive<1, 3>())
        .def("rearm", [](EvalHook &h, GraphPlan &plan) { h.arm(plan, nullptr); })
        .def("force_routing",
             [](EvalHook &h, int layers, int top_k, Array<int32_t, 3> pe, Array<float, 3> pw, Array<uint8_t, 2> pp, Array<int32_t, 3> de,
                Array<float, 3> dw, Array<uint8_t, 2> dp) {
                 h.force_routing(std::make_unique<ForcedRouting>(layers, top_k, forced_phase(pe, pw, pp), forced_phase(de, dw, dp)));
             })
        .def("replay_drops",
             [](EvalHook &h, int layers, int top_k, Array<uint8_t, 3> prefill, Array<uint8_t, 3> decode) {
                 h.replay_drops(std::make_unique<DroppedSet>(layers, top_k,
                                                             std::vector<uint8_t>(prefill.data(), prefill.data() + prefill.size()),
                                                             std::vector<uint8_t>(decode.data(), decode.data() + decode.size())));
             })
        .def("close", &EvalHook::close, "Give the experts' memory, the lanes and their files back; counters stay.")
        .def("set_budget", [](EvalHook &h, uint64_t bytes) { h.store()->cache().set_budget(bytes); })
        .def("begin_batch",
             [](EvalHook &h, int phase, int32_t step, int64_t token) { h.begin_batch(static_cast<Phase>(phase), step, token); })
        .def("end_batch", [](EvalHook &h) { return stop_name(h.end_batch()); })
        .def_prop_ro("fault_node", &EvalHook::fault_node)
        .def_prop_ro("fault_reason", &EvalHook::fault_reason)
        .def(
            "read_failure",
            [](EvalHook &h) {
                const ReadFailure &f = h.store()->failure();
                const auto [layer, expert] = h.store()->locate(f.shard, f.offset);
                const int block = layer < 0 ? -1 : h.plan().layers[static_cast<size_t>(layer)].block;
                return std::make_tuple(h.store()->reader().shard_path(f.shard), f.offset, f.nbytes, block, expert, f.reason);
            },
            "Path, byte offset, bytes, layer, expert and reason of the read that stopped the evaluation.")
        .def("resident",
             [](EvalHook &h, int layer, int expert) { return h.store()->cache().resident(h.store()->cache().slot(layer, expert)); })
        .def_prop_ro("direct_state", [](EvalHook &h) { return h.store() ? h.store()->reader().direct_state() : std::string("off"); })
        .def("stats", stats)
        .def("take_routes", take_routes, nb::sig("def take_routes(self) -> dict[str, object]"),
             "The routing records since the last call, as one array a column of moetriage.trace.schema (without `turn`).");
}
