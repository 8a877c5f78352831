// Address space for weights that llama.cpp believes it allocated, and that we fill (or leave empty) ourselves.
//
// In: a buffer type handed to llama.cpp through the public tensor_buft_overrides. Out: the tensors it placed there, each in pages of
// its own, and ranges of those pages to release. Knows no cache and no file.
// Why a buffer type of our own: the memory is reserved without being committed (MAP_NORESERVE), so a model larger than memory loads
// under the kernel's default overcommit rule, which refuses a single malloc above RAM + swap. See docs/seam.md.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "ggml_view.h"

namespace moetriage {

constexpr size_t kPage = 4096;  // also the O_DIRECT block we assume: a multiple of every logical block size in use

inline std::byte *page_floor(std::byte *address) {
    return reinterpret_cast<std::byte *>(reinterpret_cast<uintptr_t>(address) / kPage * kPage);
}

inline std::byte *page_ceil(std::byte *address) {
    return page_floor(address + kPage - 1);
}

// What became of pages that were to move. refused: the kernel cannot (before Linux 5.7, or at a limit), both ranges were given back.
// lost: at a limit it gave up after it had unmapped the destination, which could not be mapped again either: it must not be touched.
enum class PageMove { done, refused, lost };

class WeightRegion {
   public:
    // `huge`: everything here will be resident, so back it with huge pages (half the page walks of a matrix product).
    WeightRegion(const GgmlApi &api, std::string name, bool huge);
    ~WeightRegion();
    WeightRegion(const WeightRegion &) = delete;
    WeightRegion &operator=(const WeightRegion &) = delete;

    // The buffer type to pass in tensor_buft_overrides. Throws std::runtime_error if ggml's accessors do not agree with our view of it.
    GgmlBufferType *buffer_type() { return &buft_; }

    // The tensor llama.cpp created under this name, or nullptr.
    GgmlTensor *find(const std::string &name) const;

    // Give a tensor pages of its own, at an address that mirrors `file_offset` modulo the page: a direct read can then land in place.
    // (llama.cpp packs tensors back to back.) Throws std::runtime_error if not even address space is left.
    void place_apart(GgmlTensor *tensor, uint64_t file_offset);

    // Give all of it back, once llama.cpp's model is gone; no tensor is known any more.
    void unmap();

    // Make what llama.cpp allocated inaccessible, once every tensor that matters lives elsewhere.
    void seal();

    // Give the whole pages [begin, end) back to the system; they read as zeros afterwards.
    static void release(std::byte *begin, std::byte *end);

    // Move the pages [from, from + bytes) to `to`, whose own pages are lost; `from` reads as zeros afterwards.
    static PageMove move_pages(std::byte *from, std::byte *to, size_t bytes);

    // Map what a move lost; false while that is not possible.
    static bool map_again(std::byte *begin, size_t bytes);

    size_t reserved_bytes() const { return reserved_; }

   private:
    static const char *name_of(GgmlBufferType *buft);
    static void *allocate(GgmlBufferType *buft, size_t size);
    static size_t alignment(GgmlBufferType *buft);
    static size_t max_size(GgmlBufferType *buft);
    static size_t alloc_size(GgmlBufferType *buft, const GgmlTensor *tensor);
    static bool is_host(GgmlBufferType *buft);
    void probe();

    struct Mapping {
        void *address;
        size_t size;
    };

    const GgmlApi &api_;
    std::string name_;
    bool huge_;
    GgmlBufferType buft_{};
    std::map<std::string, GgmlTensor *> tensors_;
    Mapping reserve(size_t size) const;

    std::vector<Mapping> allocated_;  // by llama.cpp
    std::vector<Mapping> apart_;
    size_t reserved_ = 0;
};

}  // namespace moetriage
