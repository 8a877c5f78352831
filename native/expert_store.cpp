#include "expert_store.h"

#include <algorithm>
#include <utility>

#include "weight_region.h"

namespace moetriage {
namespace {

std::vector<uint64_t> bytes_per_layer(const std::vector<ExpertTensor> &tensors, int n_layers) {
    std::vector<uint64_t> bytes(n_layers, 0);
    for (const ExpertTensor &tensor : tensors) bytes[tensor.layer] += tensor.expert_bytes;
    return bytes;
}

}  // namespace

ExpertStore::ExpertStore(std::vector<ExpertTensor> tensors, int n_layers, int n_expert, ReaderOptions options,
                         std::vector<std::string> shards, MappingQuota &mappings)
    : tensors_(std::move(tensors)),
      layer_tensors_(n_layers),
      layer_bytes_(bytes_per_layer(tensors_, n_layers)),
      cache_(layer_bytes_, n_expert, 0),
      mappings_(mappings),
      may_move_to_(tensors_.size() * static_cast<size_t>(n_expert), 0),
      ahead_slots_(n_layers),
      speculated_(static_cast<size_t>(n_layers) * n_expert, 0),
      last_used_(n_layers),
      reader_(std::make_unique<ExpertReader>(std::move(shards), options)) {
    for (int i = 0; i < n_layers; ++i) ahead_.push_back(std::make_unique<ReadTicket>());
    std::vector<uint8_t> verified(reader_->shards(), 0);
    for (size_t i = 0; i < tensors_.size(); ++i) {
        const ExpertTensor &tensor = tensors_[i];
        layer_tensors_[tensor.layer].push_back(static_cast<int>(i));
        if (!std::exchange(verified[tensor.shard], 1)) reader_->verify_direct(tensor.shard, tensor.offset, tensor.expert_bytes);
    }
}

ExpertStore::~ExpertStore() {
    mappings_.give_back(mappings_taken_);
}

void ExpertStore::set_stage(const std::string &name, int stage) {
    for (ExpertTensor &tensor : tensors_) {
        if (tensor.name == name) tensor.stage = stage;
    }
}

void ExpertStore::settle(int layer) {
    if (ahead_slots_[layer].empty()) return;
    ReadTicket &ticket = *ahead_[layer];
    std::vector<int32_t> lost;
    for (const int64_t slot : reader_->cancel(&ticket)) lost.push_back(static_cast<int32_t>(slot));
    ticket.wait();
    if (ticket.failed()) lost = ahead_slots_[layer];  // a real read, if it comes, reports the cause
    ticket.reset();
    std::sort(lost.begin(), lost.end());
    lost.erase(std::unique(lost.begin(), lost.end()), lost.end());
    prefetch_.cancelled += lost.size();
    forget(lost);
    ahead_slots_[layer].clear();
}

void ExpertStore::load(int layer, const std::vector<int32_t> &experts, std::vector<uint8_t> &missed) {
    jobs_.clear();
    missing_.clear();
    loading_.clear();
    missed.assign(experts.size(), 0);
    evicted_ = cache_.begin_batch();
    for (size_t i = 0; i < experts.size(); ++i) {
        const int32_t slot = cache_.slot(layer, experts[i]);
        if (cache_.lookup(slot)) {
            prefetch_.hits += std::exchange(speculated_[slot], 0);
            continue;
        }
        missed[i] = 1;
        missing_.push_back(experts[i]);
        loading_.push_back(slot);
    }
    for (const int32_t slot : loading_) cache_.insert(slot);
    const std::vector<int32_t> &gone = cache_.evict();
    evicted_.insert(evicted_.end(), gone.begin(), gone.end());
    collect_leavings(evicted_);
    if (!missing_.empty()) {
        std::sort(missing_.begin(), missing_.end());
        loading_layer_ = layer;
        for (const int index : layer_tensors_[layer]) {
            const ExpertTensor &tensor = tensors_[index];
            add_reads(tensor, missing_, &stages_[tensor.stage], jobs_);
        }
    }
    add_releases(jobs_);
}

void ExpertStore::start_reads() {
    reader_->submit(jobs_, false);
    jobs_.clear();
}

bool ExpertStore::wait_stage(int stage) {
    ReadTicket &ticket = stages_[stage];
    ticket.wait();
    if (!ticket.failed()) return true;
    failure_ = ticket.failure();
    quiesce();
    return false;
}

bool ExpertStore::stage_pending(int layer, int stage) const {
    return loading_layer_ == layer && (!stages_[stage].done() || stages_[stage].failed());
}

void ExpertStore::quiesce() {
    for (size_t layer = 0; layer < ahead_.size(); ++layer) settle(static_cast<int>(layer));
    bool failed = false;
    for (ReadTicket &ticket : stages_) {
        ticket.wait();
        failed = failed || ticket.failed();
        ticket.reset();
    }
    if (failed) forget(loading_);
    loading_layer_ = -1;
    loading_.clear();
}

void ExpertStore::forget_all() {
    for (auto &ticket : ahead_) ticket->wait();
    for (ReadTicket &ticket : stages_) ticket.wait();
    for (auto &ticket : ahead_) ticket->reset();
    for (ReadTicket &ticket : stages_) ticket.reset();
    for (auto &slots : ahead_slots_) slots.clear();
    std::fill(speculated_.begin(), speculated_.end(), uint8_t{0});
    loading_layer_ = -1;
    loading_.clear();
    jobs_.clear();
    leavings_.clear();
    cache_.clear();
    for (const ExpertTensor &tensor : tensors_) {
        std::byte *end = tensor.base + tensor.expert_bytes * static_cast<uint64_t>(cache_.experts());
        WeightRegion::release(page_floor(tensor.base), page_ceil(end));
    }
}

void ExpertStore::close() {
    if (closed_) return;  // the address space below may be somebody else's by now
    closed_ = true;
    forget_all();
    reader_->shut_down();
}

void ExpertStore::forget(const std::vector<int32_t> &slots) {
    for (const int32_t slot : slots) {
        cache_.erase(slot);
        speculated_[slot] = 0;
    }
    release_now(slots);
}

void ExpertStore::release_now(const std::vector<int32_t> &slots) {
    for (const int32_t slot : slots) {
        for (const int index : layer_tensors_[cache_.layer_of(slot)]) {
            const Leavings left = leavings(tensors_[index], cache_.expert_of(slot));
            WeightRegion::release(left.released_first, left.released_last);
        }
    }
}

// What the evicted leave behind goes to the missing first (take_leavings) and to the system last (add_releases).
void ExpertStore::collect_leavings(const std::vector<int32_t> &slots) {
    leavings_.clear();
    for (const int32_t slot : slots) {
        if (cache_.resident(slot)) continue;  // with the cache off a batch may ask again for what was just dropped
        const int layer = cache_.layer_of(slot);
        speculated_[slot] = 0;
        // A lane may still be writing here; its pages may go only when it has finished.
        const auto &ahead = ahead_slots_[layer];
        if (std::find(ahead.begin(), ahead.end(), slot) != ahead.end()) settle(layer);
        for (const int index : layer_tensors_[layer]) leavings_.push_back(leavings(tensors_[index], cache_.expert_of(slot)));
    }
}

// Borders between experts fall inside pages, so the first and last page may have to stay until the neighbour goes as well.
ExpertStore::Leavings ExpertStore::leavings(const ExpertTensor &tensor, int expert) const {
    std::byte *begin = tensor.base + tensor.expert_bytes * static_cast<uint64_t>(expert);
    std::byte *end = begin + tensor.expert_bytes;
    Leavings left;
    left.first = page_ceil(begin);
    left.last = std::max(left.first, page_floor(end));
    std::byte *border_first = page_floor(begin);
    std::byte *border_last = page_floor(end - 1);
    left.released_first = page_in_use(tensor, border_first) ? border_first + kPage : border_first;
    left.released_last = page_in_use(tensor, border_last) ? border_last : border_last + kPage;
    left.released_last = std::max(left.released_first, left.released_last);
    return left;
}

// Leavings with just so many whole pages to take over; empty ones if there are none.
ExpertStore::Leavings ExpertStore::take_leavings(size_t bytes) {
    for (size_t i = leavings_.size(); bytes > 0 && i-- > 0;) {
        if (leavings_[i].own_bytes() != bytes) continue;
        const Leavings taken = std::exchange(leavings_[i], leavings_.back());
        leavings_.pop_back();
        return taken;
    }
    return {};
}

// Pages that moved are a mapping of their own for good, and cut the one around them in two.
bool ExpertStore::may_move_to(const ExpertTensor &tensor, int expert) {
    const auto index = static_cast<size_t>(&tensor - tensors_.data());
    uint8_t &may = may_move_to_[index * static_cast<size_t>(cache_.experts()) + static_cast<size_t>(expert)];
    if (may) return true;
    const size_t needed = 1 + ExpertReader::parts(tensor.expert_bytes);
    if (!mappings_.take(needed)) return false;
    mappings_taken_ += needed;
    may = 1;
    return true;
}

void ExpertStore::add_releases(std::vector<ReadJob> &jobs) {
    for (const Leavings &left : leavings_) {
        if (left.released_last == left.released_first) continue;
        ReadJob job;
        job.release_begin = left.released_first;
        job.release_end = left.released_last;
        job.ticket = &stages_[0];
        jobs.push_back(job);
    }
    leavings_.clear();
}

bool ExpertStore::page_in_use(const ExpertTensor &tensor, const std::byte *page) const {
    const int64_t bytes = static_cast<int64_t>(tensor.expert_bytes);
    const int64_t from = std::max<int64_t>(0, page - tensor.base);
    const int64_t to = std::max<int64_t>(0, page + kPage - 1 - tensor.base);
    const int last = static_cast<int>(std::min<int64_t>(cache_.experts() - 1, to / bytes));
    for (int expert = static_cast<int>(from / bytes); expert <= last; ++expert) {
        if (cache_.resident(cache_.slot(tensor.layer, expert))) return true;
    }
    return false;
}

// Neighbouring experts lie side by side in the file and in memory, so a run of them is one job, unless each takes over pages.
void ExpertStore::add_reads(const ExpertTensor &tensor, const std::vector<int32_t> &experts, ReadTicket *ticket,
                            std::vector<ReadJob> &jobs) {
    for (size_t i = 0; i < experts.size();) {
        const uint64_t start = tensor.expert_bytes * static_cast<uint64_t>(experts[i]);
        ReadJob job;
        job.shard = tensor.shard;
        job.offset = tensor.offset + start;
        job.dest = tensor.base + start;
        job.ticket = ticket;
        job.tag = cache_.slot(tensor.layer, experts[i]);
        std::byte *first = page_ceil(job.dest);
        std::byte *last = page_floor(job.dest + tensor.expert_bytes);
        const bool may_take = !leavings_.empty() && tensor.stage < stages_with_leavings_ && last > first && may_move_to(tensor, experts[i]);
        const Leavings taken = take_leavings(may_take ? static_cast<size_t>(last - first) : 0);
        job.donor = taken.first;
        if (taken.released_first < taken.first) job.edges[0] = taken.released_first;
        if (taken.released_last > taken.last) job.edges[1] = taken.last;
        size_t next = i + 1;
        while (leavings_.empty() && job.donor == nullptr && next < experts.size() && experts[next] == experts[next - 1] + 1) ++next;
        job.nbytes = tensor.expert_bytes * (next - i);
        jobs.push_back(job);
        i = next;
    }
}

void ExpertStore::prefetch(int layer, int depth) {
    const int layers = cache_.layers();
    for (int ahead = 1; ahead <= std::min(depth, layers - 1); ++ahead) {
        const int target = (layer + ahead) % layers;
        for (const int32_t expert : last_used_[target]) speculate(target, expert);
    }
}

void ExpertStore::speculate(int layer, int expert) {
    const int32_t slot = cache_.slot(layer, expert);
    if (cache_.resident(slot)) return;
    const uint64_t room = layer_bytes_[layer];
    collect_leavings(cache_.evict(room));
    for (const Leavings &left : leavings_) WeightRegion::release(left.released_first, left.released_last);
    leavings_.clear();
    if (cache_.resident_bytes() + room > cache_.budget_bytes()) return;  // the current batch fills the budget: there is no room for a guess
    cache_.insert(slot);
    speculated_[slot] = 1;
    ahead_slots_[layer].push_back(slot);
    ++prefetch_.issued;
    // Submitted before the next guess is made: that one may evict and so settle this layer, which must find these reads.
    jobs_.clear();
    for (const int index : layer_tensors_[layer]) add_reads(tensors_[index], {expert}, ahead_[layer].get(), jobs_);
    reader_->submit(jobs_, true);
}

std::pair<int, int> ExpertStore::locate(int32_t shard, uint64_t offset) const {
    for (const ExpertTensor &tensor : tensors_) {
        const uint64_t size = tensor.expert_bytes * static_cast<uint64_t>(cache_.experts());
        if (tensor.shard == shard && offset >= tensor.offset && offset < tensor.offset + size) {
            return {tensor.layer, static_cast<int>((offset - tensor.offset) / tensor.expert_bytes)};
        }
    }
    return {-1, -1};
}

}  // namespace moetriage
