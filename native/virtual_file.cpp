#include "virtual_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace moetriage {
namespace {

// stdio passes requests at least as large as its buffer straight through to the caller's memory; smaller ones fill the buffer first
// and are copied, so they must be given defined bytes.
constexpr size_t kStdioBuffer = 1 << 16;

}  // namespace

VirtualFile::VirtualFile(std::vector<std::byte> header, uint64_t size, std::vector<Segment> segments,
                         const std::vector<std::string> &shards)
    : header_(std::move(header)), size_(size), segments_(std::move(segments)), shard_paths_(shards) {
    for (const std::string &path : shard_paths_) {
        const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
        if (fd < 0) throw std::runtime_error(path + ": " + std::strerror(errno));
        shards_.push_back(fd);
    }
    stream_ = fopencookie(this, "rb", {on_read, nullptr, on_seek, nullptr});
    if (stream_ == nullptr) throw std::runtime_error("fopencookie failed");
    setvbuf(stream_, nullptr, _IOFBF, kStdioBuffer);
}

VirtualFile::~VirtualFile() {
    if (stream_ != nullptr) fclose(stream_);
    for (const int fd : shards_) close(fd);
}

int VirtualFile::on_seek(void *cookie, off64_t *offset, int whence) {
    auto *file = static_cast<VirtualFile *>(cookie);
    const auto origin = whence == SEEK_SET ? 0 : whence == SEEK_CUR ? file->position_ : file->size_;
    const auto target = static_cast<int64_t>(origin) + *offset;
    if (target < 0) {
        errno = EINVAL;
        return -1;
    }
    file->position_ = static_cast<uint64_t>(target);
    *offset = target;
    return 0;
}

ssize_t VirtualFile::on_read(void *cookie, char *buffer, size_t size) {
    auto *file = static_cast<VirtualFile *>(cookie);
    size_t done = 0;
    while (done < size) {
        const ssize_t got = file->read_some(buffer + done, size - done);
        if (got < 0) return -1;
        if (got == 0) break;
        done += static_cast<size_t>(got);
        file->position_ += static_cast<uint64_t>(got);
    }
    return static_cast<ssize_t>(done);
}

ssize_t VirtualFile::read_some(char *buffer, size_t size) {
    if (position_ >= size_) return 0;
    size = std::min<uint64_t>(size, size_ - position_);
    if (position_ < header_.size()) {
        size = std::min<uint64_t>(size, header_.size() - position_);
        std::memcpy(buffer, header_.data() + position_, size);
        return static_cast<ssize_t>(size);
    }
    const auto after = std::upper_bound(segments_.begin(), segments_.end(), position_,
                                        [](uint64_t at, const Segment &segment) { return at < segment.virtual_offset; });
    if (after != segments_.begin()) {
        const Segment &segment = *std::prev(after);
        if (position_ < segment.virtual_offset + segment.nbytes) return read_segment(segment, buffer, size, size >= kStdioBuffer);
    }
    if (after != segments_.end()) size = std::min<uint64_t>(size, after->virtual_offset - position_);
    std::memset(buffer, 0, size);
    return static_cast<ssize_t>(size);
}

ssize_t VirtualFile::read_segment(const Segment &segment, char *buffer, size_t size, bool skip_untouched) {
    const uint64_t inside = position_ - segment.virtual_offset;
    size = std::min<uint64_t>(size, segment.nbytes - inside);
    if (segment.skip) {
        if (!skip_untouched) std::memset(buffer, 0, size);
        return static_cast<ssize_t>(size);
    }
    const uint64_t offset = segment.offset + inside;
    ssize_t got = -1;
    do {
        got = pread(shards_[segment.shard], buffer, size, static_cast<off_t>(offset));
    } while (got < 0 && errno == EINTR);
    if (got <= 0) {
        error_ = shard_paths_[segment.shard] + ": reading byte " + std::to_string(offset) +
                 " failed: " + (got < 0 ? std::strerror(errno) : "the file ends there");
        errno = EIO;
        return -1;
    }
    bytes_read_ += static_cast<uint64_t>(got);
    return got;
}

}  // namespace moetriage
