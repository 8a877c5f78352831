// A GGUF file as llama.cpp's loader is to see it: a FILE* (glibc's fopencookie) over a header in memory and ranges of real files.
//
// In: header bytes and segments. Out: a FILE* for llama_model_load_from_file_ptr. Ranges marked `skip` are not read: the loader asks for
// them into memory that we fill later. It clamps each read to the distance between ftell() and the file's size, so a position inside
// such a range is reported as the end of the file: only the rest of stdio's buffer (zeros) is copied. So loading neither reads an
// expert nor commits its memory. Should the loader stop clamping, it would read zeros there: slower, still right. See docs/seam.md.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <string>
#include <vector>

namespace moetriage {

struct Segment {
    uint64_t virtual_offset;
    uint64_t nbytes;
    int32_t shard;
    uint64_t offset;
    bool skip;
};

class VirtualFile {
   public:
    // Segments are sorted by virtual_offset and do not overlap; bytes covered by neither header nor segment read as zeros.
    VirtualFile(std::vector<std::byte> header, uint64_t size, std::vector<Segment> segments, const std::vector<std::string> &shards);
    ~VirtualFile();
    VirtualFile(const VirtualFile &) = delete;
    VirtualFile &operator=(const VirtualFile &) = delete;

    FILE *stream() { return stream_; }
    // Close the files; what was counted stays.
    void close_all();

    const std::string &error() const { return error_; }  // the first failed read, naming file and offset; empty if none
    uint64_t bytes_read() const { return bytes_read_; }

   private:
    static ssize_t on_read(void *cookie, char *buffer, size_t size);
    static int on_seek(void *cookie, off64_t *offset, int whence);
    // Serve bytes from the current position that share one source; returns how many (0 at the end), -1 on error.
    ssize_t read_some(char *buffer, size_t size);
    ssize_t read_segment(const Segment &segment, char *buffer, size_t size);
    const Segment *segment_at(uint64_t offset) const;  // the last segment that starts at or before `offset`, or nullptr
    bool inside_skipped() const;

    std::vector<std::byte> header_;
    uint64_t size_;
    std::vector<Segment> segments_;
    std::vector<std::string> shard_paths_;
    std::vector<int> shards_;
    uint64_t position_ = 0;
    bool read_ahead_ = false;  // stdio has read since its last seek, so position_ is where its buffer ends
    uint64_t bytes_read_ = 0;
    std::string error_;
    std::vector<char> stdio_buffer_;
    FILE *stream_ = nullptr;
};

}  // namespace moetriage
