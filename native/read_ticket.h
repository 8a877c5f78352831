// When all jobs of one purpose are done, and which one failed.
//
// In: jobs as a reader takes them and finishes them, on its lanes. Out: the end of all, for the one thread that waits for it.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <string>

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

}  // namespace moetriage
