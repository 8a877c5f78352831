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

// stdio reads ahead this much after a seek. Skipped ranges smaller than that are read as zeros instead, which costs nothing worth saving.
constexpr size_t kStdioBuffer = 1 << 16;

}  // namespace

VirtualFile::VirtualFile(std::vector<std::byte> header, uint64_t size, std::vector<Segment> segments,
                         const std::vector<std::string> &shards)
    : header_(std::move(header)), size_(size), segments_(std::move(segments)), shard_paths_(shards), stdio_buffer_(kStdioBuffer) {
    shards_.reserve(shard_paths_.size());
    for (const std::string &path : shard_paths_) {
        const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
        if (fd < 0) {
            const int reason = errno;
            close_all();
            throw std::runtime_error(path + ": " + std::strerror(reason));
        }
        shards_.push_back(fd);
    }
    stream_ = fopencookie(this, "rb", {on_read, nullptr, on_seek, nullptr});
    if (stream_ == nullptr) {
        close_all();
        throw std::runtime_error("fopencookie failed");
    }
    setvbuf(stream_, stdio_buffer_.data(), _IOFBF, stdio_buffer_.size());
}

VirtualFile::~VirtualFile() {
    close_all();
}

void VirtualFile::close_all() {
    if (stream_ != nullptr) fclose(std::exchange(stream_, nullptr));
    for (const int fd : shards_) close(fd);
    shards_.clear();
}

int VirtualFile::on_seek(void *cookie, off64_t *offset, int whence) {
    auto *file = static_cast<VirtualFile *>(cookie);
    if (whence == SEEK_CUR && *offset == 0 && file->inside_skipped()) {
        *offset = static_cast<off64_t>(file->size_);  // ftell(): nothing to read here
        return 0;
    }
    const auto origin = whence == SEEK_SET ? 0 : whence == SEEK_CUR ? file->position_ : file->size_;
    const auto target = static_cast<int64_t>(origin) + *offset;
    if (target < 0) {
        errno = EINVAL;
        return -1;
    }
    file->position_ = static_cast<uint64_t>(target);
    file->read_ahead_ = false;
    *offset = target;
    return 0;
}

// Stops at the end of the header, so that ftell() is true while the header is parsed.
ssize_t VirtualFile::on_read(void *cookie, char *buffer, size_t size) {
    auto *file = static_cast<VirtualFile *>(cookie);
    const bool in_header = file->position_ < file->header_.size();
    size_t done = 0;
    do {
        const ssize_t got = file->read_some(buffer + done, size - done);
        if (got < 0) return -1;
        if (got == 0) break;
        done += static_cast<size_t>(got);
        file->position_ += static_cast<uint64_t>(got);
    } while (done < size && !in_header);
    file->read_ahead_ = done > 0;
    return static_cast<ssize_t>(done);
}

const Segment *VirtualFile::segment_at(uint64_t offset) const {
    const auto after = std::upper_bound(segments_.begin(), segments_.end(), offset,
                                        [](uint64_t at, const Segment &segment) { return at < segment.virtual_offset; });
    return after == segments_.begin() ? nullptr : &*std::prev(after);
}

bool VirtualFile::inside_skipped() const {
    const Segment *segment = read_ahead_ ? segment_at(position_ - 1) : nullptr;
    return segment != nullptr && segment->skip && position_ <= segment->virtual_offset + segment->nbytes;
}

ssize_t VirtualFile::read_some(char *buffer, size_t size) {
    if (position_ >= size_) return 0;
    size = std::min<uint64_t>(size, size_ - position_);
    if (position_ < header_.size()) {
        size = std::min<uint64_t>(size, header_.size() - position_);
        std::memcpy(buffer, header_.data() + position_, size);
        return static_cast<ssize_t>(size);
    }
    const Segment *segment = segment_at(position_);
    if (segment != nullptr && position_ < segment->virtual_offset + segment->nbytes) return read_segment(*segment, buffer, size);
    const Segment *next = segment == nullptr ? segments_.data() : segment + 1;
    if (next != segments_.data() + segments_.size()) size = std::min<uint64_t>(size, next->virtual_offset - position_);
    std::memset(buffer, 0, size);
    return static_cast<ssize_t>(size);
}

ssize_t VirtualFile::read_segment(const Segment &segment, char *buffer, size_t size) {
    const uint64_t inside = position_ - segment.virtual_offset;
    size = std::min<uint64_t>(size, segment.nbytes - inside);
    if (segment.skip) {
        std::memset(buffer, 0, size);
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
