// The fields of ggml_tensor that we read, and the handful of ggml functions we call.
//
// In: the path of the libggml-base that runs the model. Out: typed function pointers, operation codes and a tensor view whose layout
// was checked against tensors built through ggml's own API. Knows nothing of experts, caches or files.
// The wheel ships no headers and the struct may change between versions, so nothing here is trusted before probe() has passed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace moetriage {

struct GgmlTensor {
    int32_t type;
    void *buffer;
    int64_t ne[4];
    size_t nb[4];
    int32_t op;
    int32_t op_params[16];
    int32_t flags;
    GgmlTensor *src[10];
    GgmlTensor *view_src;
    size_t view_offs;
    void *data;
    char name[64];
    void *extra;

    int64_t elements() const { return ne[0] * ne[1] * ne[2] * ne[3]; }
    const GgmlTensor *base() const { return view_src != nullptr ? view_src : this; }
    bool is_leaf() const { return base()->op == 0; }
};

// Values of ggml's public, file-stable type enum.
constexpr int32_t kTypeF32 = 0;
constexpr int32_t kTypeI32 = 26;

// Operation codes are renumbered between ggml versions; these are read off tensors that ggml built for us.
struct GgmlOps {
    int32_t mul_mat_id = -1;
    int32_t get_rows = -1;
    int32_t mul = -1;
};

struct GgmlInitParams {
    size_t mem_size;
    void *mem_buffer;
    bool no_alloc;
};

// The head of ggml's buffer type: a table of functions, the device and a context. Opaque upstream, therefore probed as well.
struct GgmlBufferType {
    const char *(*get_name)(GgmlBufferType *);
    void *(*alloc_buffer)(GgmlBufferType *, size_t);
    size_t (*get_alignment)(GgmlBufferType *);
    size_t (*get_max_size)(GgmlBufferType *);
    size_t (*get_alloc_size)(GgmlBufferType *, const GgmlTensor *);
    bool (*is_host)(GgmlBufferType *);
    void *device;
    void *context;
};

struct GgmlApi {
    void *(*init)(GgmlInitParams);
    void (*free)(void *);
    GgmlTensor *(*new_tensor_2d)(void *, int32_t, int64_t, int64_t);
    GgmlTensor *(*new_tensor_3d)(void *, int32_t, int64_t, int64_t, int64_t);
    GgmlTensor *(*mul_mat_id)(void *, GgmlTensor *, GgmlTensor *, GgmlTensor *);
    GgmlTensor *(*get_rows)(void *, GgmlTensor *, GgmlTensor *);
    GgmlTensor *(*mul)(void *, GgmlTensor *, GgmlTensor *);
    GgmlTensor *(*view_2d)(void *, GgmlTensor *, int64_t, int64_t, size_t, size_t);
    GgmlTensor *(*set_name)(GgmlTensor *, const char *);
    size_t (*nbytes)(const GgmlTensor *);
    GgmlBufferType *(*cpu_buffer_type)();
    void *(*cpu_buffer_from_ptr)(void *, size_t);
    const char *(*buft_name)(GgmlBufferType *);
    size_t (*buft_get_alignment)(GgmlBufferType *);
    size_t (*buft_get_max_size)(GgmlBufferType *);
    size_t (*buft_get_alloc_size)(GgmlBufferType *, const GgmlTensor *);
    bool (*buft_is_host)(GgmlBufferType *);
    void *(*buft_get_device)(GgmlBufferType *);

    // Resolve every symbol from an already loaded library; throws std::runtime_error naming the missing one.
    static GgmlApi open(const std::string &libggml_base);

    // Check the tensor layout and return the operation codes; throws std::runtime_error naming the field that differs.
    GgmlOps probe() const;
};

}  // namespace moetriage
