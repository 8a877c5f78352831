#include "read_ticket.h"

#include <utility>

namespace moetriage {

void ReadTicket::wait() {
    for (int32_t left = pending_.load(std::memory_order_acquire); left != 0; left = pending_.load(std::memory_order_acquire)) {
        pending_.wait(left, std::memory_order_acquire);
    }
}

void ReadTicket::reset() {
    failed_.store(false, std::memory_order_release);
    failure_ = {};
}

void ReadTicket::finish() {
    if (pending_.fetch_sub(1, std::memory_order_acq_rel) == 1) pending_.notify_all();
}

void ReadTicket::fail(ReadFailure failure) {
    const std::lock_guard<std::mutex> lock(failure_mutex_);
    if (failed_.exchange(true, std::memory_order_acq_rel)) return;  // the first failure is the one reported
    failure_ = std::move(failure);
}

}  // namespace moetriage
