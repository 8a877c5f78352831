#include "weight_region.h"

#include <sys/mman.h>

#include <cerrno>
#include <cstring>
#include <initializer_list>
#include <stdexcept>
#include <utility>

namespace moetriage {
namespace {

WeightRegion *self(GgmlBufferType *buft) {
    return static_cast<WeightRegion *>(buft->context);
}

constexpr size_t round_up(size_t value) {
    return (value + kPage - 1) / kPage * kPage;
}

}  // namespace

WeightRegion::WeightRegion(const GgmlApi &api, std::string name, bool huge) : api_(api), name_(std::move(name)), huge_(huge) {
    // The device stays the CPU's own (upstream's CPU buffer types leave it empty too): only the functions and the context are ours.
    std::memcpy(&buft_, api_.cpu_buffer_type(), sizeof buft_);
    buft_.get_name = name_of;
    buft_.alloc_buffer = allocate;
    buft_.get_alignment = alignment;
    buft_.get_max_size = max_size;
    buft_.get_alloc_size = alloc_size;
    buft_.is_host = is_host;
    buft_.context = this;
    probe();
}

WeightRegion::~WeightRegion() {
    unmap();
}

void WeightRegion::unmap() {
    for (auto *mappings : {&allocated_, &apart_}) {
        for (const Mapping &mapping : *mappings) munmap(mapping.address, mapping.size);
        mappings->clear();
    }
    tensors_.clear();
}

void WeightRegion::probe() {
    char storage[sizeof(GgmlTensor)] = {};
    auto *tensor = reinterpret_cast<GgmlTensor *>(storage);
    tensor->type = kTypeF32;
    for (int i = 0; i < 4; ++i) tensor->ne[i] = 1, tensor->nb[i] = 4;
    const bool agrees = api_.buft_name(&buft_) == name_.c_str() && api_.buft_get_alignment(&buft_) == kPage &&
                        api_.buft_get_max_size(&buft_) == SIZE_MAX / 2 && api_.buft_get_alloc_size(&buft_, tensor) == 4 + 1 &&
                        api_.buft_is_host(&buft_) && api_.buft_get_device(&buft_) == api_.buft_get_device(api_.cpu_buffer_type());
    tensors_.clear();
    if (!agrees) {
        throw std::runtime_error("buffer types of the installed llama.cpp are laid out differently; install llama-cpp-python 0.3.36");
    }
}

const char *WeightRegion::name_of(GgmlBufferType *buft) {
    return self(buft)->name_.c_str();
}

size_t WeightRegion::alignment(GgmlBufferType *) {
    return kPage;
}

size_t WeightRegion::max_size(GgmlBufferType *) {
    return SIZE_MAX / 2;
}

bool WeightRegion::is_host(GgmlBufferType *) {
    return true;
}

// ggml asks for every tensor it is about to allocate here: that is how we learn their addresses. (One byte more than the data, so that
// the probe can tell our answer from the default.)
size_t WeightRegion::alloc_size(GgmlBufferType *buft, const GgmlTensor *tensor) {
    WeightRegion *region = self(buft);
    region->tensors_[tensor->name] = const_cast<GgmlTensor *>(tensor);
    return region->api_.nbytes(tensor) + 1;
}

WeightRegion::Mapping WeightRegion::reserve(size_t size) const {
    const size_t bytes = round_up(size == 0 ? 1 : size);
    void *address = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (address == MAP_FAILED) return {nullptr, 0};
    // For experts a huge page would commit 2 MiB at each first touch, whoever owns the neighbouring expert.
    madvise(address, bytes, huge_ ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
    return {address, bytes};
}

void *WeightRegion::allocate(GgmlBufferType *buft, size_t size) {
    WeightRegion *region = self(buft);
    const Mapping mapping = region->reserve(size);
    if (mapping.address == nullptr) return nullptr;
    region->allocated_.push_back(mapping);
    region->reserved_ += mapping.size;
    return region->api_.cpu_buffer_from_ptr(mapping.address, mapping.size);
}

GgmlTensor *WeightRegion::find(const std::string &name) const {
    const auto it = tensors_.find(name);
    return it == tensors_.end() ? nullptr : it->second;
}

void WeightRegion::place_apart(GgmlTensor *tensor, uint64_t file_offset) {
    const Mapping mapping = reserve(api_.nbytes(tensor) + 2 * kPage);
    if (mapping.address == nullptr) throw std::runtime_error("the system has no address space left for the experts");
    apart_.push_back(mapping);
    tensor->data = static_cast<std::byte *>(mapping.address) + file_offset % kPage;
}

void WeightRegion::seal() {
    for (const Mapping &mapping : allocated_) {
        madvise(mapping.address, mapping.size, MADV_DONTNEED);
        mprotect(mapping.address, mapping.size, PROT_NONE);
    }
}

void WeightRegion::release(std::byte *begin, std::byte *end) {
    if (end > begin) madvise(begin, static_cast<size_t>(end - begin), MADV_DONTNEED);
}

PageMove WeightRegion::move_pages(std::byte *from, std::byte *to, size_t bytes) {
    if (mremap(from, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP, to) == to) return PageMove::done;
    release(from, from + bytes);
    const bool unmapped = msync(to, bytes, MS_ASYNC) != 0 && errno == ENOMEM;
    if (unmapped && !map_again(to, bytes)) return PageMove::lost;
    release(to, to + bytes);
    return PageMove::refused;
}

bool WeightRegion::map_again(std::byte *begin, size_t bytes) {
    constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE;
    if (mmap(begin, bytes, PROT_READ | PROT_WRITE, kFlags, -1, 0) != begin) return false;
    madvise(begin, bytes, MADV_NOHUGEPAGE);
    return true;
}

}  // namespace moetriage
