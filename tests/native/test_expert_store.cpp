// What the cache calls resident is in memory, byte for byte; what it gave up is not; and a read that failed leaves nothing behind.

#include <fcntl.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "check.h"
#include "expert_file.h"
#include "expert_store.h"

using namespace moetriage;

namespace {

bool resident(const ExpertStore &store, int layer, int expert) {
    return store.cache().resident(store.cache().slot(layer, expert));
}

// Every resident expert holds the file's bytes, and no other has a page of its own.
void check_memory(const ExpertFile &file, const ExpertStore &store) {
    for (int layer = 0; layer < store.cache().layers(); ++layer) {
        for (int expert = 0; expert < store.cache().experts(); ++expert) {
            if (resident(store, layer, expert)) {
                CHECK(file.holds(layer, expert));
            } else {
                CHECK(file.pages(layer, expert) == 0);
            }
        }
    }
}

void random_batches_leave_exactly_the_residents_in_memory() {
    std::mt19937 random(11);
    for (const uint64_t budget : {0u, 5u, 9u, 40u}) {
        for (const bool in_place : {false, true}) {
            const ExpertFile file(3, 8);
            const auto store = file.store(budget, {4, true, in_place, nullptr});
            for (int round = 0; round < 60; ++round) {
                std::set<int32_t> wanted;
                while (wanted.size() < 1 + random() % 4) wanted.insert(static_cast<int32_t>(random() % 8));
                const int layer = round % 3;
                CHECK(load(*store, layer, {wanted.begin(), wanted.end()}));
                for (const int32_t expert : wanted) CHECK(resident(*store, layer, expert));
                check_memory(file, *store);
            }
            CHECK((store->cache().counters().hits > 0) == (budget > 0));
            CHECK((store->reader().counters().recycled > 0) == (budget < 40));
        }
    }
}

void evicting_keeps_the_pages_that_neighbours_share() {
    const ExpertFile file(1, 4);
    const auto store = file.store(3);
    CHECK(load(*store, 0, {0, 1, 2}));
    CHECK(load(*store, 0, {0, 2}));
    CHECK(load(*store, 0, {3}));  // evicts 1, which lies between
    CHECK(!resident(*store, 0, 1) && resident(*store, 0, 0) && resident(*store, 0, 2));
    check_memory(file, *store);
    CHECK(load(*store, 0, {1}));
    check_memory(file, *store);
}

void without_a_cache_every_batch_reads_anew() {
    const ExpertFile file(2, 4);
    const auto store = file.store(0);
    for (int round = 1; round <= 3; ++round) {
        CHECK(load(*store, 0, {1, 3}));
        CHECK(store->reader().counters().bytes == static_cast<uint64_t>(round) * 6 * ExpertFile::kExpertBytes);
        check_memory(file, *store);
    }
    CHECK(store->cache().counters().hits == 0 && store->cache().counters().misses == 6);
    CHECK(store->cache().resident_bytes() == 6 * ExpertFile::kExpertBytes);
}

void a_failed_read_forgets_its_batch_and_nothing_else() {
    for (const int failing_stage : {0, 2}) {
        const ExpertFile file(2, 4);
        const auto store = file.store(8);
        CHECK(load(*store, 0, {0}));
        CHECK(load(*store, 1, {0}));
        file.cut(file.tensor(1, failing_stage).offset + ExpertFile::kExpertBytes);
        for (int again = 0; again < 2; ++again) {
            CHECK(!load(*store, 1, {0, 2}));
            CHECK(resident(*store, 1, 0) && !resident(*store, 1, 2) && resident(*store, 0, 0));
            CHECK(store->failure().offset >= file.tensor(1, failing_stage).offset && !store->failure().reason.empty());
            CHECK(store->locate(0, store->failure().offset) == std::pair(1, 2));
            check_memory(file, *store);
        }
        file.mend();
        CHECK(load(*store, 1, {0, 2}));
        check_memory(file, *store);
    }
}

void a_batch_that_is_not_waited_for_is_settled_by_quiesce() {
    const ExpertFile file(2, 8);
    const auto store = file.store(4);
    std::vector<uint8_t> missed;
    store->load(0, {1, 2, 5}, missed);
    store->start_reads();
    CHECK((missed == std::vector<uint8_t>{1, 1, 1}) && store->stage_pending(0, 2) != store->stage_pending(1, 2));
    store->quiesce();
    CHECK(!store->stage_pending(0, 0) && !store->stage_pending(0, 2));
    check_memory(file, *store);
    file.cut(file.tensor(1, 0).offset);
    store->load(1, {1}, missed);
    store->start_reads();
    store->quiesce();
    CHECK(!resident(*store, 1, 1) && resident(*store, 0, 1));
    check_memory(file, *store);
}

void a_tensor_may_be_moved_to_another_stage() {
    const ExpertFile file(1, 4);
    const auto store = file.store(4);
    store->set_stage(file.tensor(0, 2).name, 0);
    std::vector<uint8_t> missed;
    store->load(0, {2}, missed);
    store->start_reads();
    CHECK(store->wait_stage(0) && file.holds(file.tensor(0, 2), 2));
    CHECK(!store->stage_pending(0, 2));
    store->quiesce();
}

// A lane that speculates stands still while `held`; demand reads of other lanes go on. Fails reads of [bad_begin, bad_end).
std::atomic<bool> held{false};
std::atomic<int64_t> bad_begin{0}, bad_end{0};
std::atomic<int> standing{0};

ssize_t slow_preadv(int fd, const iovec *parts, int count, off_t offset) {
    ++standing;
    while (held) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    if (offset + static_cast<off_t>(kPage) > bad_begin && offset < bad_end) {
        errno = EIO;
        return -1;
    }
    return preadv(fd, parts, count, offset);
}

void let_go_later() {
    std::thread([] {
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        held = false;
    }).detach();
}

// Layer 1 has used {1, 2}; the cache has forgotten them. Layer 0 is loaded and reads them ahead with a single lane.
std::unique_ptr<ExpertStore> reading_ahead(const ExpertFile &file, uint64_t budget) {
    auto store = file.store(budget, {1, true, true, slow_preadv});
    store->allow_prefetch();
    CHECK(load(*store, 1, {1, 2}));
    CHECK(load(*store, 0, {0, 1, 2, 3}) && load(*store, 0, {4, 5, 6, 7}));
    CHECK(!resident(*store, 1, 1) && !resident(*store, 1, 2));
    return store;
}

void right_guesses_are_hits() {
    const ExpertFile file(2, 8);
    const auto store = reading_ahead(file, 6);
    store->prefetch(0, 1);
    CHECK(resident(*store, 1, 1) && resident(*store, 1, 2) && store->prefetch_counters().issued == 2);
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    const uint64_t reads = store->reader().counters().reads;
    CHECK(load(*store, 1, {1, 2}));
    CHECK(store->reader().counters().reads == reads && store->prefetch_counters().hits == 2);
    check_memory(file, *store);
}

void a_guess_that_has_not_begun_is_taken_back() {
    const ExpertFile file(2, 8);
    const auto store = reading_ahead(file, 6);
    standing = 0;
    held = true;
    store->prefetch(0, 1);
    while (standing == 0) std::this_thread::yield();  // the lane stands in the first guess, the second is queued
    let_go_later();
    store->settle(1);
    CHECK(!held && store->prefetch_counters().cancelled == 2);  // of the first, its other two tensors were still queued
    CHECK(!resident(*store, 1, 1) && !resident(*store, 1, 2));
    check_memory(file, *store);
    CHECK(load(*store, 1, {1, 2}));
    check_memory(file, *store);
}

void a_guess_is_waited_for_before_its_pages_go() {
    const ExpertFile file(2, 8);
    const auto store = reading_ahead(file, 6);
    standing = 0;
    held = true;
    store->prefetch(0, 1);
    while (standing == 0) std::this_thread::yield();
    let_go_later();
    CHECK(load(*store, 0, {0, 1, 2, 3, 4, 5, 6, 7}));  // evicts the guesses while one of them is being read
    CHECK(!resident(*store, 1, 1) && !resident(*store, 1, 2));
    check_memory(file, *store);
}

void a_failed_guess_is_forgotten_also_when_a_later_one_settled_its_layer() {
    const ExpertFile file(3, 8);
    const auto store = file.store(3, {2, true, true, slow_preadv});
    store->allow_prefetch();
    store->remember_used(2, {5});
    CHECK(load(*store, 0, {0}));
    store->prefetch(0, 2);  // 5 is read ahead
    CHECK(load(*store, 1, {0}));
    store->remember_used(2, {1, 2});
    bad_begin = static_cast<int64_t>(file.tensor(2, 0).offset + 1 * ExpertFile::kExpertBytes);
    bad_end = static_cast<int64_t>(file.tensor(2, 0).offset + 2 * ExpertFile::kExpertBytes);
    store->prefetch(1, 1);  // 1 evicts layer 0's, then 2 evicts the guess 5 of the same layer
    CHECK(store->prefetch_counters().issued == 3 && !resident(*store, 2, 5));
    store->settle(2);
    bad_begin = bad_end = 0;
    CHECK(!resident(*store, 2, 1));
    check_memory(file, *store);
}

void no_guess_is_read_into_pages_that_are_about_to_move() {
    const ExpertFile file(2, 8);
    const auto store = file.store(2, {4, true, true, nullptr});
    store->allow_prefetch();
    for (int round = 0; round < 10; ++round) {
        CHECK(load(*store, round % 2, {2 * (round % 3), 2 * (round % 3) + 1}));
    }
    // Of each batch's evicted experts only the first stage's reads, which prefetch() waits for, took over pages.
    CHECK(store->reader().counters().recycled > 0 && store->reader().counters().recycled <= 10 * 2);
    check_memory(file, *store);
}

void random_guesses_keep_every_byte_right() {
    std::mt19937 random(5);
    for (const uint64_t budget : {3u, 4u, 6u}) {
        const ExpertFile file(4, 8);
        const auto store = file.store(budget, {3, true, true, nullptr});
        store->allow_prefetch();
        for (int round = 0; round < 200; ++round) {
            const int layer = round % 4;
            std::vector<int32_t> experts{static_cast<int32_t>(random() % 4), static_cast<int32_t>(4 + random() % 4)};
            std::vector<uint8_t> missed;
            store->settle(layer);
            store->load(layer, experts, missed);
            store->start_reads();
            store->remember_used(layer, experts);
            CHECK(store->wait_stage(0));
            store->prefetch(layer, 1 + round % 3);
            for (int stage = 0; stage < 3; ++stage) {
                CHECK(store->wait_stage(stage));
                for (const int32_t expert : experts) CHECK(ExpertFile::holds(file.tensor(layer, stage), expert));
            }
        }
        store->quiesce();
        check_memory(file, *store);
        CHECK(store->prefetch_counters().issued > 0);
    }
}

}  // namespace

int main() {
    random_batches_leave_exactly_the_residents_in_memory();
    evicting_keeps_the_pages_that_neighbours_share();
    without_a_cache_every_batch_reads_anew();
    a_failed_read_forgets_its_batch_and_nothing_else();
    a_batch_that_is_not_waited_for_is_settled_by_quiesce();
    a_tensor_may_be_moved_to_another_stage();
    right_guesses_are_hits();
    a_guess_that_has_not_begun_is_taken_back();
    a_guess_is_waited_for_before_its_pages_go();
    a_failed_guess_is_forgotten_also_when_a_later_one_settled_its_layer();
    no_guess_is_read_into_pages_that_are_about_to_move();
    random_guesses_keep_every_byte_right();
}
