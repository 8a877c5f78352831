// Positioned reads on N lanes, with O_DIRECT where it can be trusted. Knows no cache, no layer and no tensor.
//
// In: jobs (file range -> memory, or pages to release) bound to a ticket. Out: bytes in memory, and a ticket that says when all of its
// jobs are done or which one failed. Lanes only move bytes; whoever submits owns all bookkeeping.
// O_DIRECT reads round outward to whole blocks. With `in_place` and a destination that mirrors the file's offset modulo the block, the
// whole blocks land in the destination and only the two ragged ends pass through a bounce block: the bytes beside the destination
// are never written, so an encrypting block layer that decrypts in place cannot disturb an expert that is being computed.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "read_ticket.h"

namespace moetriage {

// A lane takes at most this much at a time, so that one expert's projections spread over the lanes and a demand read never waits long
// behind a speculative one. Random reads are flat above 256 KiB on the disks we know.
constexpr uint64_t kChunk = 1 << 20;

struct ReadJob {
    int32_t shard = -1;  // -1: no read, only the release
    uint64_t offset = 0;
    uint64_t nbytes = 0;
    std::byte *dest = nullptr;
    std::byte *donor = nullptr;          // pages nobody needs any more: moved to the whole pages of dest before the read
    std::byte *edges[2] = {};            // single pages to give back beside it
    std::byte *release_begin = nullptr;  // whole pages [begin, end) to give back
    std::byte *release_end = nullptr;
    ReadTicket *ticket = nullptr;
    int64_t tag = -1;  // the caller's name for it, returned in a failure
};

struct ReaderOptions {
    int lanes = 4;
    bool direct = true;
    bool in_place = true;
    // Replaced by tests to return short counts and errors; must behave like preadv(2).
    ssize_t (*preadv_fn)(int, const iovec *, int, off_t) = nullptr;
};

struct ReaderCounters {
    uint64_t reads = 0;       // jobs read
    uint64_t bytes = 0;       // bytes asked for
    uint64_t disk_bytes = 0;  // bytes that came off the file, block rounding and merged gaps included
    uint64_t recycled = 0;    // jobs whose pages came from a donor
    uint64_t busy_nanos = 0;  // summed over lanes: service time, not wall time
};

class ExpertReader {
   public:
    // Opens every shard and starts the lanes; throws std::runtime_error naming the file that cannot be opened, or that threads are short.
    ExpertReader(std::vector<std::string> shards, ReaderOptions options);
    ~ExpertReader();
    ExpertReader(const ExpertReader &) = delete;
    ExpertReader &operator=(const ExpertReader &) = delete;

    // End the lanes and close the files; nothing can be submitted any more, counters stay.
    void shut_down();

    // Compare one direct read with a buffered one at `offset` of `shard`; on any difference the shard is read buffered from then on.
    void verify_direct(int32_t shard, uint64_t offset, uint64_t nbytes);

    // Queue jobs; demand runs before speculation. Speculative jobs leave at least one lane free (if there is more than one).
    void submit(const std::vector<ReadJob> &jobs, bool speculative);

    // Take back queued speculative jobs of this ticket (they count as finished); the ones already running go on.
    // Returns the tags of the jobs that will not run.
    std::vector<int64_t> cancel(ReadTicket *ticket);

    // At most so many parts a read of `nbytes` is made in, each with its own pages to move.
    static size_t parts(uint64_t nbytes) { return static_cast<size_t>(nbytes / kChunk) + 1; }

    // "on", "off", or "fallback: <reason>" once any shard had to be read through the page cache.
    std::string direct_state() const;
    ReaderCounters counters() const;
    const std::string &shard_path(int32_t shard) const { return paths_[shard]; }
    size_t shards() const { return paths_.size(); }

   private:
    struct Shard {
        int buffered = -1;
        int direct = -1;  // -1: not used
        uint64_t size = 0;
    };

    // Whole pages of a destination that are mapped no longer, see WeightRegion::move_pages.
    struct Lost {
        std::byte *begin;
        size_t bytes;
    };

    void open_shard(int32_t index);
    void start_lanes();
    // Queue a job in parts; returns how many. The lock is held.
    size_t enqueue(const ReadJob &job, std::deque<ReadJob> &queue);
    void lane_main();
    void run(const ReadJob &job, std::byte *bounce);
    std::string serve(const ReadJob &job, std::byte *bounce);  // empty, or the reason it failed
    bool take_pages(const ReadJob &job);
    bool has_memory(const ReadJob &job);
    std::string read_range(const ReadJob &job, std::byte *bounce);  // empty, or the reason it failed
    std::string read_direct(Shard &shard, const ReadJob &job, std::byte *bounce, bool &unsupported);
    std::string read_exact(int fd, uint64_t offset, uint64_t nbytes, std::byte *dest);
    void fall_back(int32_t shard, const std::string &reason);
    bool direct_enabled(int32_t shard) const { return direct_ok_[shard].load(std::memory_order_relaxed); }

    std::vector<std::string> paths_;
    ReaderOptions options_;
    std::vector<Shard> shards_;
    std::vector<std::atomic<bool>> direct_ok_;
    mutable std::mutex mutex_;
    std::condition_variable wake_;
    std::deque<ReadJob> demand_;
    std::deque<ReadJob> speculative_;
    int speculating_ = 0;
    bool stop_ = false;
    std::string fallback_reason_;
    std::vector<Lost> lost_;
    std::atomic<bool> any_lost_{false};
    std::atomic<uint64_t> reads_{0}, bytes_{0}, disk_bytes_{0}, recycled_{0}, busy_nanos_{0};
    std::vector<std::thread> lanes_;
};

}  // namespace moetriage
