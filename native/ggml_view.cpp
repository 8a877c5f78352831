#include "ggml_view.h"

#include <dlfcn.h>

#include <cstring>
#include <stdexcept>

namespace moetriage {
namespace {

template <typename Fn>
void resolve(void *library, const char *symbol, Fn &out) {
    out = reinterpret_cast<Fn>(dlsym(library, symbol));
    if (out == nullptr) {
        throw std::runtime_error(std::string("the installed llama.cpp lacks ") + symbol + "; install llama-cpp-python 0.3.36");
    }
}

void expect(bool holds, const char *field) {
    if (!holds) {
        throw std::runtime_error(std::string("ggml_tensor of the installed llama.cpp is laid out differently (field ") + field +
                                 "); install llama-cpp-python 0.3.36");
    }
}

}  // namespace

GgmlApi GgmlApi::open(const std::string &libggml_base) {
    void *library = dlopen(libggml_base.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
        throw std::runtime_error("cannot open " + libggml_base + ": " + dlerror());
    }
    GgmlApi api{};
    resolve(library, "ggml_init", api.init);
    resolve(library, "ggml_free", api.free);
    resolve(library, "ggml_new_tensor_2d", api.new_tensor_2d);
    resolve(library, "ggml_new_tensor_3d", api.new_tensor_3d);
    resolve(library, "ggml_mul_mat_id", api.mul_mat_id);
    resolve(library, "ggml_get_rows", api.get_rows);
    resolve(library, "ggml_mul", api.mul);
    resolve(library, "ggml_view_2d", api.view_2d);
    resolve(library, "ggml_set_name", api.set_name);
    resolve(library, "ggml_nbytes", api.nbytes);
    resolve(library, "ggml_backend_cpu_buffer_type", api.cpu_buffer_type);
    resolve(library, "ggml_backend_cpu_buffer_from_ptr", api.cpu_buffer_from_ptr);
    resolve(library, "ggml_backend_buft_name", api.buft_name);
    resolve(library, "ggml_backend_buft_get_alignment", api.buft_get_alignment);
    resolve(library, "ggml_backend_buft_get_max_size", api.buft_get_max_size);
    resolve(library, "ggml_backend_buft_get_alloc_size", api.buft_get_alloc_size);
    resolve(library, "ggml_backend_buft_is_host", api.buft_is_host);
    resolve(library, "ggml_backend_buft_get_device", api.buft_get_device);
    return api;
}

GgmlOps GgmlApi::probe() const {
    constexpr int64_t kIn = 8, kOut = 4, kExperts = 3, kTokens = 5, kUsed = 2;
    void *ctx = init({1 << 20, nullptr, false});
    expect(ctx != nullptr, "context");
    GgmlTensor *experts = new_tensor_3d(ctx, kTypeF32, kIn, kOut, kExperts);
    GgmlTensor *input = new_tensor_3d(ctx, kTypeF32, kIn, 1, kTokens);
    GgmlTensor *sorted = new_tensor_2d(ctx, kTypeI32, kExperts, kTokens);
    GgmlTensor *ids = view_2d(ctx, sorted, kUsed, kTokens, kExperts * sizeof(int32_t), sizeof(int32_t));
    GgmlTensor *probs = new_tensor_3d(ctx, kTypeF32, 1, kExperts, kTokens);
    set_name(experts, "probe.experts");
    GgmlTensor *product = mul_mat_id(ctx, experts, input, ids);
    GgmlTensor *weights = get_rows(ctx, probs, ids);
    GgmlTensor *weighted = mul(ctx, product, weights);

    expect(experts->type == kTypeF32 && ids->type == kTypeI32, "type");
    expect(experts->ne[0] == kIn && experts->ne[1] == kOut && experts->ne[2] == kExperts && experts->ne[3] == 1, "ne");
    expect(experts->nb[0] == 4 && experts->nb[2] == 4 * kIn * kOut, "nb");
    expect(nbytes(experts) == static_cast<size_t>(4 * kIn * kOut * kExperts), "nbytes");
    expect(std::strcmp(experts->name, "probe.experts") == 0, "name");
    expect(experts->data != nullptr && experts->op == 0, "data");
    expect(ids->view_src == sorted && ids->view_offs == sizeof(int32_t), "view_src");
    expect(static_cast<char *>(ids->data) == static_cast<char *>(sorted->data) + sizeof(int32_t), "data of a view");
    expect(product->src[0] == experts && product->src[1] == input && product->src[2] == ids && product->src[3] == nullptr, "src");
    expect(weights->src[0] == probs && weights->src[1] == ids, "src of get_rows");
    expect(weighted->src[0] == product && weighted->src[1] == weights, "src of mul");

    GgmlOps ops{product->op, weights->op, weighted->op};
    expect(ops.mul_mat_id > 0 && ops.get_rows > 0 && ops.mul > 0, "op");
    expect(ops.mul_mat_id != ops.get_rows && ops.get_rows != ops.mul && ops.mul_mat_id != ops.mul, "op codes");
    free(ctx);
    return ops;
}

}  // namespace moetriage
