// Bytes arrive whole and in place whatever the kernel does with a read; a failed read is told, never papered over.

#include <sys/mman.h>
#include <sys/uio.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <memory>

#include "check.h"
#include "expert_reader.h"
#include "temp_file.h"
#include "weight_region.h"

using namespace moetriage;

namespace {

constexpr uint64_t kFileSize = (5 << 20) + 1234;  // ends inside a block

// Memory that mirrors the file: byte i of the file belongs at data + i, with data on a page.
struct Mirror {
    std::byte *data;
    Mirror() {
        data = static_cast<std::byte *>(mmap(nullptr, kFileSize + kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
        std::memset(data, 0xEE, kFileSize + kPage);
    }
    ~Mirror() { munmap(data, kFileSize + kPage); }
    bool holds(uint64_t offset, uint64_t nbytes) const {
        for (uint64_t i = 0; i < nbytes; ++i) {
            if (data[offset + i] != byte_at(offset + i)) return false;
        }
        return true;
    }
    bool untouched(uint64_t offset, uint64_t nbytes) const {
        for (uint64_t i = 0; i < nbytes; ++i) {
            if (data[offset + i] != std::byte{0xEE}) return false;
        }
        return true;
    }
};

ReadJob job_at(uint64_t offset, uint64_t nbytes, std::byte *dest, ReadTicket *ticket) {
    ReadJob job;
    job.shard = 0;
    job.offset = offset;
    job.nbytes = nbytes;
    job.dest = dest;
    job.ticket = ticket;
    return job;
}

std::atomic<int> calls{0};

ssize_t interrupted_preadv(int fd, const iovec *parts, int count, off_t offset) {
    if (calls.fetch_add(1) % 2 == 0) {
        errno = EINTR;
        return -1;
    }
    return preadv(fd, parts, count, offset);
}

// Returns at most 4096 * n + odd bytes, as a signal or a network file system may.
ssize_t short_preadv(int fd, const iovec *parts, int count, off_t offset) {
    (void)count;
    const iovec part{parts[0].iov_base, std::min<size_t>(parts[0].iov_len, 3 * kPage + 17)};
    return preadv(fd, &part, 1, offset);
}

ssize_t broken_preadv(int, const iovec *, int, off_t) {
    errno = EIO;
    return -1;
}

// A file system that refuses direct reads only when they happen: fails whenever every piece is block aligned.
ssize_t picky_preadv(int fd, const iovec *parts, int count, off_t offset) {
    bool aligned = offset % kPage == 0;
    for (int i = 0; i < count; ++i) aligned = aligned && parts[i].iov_len % kPage == 0;
    if (aligned) {
        errno = EINVAL;
        return -1;
    }
    return preadv(fd, parts, count, offset);
}

// FUSE as it has been seen: the direct read succeeds and returns other bytes.
ssize_t lying_preadv(int fd, const iovec *parts, int count, off_t offset) {
    const ssize_t got = preadv(fd, parts, count, offset);
    if (got > 0 && offset % kPage == 0 && parts[0].iov_len % kPage == 0) std::memset(parts[0].iov_base, 0x55, parts[0].iov_len);
    return got;
}

void reads_any_range_at_any_alignment() {
    const TempFile file(kFileSize);
    for (const bool direct : {false, true}) {
        for (const bool in_place : {false, true}) {
            for (const int lanes : {1, 4, 32}) {
                ExpertReader reader({file.path}, {lanes, direct, in_place, nullptr});
                reader.verify_direct(0, 32, 100000);
                for (const uint64_t offset : {0ul, 1ul, 32ul, 4064ul, 4096ul, 1000001ul}) {
                    for (const uint64_t nbytes : {1ul, 100ul, 4096ul, 10000ul, 3000000ul, kFileSize - 1000001}) {
                        const Mirror memory;
                        ReadTicket ticket;
                        reader.submit({job_at(offset, nbytes, memory.data + offset, &ticket)}, false);
                        ticket.wait();
                        CHECK(!ticket.failed());
                        CHECK(memory.holds(offset, nbytes));
                        CHECK(memory.untouched(0, offset));  // the neighbours' bytes are never written
                        CHECK(memory.untouched(offset + nbytes, kFileSize - offset - nbytes));
                    }
                }
                const Mirror memory;  // a destination that does not mirror the offset still works
                ReadTicket ticket;
                reader.submit({job_at(4000, 50000, memory.data, &ticket)}, false);
                ticket.wait();
                CHECK(memory.data[0] == byte_at(4000) && memory.data[49999] == byte_at(53999));
                CHECK(reader.direct_state() == (direct ? "on" : "off"));
            }
        }
    }
}

void survives_interrupted_and_short_reads() {
    const TempFile file(kFileSize);
    for (auto *fake : {interrupted_preadv, short_preadv}) {
        ExpertReader reader({file.path}, {2, true, true, fake});
        const Mirror memory;
        ReadTicket ticket;
        reader.submit({job_at(777, kFileSize - 777, memory.data + 777, &ticket)}, false);
        ticket.wait();
        CHECK(!ticket.failed() && memory.holds(777, kFileSize - 777));
    }
}

void reports_the_range_that_failed() {
    const TempFile file(kFileSize);
    ExpertReader reader({file.path}, {3, true, true, broken_preadv});
    const Mirror memory;
    ReadTicket ticket;
    reader.submit({job_at(5000, 100, memory.data + 5000, &ticket)}, false);
    ticket.wait();
    CHECK(ticket.failed() && ticket.failure().offset == 5000 && ticket.failure().reason == std::strerror(EIO));
    ticket.reset();
    CHECK(!ticket.failed());
}

void a_range_beyond_the_file_fails() {
    const TempFile file(kFileSize);
    ExpertReader reader({file.path}, {1, true, true, nullptr});
    const Mirror memory;
    ReadTicket ticket;
    reader.submit({job_at(kFileSize - 10, 11, memory.data, &ticket)}, false);
    ticket.wait();
    CHECK(ticket.failed());
}

void refused_direct_reads_fall_back_and_say_so() {
    const TempFile file(kFileSize);
    ExpertReader reader({file.path}, {2, true, true, picky_preadv});
    const Mirror memory;
    ReadTicket ticket;
    reader.submit({job_at(100, 20001, memory.data + 100, &ticket)}, false);
    ticket.wait();
    CHECK(!ticket.failed() && memory.holds(100, 20001));
    CHECK(reader.direct_state().rfind("fallback: ", 0) == 0);
}

void direct_reads_that_lie_are_found_out() {
    const TempFile file(kFileSize);
    ExpertReader reader({file.path}, {2, true, true, lying_preadv});
    reader.verify_direct(0, 4096 + 32, 50001);
    CHECK(reader.direct_state().rfind("fallback: ", 0) == 0);
}

void speculation_can_be_taken_back() {
    const TempFile file(kFileSize);
    ExpertReader reader({file.path}, {1, true, true, nullptr});
    const Mirror memory;
    ReadTicket ahead, real;
    std::vector<ReadJob> jobs;
    for (int i = 0; i < 200; ++i) jobs.push_back(job_at(4096ul * i, 4096, memory.data + 4096 * i, &ahead));
    for (int i = 0; i < 200; ++i) jobs[i].tag = i;
    reader.submit(jobs, true);
    reader.submit({job_at(3000000, 5000, memory.data + 3000000, &real)}, false);
    real.wait();
    const auto cancelled = reader.cancel(&ahead);
    ahead.wait();
    CHECK(memory.holds(3000000, 5000));
    for (const int64_t tag : cancelled) CHECK(memory.untouched(4096 * static_cast<uint64_t>(tag), 4096));
}

void released_pages_read_as_zeros() {
    const TempFile file(kFileSize);
    ExpertReader reader({file.path}, {2, true, true, nullptr});
    const Mirror memory;
    ReadTicket ticket;
    ReadJob release;
    release.release_begin = memory.data + 8192;
    release.release_end = memory.data + 4 * 4096;
    release.ticket = &ticket;
    reader.submit({release, job_at(20000, 9000, memory.data + 20000, &ticket)}, false);
    ticket.wait();
    CHECK(memory.data[8192] == std::byte{0} && memory.data[4 * 4096 - 1] == std::byte{0});
    CHECK(memory.untouched(0, 8192) && memory.holds(20000, 9000));
}

}  // namespace

int main() {
    reads_any_range_at_any_alignment();
    survives_interrupted_and_short_reads();
    reports_the_range_that_failed();
    a_range_beyond_the_file_fails();
    refused_direct_reads_fall_back_and_say_so();
    direct_reads_that_lie_are_found_out();
    speculation_can_be_taken_back();
    released_pages_read_as_zeros();
}
