// A model file of known bytes and the memory its experts belong in, for tests of what lies above the reader.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "check.h"
#include "expert_store.h"
#include "fake_graph.h"
#include "temp_file.h"
#include "weight_region.h"

// Layers of three tensors (up, gate, down: stages 0, 1, 2). Experts are three pages and a bit: neighbours share pages.
class ExpertFile {
   public:
    static constexpr uint64_t kExpertBytes = 3 * moetriage::kPage + 160;

    ExpertFile(int layers, int n_expert)
        : layers_(layers), n_expert_(n_expert), tensor_bytes_(kExpertBytes * static_cast<uint64_t>(n_expert)), file_(file_size()) {
        const size_t apart = tensor_bytes_ + 2 * moetriage::kPage;
        memory_size_ = apart / moetriage::kPage * moetriage::kPage * static_cast<size_t>(3 * layers) + apart;
        memory_ = static_cast<std::byte *>(
            mmap(nullptr, memory_size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
        CHECK(memory_ != MAP_FAILED);
        std::byte *next = memory_;
        uint64_t offset = kStart;
        for (int layer = 0; layer < layers; ++layer) {
            int stage = 0;
            for (const char *projection : {"up", "gate", "down"}) {
                // At an address that mirrors the file's offset modulo the page, in pages of its own.
                tensors.push_back(
                    {fake::expert_name(layer, projection), layer, 0, offset, kExpertBytes, next + offset % moetriage::kPage, stage++});
                offset += tensor_bytes_;
                next += apart / moetriage::kPage * moetriage::kPage;
            }
        }
    }
    ~ExpertFile() { munmap(memory_, memory_size_); }
    ExpertFile(const ExpertFile &) = delete;
    ExpertFile &operator=(const ExpertFile &) = delete;

    std::unique_ptr<moetriage::ExpertStore> store(uint64_t budget_in_experts, moetriage::ReaderOptions options = {}) const {
        auto out = std::make_unique<moetriage::ExpertStore>(tensors, layers_, n_expert_, options, std::vector<std::string>{file_.path});
        out->cache().set_budget(budget_in_experts * 3 * kExpertBytes);
        return out;
    }

    const moetriage::ExpertTensor &tensor(int layer, int stage) const { return tensors[static_cast<size_t>(3 * layer + stage)]; }
    const moetriage::ExpertTensor &tensor(const std::string &name) const {
        for (const moetriage::ExpertTensor &each : tensors) {
            if (each.name == name) return each;
        }
        CHECK(false && "no such tensor");
        return tensors[0];
    }

    // Whether all bytes of an expert are those of the file.
    static bool holds(const moetriage::ExpertTensor &tensor, int expert) {
        const uint64_t start = kExpertBytes * static_cast<uint64_t>(expert);
        for (uint64_t i = start; i < start + kExpertBytes; ++i) {
            if (tensor.base[i] != byte_at(tensor.offset + i)) return false;
        }
        return true;
    }
    bool holds(int layer, int expert) const {
        return holds(tensor(layer, 0), expert) && holds(tensor(layer, 1), expert) && holds(tensor(layer, 2), expert);
    }

    // Pages of an expert's own that are in memory, over the layer's tensors (3 of each are its own, or 2 by the way the borders fall).
    int pages(int layer, int expert) const {
        int count = 0;
        for (int stage = 0; stage < 3; ++stage) {
            std::byte *begin = tensor(layer, stage).base + kExpertBytes * static_cast<uint64_t>(expert);
            std::byte *first = moetriage::page_ceil(begin);
            std::byte *last = moetriage::page_floor(begin + kExpertBytes);
            std::vector<unsigned char> flags(static_cast<size_t>(last - first) / moetriage::kPage);
            CHECK(mincore(first, static_cast<size_t>(last - first), flags.data()) == 0);
            for (const unsigned char flag : flags) count += flag & 1;
        }
        return count;
    }

    void cut(uint64_t size) const { CHECK(truncate(file_.path.c_str(), static_cast<off_t>(size)) == 0); }
    void mend() const {
        const int fd = open(file_.path.c_str(), O_WRONLY | O_CLOEXEC);
        std::vector<std::byte> bytes(file_size());
        for (uint64_t i = 0; i < bytes.size(); ++i) bytes[i] = byte_at(i);
        CHECK(fd >= 0 && write(fd, bytes.data(), bytes.size()) == static_cast<ssize_t>(bytes.size()));
        close(fd);
    }

    const std::string &path() const { return file_.path; }

    std::vector<moetriage::ExpertTensor> tensors;

   private:
    static constexpr uint64_t kStart = 4096 + 224;

    uint64_t file_size() const { return kStart + tensor_bytes_ * static_cast<uint64_t>(3 * layers_) + 1000; }

    int layers_, n_expert_;
    uint64_t tensor_bytes_;
    TempFile file_;
    size_t memory_size_ = 0;
    std::byte *memory_ = nullptr;
};

// One layer batch, waited for whole; returns whether every read went well.
inline bool load(moetriage::ExpertStore &store, int layer, const std::vector<int32_t> &experts) {
    std::vector<uint8_t> missed;
    store.settle(layer);
    store.load(layer, experts, missed);
    store.start_reads();
    for (int stage = 0; stage < 3; ++stage) {
        if (!store.wait_stage(stage)) return false;
    }
    store.remember_used(layer, experts);
    return true;
}
