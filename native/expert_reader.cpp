#include "expert_reader.h"

#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "block_target.h"
#include "weight_region.h"

namespace moetriage {
namespace {

struct FreeDeleter {
    void operator()(std::byte *memory) const { std::free(memory); }
};

std::unique_ptr<std::byte, FreeDeleter> aligned_block(size_t bytes) {
    return std::unique_ptr<std::byte, FreeDeleter>(static_cast<std::byte *>(std::aligned_alloc(kPage, bytes)));
}

}  // namespace

ExpertReader::ExpertReader(std::vector<std::string> shards, ReaderOptions options)
    : paths_(std::move(shards)), options_(options), shards_(paths_.size()), direct_ok_(paths_.size()) {
    if (options_.preadv_fn == nullptr) options_.preadv_fn = ::preadv;
    try {
        for (size_t i = 0; i < paths_.size(); ++i) open_shard(static_cast<int32_t>(i));
        start_lanes();
    } catch (...) {
        shut_down();  // a constructor that throws is not destroyed, and a running thread that is would end the process
        throw;
    }
}

void ExpertReader::open_shard(int32_t index) {
    const std::string &path = paths_[index];
    Shard &shard = shards_[index];
    shard.buffered = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    struct stat info{};
    if (shard.buffered < 0 || fstat(shard.buffered, &info) != 0) throw std::runtime_error(path + ": " + std::strerror(errno));
    shard.size = static_cast<uint64_t>(info.st_size);
    posix_fadvise(shard.buffered, 0, 0, POSIX_FADV_RANDOM);  // read-ahead would fetch experts nobody asked for
    if (!options_.direct) return;
    shard.direct = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_DIRECT);
    direct_ok_[index] = shard.direct >= 0;
    if (shard.direct < 0) fall_back(index, std::string("O_DIRECT open: ") + std::strerror(errno));
}

void ExpertReader::start_lanes() {
    try {
        for (int i = 0; i < options_.lanes; ++i) lanes_.emplace_back([this] { lane_main(); });
    } catch (const std::system_error &error) {
        throw std::runtime_error("the system gives only " + std::to_string(lanes_.size()) + " of " + std::to_string(options_.lanes) +
                                 " threads to read with: " + std::strerror(error.code().value()));
    }
}

ExpertReader::~ExpertReader() {
    shut_down();
}

void ExpertReader::shut_down() {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        stop_ = true;
    }
    wake_.notify_all();
    for (std::thread &lane : lanes_) lane.join();
    lanes_.clear();
    for (Shard &shard : shards_) {
        for (int *file : {&shard.buffered, &shard.direct}) {
            if (*file >= 0) close(std::exchange(*file, -1));
        }
    }
}

void ExpertReader::verify_direct(int32_t index, uint64_t offset, uint64_t nbytes) {
    if (!direct_enabled(index)) return;
    const uint64_t size = std::min<uint64_t>(nbytes, 4 * kPage);
    const auto direct = aligned_block(ceil_block(size) + 2 * kPage);
    const auto buffered = aligned_block(ceil_block(size));
    const uint64_t begin = floor_block(offset);
    const uint64_t span = ceil_block(offset + size) - begin;
    const iovec whole{direct.get(), span};
    const ssize_t got = options_.preadv_fn(shards_[index].direct, &whole, 1, static_cast<off_t>(begin));
    const bool enough = got >= static_cast<ssize_t>(offset + size - begin);
    const std::string problem = read_exact(shards_[index].buffered, offset, size, buffered.get());
    if (!problem.empty()) return;  // the real read will report it
    if (!enough || std::memcmp(direct.get() + (offset - begin), buffered.get(), size) != 0) {
        fall_back(index,
                  got < 0 ? std::string("O_DIRECT read: ") + std::strerror(errno) : "O_DIRECT returned other bytes than a plain read");
    }
}

void ExpertReader::fall_back(int32_t shard, const std::string &reason) {
    const std::lock_guard<std::mutex> lock(mutex_);
    direct_ok_[shard] = false;
    if (fallback_reason_.empty()) fallback_reason_ = reason;
}

std::string ExpertReader::direct_state() const {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!options_.direct) return "off";
    return fallback_reason_.empty() ? "on" : "fallback: " + fallback_reason_;
}

