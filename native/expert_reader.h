// Positioned reads on N lanes, with O_DIRECT where it can be trusted. Knows no cache, no layer and no tensor.
//
// In: jobs (file range -> memory, or pages to release) bound to a ticket. Out: bytes in memory, and a ticket that says when all of its
// jobs are done or which one failed. Lanes only move bytes; whoever submits owns all bookkeeping.
// O_DIRECT reads round outward to whole blocks. With `in_place` and a destination that mirrors the file's offset modulo the block, the
// whole blocks land in the destination and only the two ragged ends pass through a bounce block: the bytes beside the destination
// are never written, so an encrypting block layer that decrypts in place cannot disturb an expert that is being computed.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <sys/types.h>
#include <sys/uio.h>
#include <thread>
#include <vector>

namespace moetriage {

struct ReadFailure {
    int32_t shard = -1;
    uint64_t offset = 0;
    uint64_t nbytes = 0;
    int64_t tag = -1;
    std::string reason;
};

// Counts the unfinished jobs of one purpose. Owned by the submitting thread, which may wait() and then read `failure`.
class ReadTicket {
   public:
    void wait();
    bool done() const { return pending_.load(std::memory_order_acquire) == 0; }
    bool failed() const { return failed_.load(std::memory_order_acquire); }
    const ReadFailure &failure() const { return failure_; }  // valid once done() and failed()
    void reset();                                            // only when done()

   private:
    friend class ExpertReader;
    void add(int32_t jobs) { pending_.fetch_add(jobs, std::memory_order_acq_rel); }
    void finish();
    void fail(ReadFailure failure);

    std::atomic<int32_t> pending_{0};
    std::atomic<bool> failed_{false};
    std::mutex failure_mutex_;
    ReadFailure failure_;
};

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
    uint64_t reads = 0;        // jobs read
    uint64_t bytes = 0;        // bytes asked for
    uint64_t disk_bytes = 0;   // bytes that came off the file, block rounding and merged gaps included
    uint64_t recycled = 0;     // jobs whose pages came from a donor
    uint64_t busy_nanos = 0;   // summed over lanes: service time, not wall time
};

class ExpertReader {
   public:
    // Opens every shard; throws std::runtime_error naming the one that cannot be opened.
    ExpertReader(std::vector<std::string> shards, ReaderOptions options);
    ~ExpertReader();
    ExpertReader(const ExpertReader &) = delete;
    ExpertReader &operator=(const ExpertReader &) = delete;

    // Compare one direct read with a buffered one at `offset` of `shard`; on any difference the shard is read buffered from then on.
    void verify_direct(int32_t shard, uint64_t offset, uint64_t nbytes);

    // Queue jobs; demand runs before speculation. Speculative jobs leave at least one lane free (if there is more than one).
    void submit(const std::vector<ReadJob> &jobs, bool speculative);

    // Take back queued speculative jobs of this ticket (they count as finished); the ones already running go on.
    // Returns the tags of the jobs that will not run.
    std::vector<int64_t> cancel(ReadTicket *ticket);

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

    void lane_main();
    void run(const ReadJob &job, std::byte *bounce);
    void prepare_pages(const ReadJob &job);
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
    std::atomic<uint64_t> reads_{0}, bytes_{0}, disk_bytes_{0}, recycled_{0}, busy_nanos_{0};
    std::vector<std::thread> lanes_;
};

}  // namespace moetriage
