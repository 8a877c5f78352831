// Where a direct read of a job lands: which of its blocks in place, which in a bounce buffer.
//
// In: a job and a bounce buffer. Out: the pieces of one scattered read, and the copies that are left to do after it. Reads nothing itself.
#pragma once

#include <sys/uio.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "expert_reader.h"
#include "weight_region.h"

namespace moetriage {

inline uint64_t floor_block(uint64_t value) {
    return value / kPage * kPage;
}

inline uint64_t ceil_block(uint64_t value) {
    return (value + kPage - 1) / kPage * kPage;
}

// Where the whole blocks around a job go: [begin, begin + span) of the file, in up to three pieces. In place, the blocks that belong
// to the job alone land in its destination and the ragged first and last block in the bounce buffer; otherwise everything bounces.
struct BlockTarget {
    uint64_t begin, end, span;
    uint64_t head, middle;  // bytes of the first (bounced) piece and of the in-place piece; the rest is the tail
    std::byte *dest;        // address of file offset `begin`, were all of it in place
    std::byte *bounce;

    BlockTarget(const ReadJob &job, std::byte *bounce_buffer, bool in_place) : bounce(bounce_buffer) {
        begin = floor_block(job.offset);
        end = job.offset + job.nbytes;
        span = ceil_block(end) - begin;
        dest = job.dest - (job.offset - begin);
        const bool mirrored = reinterpret_cast<uintptr_t>(dest) % kPage == 0;
        const uint64_t first_whole = ceil_block(job.offset) - begin;
        const uint64_t last_whole = floor_block(end) - begin;
        const bool direct = in_place && mirrored && last_whole > first_whole;
        head = direct ? first_whole : span;
        middle = direct ? last_whole - first_whole : 0;
    }

    // The pieces from `done` bytes on. The bounce buffer holds the head, then the tail.
    int parts_from(uint64_t done, iovec *out) const {
        int count = 0;
        const auto add = [&](uint64_t from, uint64_t to, std::byte *base) {
            if (done < to && from < to) {
                const uint64_t at = std::max(done, from);
                out[count++] = {base + (at - from), to - at};
            }
        };
        add(0, head, bounce);
        add(head, head + middle, dest + head);
        add(head + middle, span, bounce + head);
        return count;
    }

    void copy_ends(const ReadJob &job) const {
        const uint64_t lead = job.offset - begin;
        const uint64_t head_end = std::min(head, end - begin);
        if (head_end > lead) std::memcpy(job.dest, bounce + lead, head_end - lead);
        const uint64_t tail = head + middle;
        if (end - begin > tail) std::memcpy(dest + tail, bounce + head, end - begin - tail);
    }
};

}  // namespace moetriage
