// A model file prepared for llama.cpp: what its loader reads from, and where it puts the weights.
//
// In: header, segments and shard paths from moetriage.gguf.virtual. Out: a FILE*, two buffer types (experts, everything else), and the
// tensors bound to their final addresses once the loader is done. Must outlive the llama model.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "ggml_view.h"
#include "virtual_file.h"
#include "weight_region.h"

namespace moetriage {

struct TensorPlace {
    std::string name;
    int32_t shard;
    uint64_t offset;
    uint64_t nbytes;
};

class ModelSource {
   public:
    ModelSource(const std::string &libggml_base, std::vector<std::byte> header, uint64_t size, std::vector<Segment> segments,
                std::vector<std::string> shards);
    ~ModelSource();

    FILE *stream() { return file_->stream(); }
    GgmlBufferType *expert_buffer_type() { return experts_.buffer_type(); }
    GgmlBufferType *dense_buffer_type() { return dense_.buffer_type(); }
    const std::string &read_error() const { return file_->error(); }
    const GgmlOps &ops() const { return ops_; }
    const std::vector<std::string> &shards() const { return shards_; }
    uint64_t loaded_bytes() const { return file_->bytes_read(); }  // read from the shards while loading
    uint64_t reserved_bytes() const { return experts_.reserved_bytes(); }

    // After loading: give each expert tensor reserved memory of its own that mirrors its file offset. Nothing is read yet.
    void bind_experts(const std::vector<TensorPlace> &tensors);

    // Let dense tensors point into a read-only mapping of their shard instead of own memory.
    void map_dense(const std::vector<TensorPlace> &tensors);

    // Once the model is freed and no lane runs: give files and memory back. What was counted stays.
    void close();

    // Where an expert tensor's first byte belongs; throws std::runtime_error if llama.cpp created no such tensor.
    std::byte *address(const std::string &name) const;

   private:
    struct Mapping {
        void *address = nullptr;
        size_t size = 0;
    };

    GgmlApi api_;
    GgmlOps ops_;
    std::vector<std::string> shards_;
    WeightRegion experts_;
    WeightRegion dense_;
    std::unique_ptr<VirtualFile> file_;
    std::vector<Mapping> mappings_;
};

}  // namespace moetriage