ReaderCounters ExpertReader::counters() const {
    return {reads_.load(), bytes_.load(), disk_bytes_.load(), recycled_.load(), busy_nanos_.load()};
}

void ExpertReader::submit(const std::vector<ReadJob> &jobs, bool speculative) {
    if (jobs.empty()) return;
    size_t queued = 0;
    try {
        const std::lock_guard<std::mutex> lock(mutex_);
        for (const ReadJob &job : jobs) queued += enqueue(job, speculative ? speculative_ : demand_);
    } catch (...) {
        wake_.notify_all();  // what was queued before memory ran out will be waited for
        throw;
    }
    if (queued == 1) {
        wake_.notify_one();
    } else {
        wake_.notify_all();
    }
}

size_t ExpertReader::enqueue(const ReadJob &job, std::deque<ReadJob> &queue) {
    size_t parts = 0;
    uint64_t done = 0;
    do {
        ReadJob part = job;
        part.offset += done;
        part.dest += done;
        if (done > 0) part.release_begin = part.release_end = part.edges[0] = part.edges[1] = nullptr;
        // Parts meet on block borders, so no block is read twice; a small remainder rides along with its predecessor.
        part.nbytes = floor_block(part.offset + kChunk) - part.offset;
        if (job.nbytes - done < part.nbytes + kChunk / 4) part.nbytes = job.nbytes - done;
        if (job.donor != nullptr) part.donor = job.donor + (page_ceil(part.dest) - page_ceil(job.dest));
        done += part.nbytes;
        queue.push_back(part);  // may find no memory; the lanes cannot see it before the lock is given back
        part.ticket->add(1);
        ++parts;
    } while (done < job.nbytes);
    return parts;
}

std::vector<int64_t> ExpertReader::cancel(ReadTicket *ticket) {
    std::vector<int64_t> tags;
    const std::lock_guard<std::mutex> lock(mutex_);
    tags.reserve(speculative_.size());  // nothing may fail while the queue is being rearranged
    const auto kept = std::remove_if(speculative_.begin(), speculative_.end(), [&](const ReadJob &job) {
        if (job.ticket != ticket) return false;
        tags.push_back(job.tag);
        job.ticket->finish();
        return true;
    });
    speculative_.erase(kept, speculative_.end());
    return tags;
}

void ExpertReader::lane_main() {
    // Signals are the eval thread's business: a lane must not run a Python handler's C part in the middle of a read.
    sigset_t all;
    sigfillset(&all);
    for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL}) sigdelset(&all, fault);  // blocked, they would kill without a word
    pthread_sigmask(SIG_BLOCK, &all, nullptr);
    auto bounce = aligned_block(2 * kChunk + 2 * kPage);
    const int speculative_lanes = std::max(1, options_.lanes - 1);
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
        const bool may_speculate = !speculative_.empty() && speculating_ < speculative_lanes;
        if (demand_.empty() && !may_speculate) {
            if (stop_) return;
            wake_.wait(lock);
            continue;
        }
        const bool speculative = demand_.empty();
        std::deque<ReadJob> &queue = speculative ? speculative_ : demand_;
        const ReadJob job = queue.front();
        queue.pop_front();
        speculating_ += speculative;
        lock.unlock();
        if (bounce == nullptr) bounce = aligned_block(2 * kChunk + 2 * kPage);  // memory was short, not for good
        run(job, bounce.get());
        lock.lock();
        speculating_ -= speculative;
    }
}

void ExpertReader::run(const ReadJob &job, std::byte *bounce) {
    const auto start = std::chrono::steady_clock::now();
    try {
        const std::string problem = serve(job, bounce);
        if (!problem.empty()) job.ticket->fail({job.shard, job.offset, job.nbytes, job.tag, problem});
    } catch (const std::exception &) {
        // Only memory can be short here. The text fits into the string itself, so telling of it takes none.
        job.ticket->fail({job.shard, job.offset, job.nbytes, job.tag, "out of memory"});
    }
    const auto spent = std::chrono::steady_clock::now() - start;
    busy_nanos_.fetch_add(static_cast<uint64_t>(std::chrono::nanoseconds(spent).count()), std::memory_order_relaxed);
    job.ticket->finish();
}

