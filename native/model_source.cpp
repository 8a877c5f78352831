#include "model_source.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace moetriage {

ModelSource::ModelSource(const std::string &libggml_base, std::vector<std::byte> header, uint64_t size, std::vector<Segment> segments,
                         std::vector<std::string> shards)
    : api_(GgmlApi::open(libggml_base)),
      ops_(api_.probe()),
      shards_(std::move(shards)),
      experts_(api_, "moetriage-experts", false),
      dense_(api_, "moetriage-dense", true),
      file_(std::make_unique<VirtualFile>(std::move(header), size, std::move(segments), shards_)) {
    if (sysconf(_SC_PAGESIZE) != static_cast<long>(kPage)) {
        throw std::runtime_error("this kernel's pages are not 4 KiB, which expert placement is built on; use mmap instead");
    }
}

ModelSource::~ModelSource() {
    close();
}

void ModelSource::close() {
    file_->close_all();
    for (Mapping &mapping : mappings_) {
        if (mapping.address != nullptr) munmap(std::exchange(mapping.address, nullptr), mapping.size);
    }
    experts_.unmap();
    dense_.unmap();
}

void ModelSource::bind_experts(const std::vector<TensorPlace> &tensors) {
    for (const TensorPlace &place : tensors) {
        if (GgmlTensor *tensor = experts_.find(place.name)) experts_.place_apart(tensor, place.offset);
    }
    experts_.seal();
}

void ModelSource::map_dense(const std::vector<TensorPlace> &tensors) {
    mappings_.resize(shards_.size());
    for (const TensorPlace &place : tensors) {
        GgmlTensor *tensor = dense_.find(place.name);
        if (tensor == nullptr) continue;  // the model does not use it
        Mapping &mapping = mappings_[static_cast<size_t>(place.shard)];
        if (mapping.address == nullptr) {
            const std::string &path = shards_[static_cast<size_t>(place.shard)];
            const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
            struct stat info{};
            if (fd < 0) throw std::runtime_error(path + ": " + std::strerror(errno));
            fstat(fd, &info);  // of an open file; whatever it says, mmap refuses a size that is not there
            mapping.size = static_cast<size_t>(info.st_size);
            mapping.address = mmap(nullptr, mapping.size, PROT_READ, MAP_SHARED, fd, 0);
            ::close(fd);
            if (mapping.address == MAP_FAILED) {
                mapping.address = nullptr;
                throw std::runtime_error(path + ": cannot be mapped: " + std::strerror(errno));
            }
        }
        if (place.offset + place.nbytes > mapping.size) {
            throw std::runtime_error(shards_[static_cast<size_t>(place.shard)] + ": has become shorter since it was opened; copy it again");
        }
        tensor->data = static_cast<std::byte *>(mapping.address) + place.offset;
    }
    dense_.seal();
}

std::byte *ModelSource::address(const std::string &name) const {
    const GgmlTensor *tensor = experts_.find(name);
    if (tensor == nullptr || tensor->data == nullptr) throw std::runtime_error("llama.cpp created no tensor named " + name);
    return static_cast<std::byte *>(tensor->data);
}

}  // namespace moetriage