std::string ExpertReader::serve(const ReadJob &job, std::byte *bounce) {
    if (job.release_begin != nullptr) WeightRegion::release(job.release_begin, job.release_end);
    for (std::byte *page : job.edges) {
        if (page != nullptr) WeightRegion::release(page, page + kPage);
    }
    if (job.shard < 0) return {};
    const bool ready = has_memory(job) && take_pages(job);
    std::string problem = ready ? read_range(job, bounce) : "the system has no address space left for it";
    reads_.fetch_add(1, std::memory_order_relaxed);
    bytes_.fetch_add(job.nbytes, std::memory_order_relaxed);
    return problem;
}

// Fresh pages are dear: the kernel zeroes each one before the read overwrites it, which costs twice as much processor time as the read
// itself (docs/log.md, page recycling). So the pages of an evicted expert move to the one that takes its place.
bool ExpertReader::take_pages(const ReadJob &job) {
    std::byte *first = page_ceil(job.dest);
    std::byte *last = page_floor(job.dest + job.nbytes);
    if (job.donor == nullptr || last <= first) return true;
    const auto bytes = static_cast<size_t>(last - first);
    const PageMove move = WeightRegion::move_pages(job.donor, first, bytes);
    if (move == PageMove::done) recycled_.fetch_add(1, std::memory_order_relaxed);
    if (move != PageMove::lost) return true;
    const std::lock_guard<std::mutex> lock(mutex_);
    lost_.push_back({first, bytes});
    any_lost_ = true;
    return false;
}

// False where the job's memory was lost and cannot be mapped again yet. What is mapped there meanwhile is somebody else's.
bool ExpertReader::has_memory(const ReadJob &job) {
    if (!any_lost_) return true;
    const std::lock_guard<std::mutex> lock(mutex_);
    std::erase_if(lost_, [](const Lost &lost) { return WeightRegion::map_again(lost.begin, lost.bytes); });
    any_lost_ = !lost_.empty();
    return std::none_of(lost_.begin(), lost_.end(),
                        [&](const Lost &lost) { return lost.begin < job.dest + job.nbytes && job.dest < lost.begin + lost.bytes; });
}

std::string ExpertReader::read_range(const ReadJob &job, std::byte *bounce) {
    Shard &shard = shards_[job.shard];
    if (job.offset + job.nbytes > shard.size) return "the file ends at byte " + std::to_string(shard.size);
    if (direct_enabled(job.shard) && bounce != nullptr) {
        bool unsupported = false;
        const std::string problem = read_direct(shard, job, bounce, unsupported);
        if (!unsupported) return problem;
        fall_back(job.shard, problem);
    }
    disk_bytes_.fetch_add(job.nbytes, std::memory_order_relaxed);
    return read_exact(shard.buffered, job.offset, job.nbytes, job.dest);
}

std::string ExpertReader::read_direct(Shard &shard, const ReadJob &job, std::byte *bounce, bool &unsupported) {
    const BlockTarget target(job, bounce, options_.in_place);
    uint64_t done = 0;
    while (target.begin + done < target.end) {
        iovec parts[3];
        const int count = target.parts_from(done, parts);
        const ssize_t got = options_.preadv_fn(shard.direct, parts, count, static_cast<off_t>(target.begin + done));
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) {
            // EINVAL: this file system wants another alignment, or none at all. A plain read can still serve the range.
            unsupported = errno == EINVAL || errno == EOPNOTSUPP;
            return std::strerror(errno);
        }
        if (got == 0) return "the file ended at byte " + std::to_string(target.begin + done);
        const auto bytes = static_cast<uint64_t>(got);
        disk_bytes_.fetch_add(bytes, std::memory_order_relaxed);
        if (target.begin + done + bytes >= target.end) break;
        // A short read may stop inside a block; the next one must start on a block again.
        if (bytes < kPage) {
            unsupported = true;
            return "O_DIRECT returned less than a block";
        }
        done += floor_block(bytes);
    }
    target.copy_ends(job);
    return {};
}

std::string ExpertReader::read_exact(int fd, uint64_t offset, uint64_t nbytes, std::byte *dest) {
    uint64_t done = 0;
    while (done < nbytes) {
        const iovec rest{dest + done, nbytes - done};
        const ssize_t got = options_.preadv_fn(fd, &rest, 1, static_cast<off_t>(offset + done));
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return std::strerror(errno);
        if (got == 0) return "the file ended at byte " + std::to_string(offset + done);
        done += static_cast<uint64_t>(got);
    }
    return {};
}

}  // namespace moetriage
