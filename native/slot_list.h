// Doubly linked lists over slots that share one pool of links: a slot is in at most one list of a pool at a time.
#pragma once

#include <cstdint>
#include <vector>

namespace moetriage {

struct SlotLinks {
    struct Link {
        int32_t older = -1;
        int32_t newer = -1;
    };
    explicit SlotLinks(size_t slots) : links(slots) {}
    Link &at(int32_t slot) { return links[static_cast<size_t>(slot)]; }
    std::vector<Link> links;
};

struct SlotList {
    int32_t oldest = -1;
    int32_t newest = -1;
    uint64_t bytes = 0;
    size_t count = 0;

    void push(SlotLinks &links, int32_t slot, uint64_t nbytes) {
        links.at(slot) = {newest, -1};
        (newest >= 0 ? links.at(newest).newer : oldest) = slot;
        newest = slot;
        bytes += nbytes;
        ++count;
    }
    void remove(SlotLinks &links, int32_t slot, uint64_t nbytes) {
        const SlotLinks::Link link = links.at(slot);
        (link.older >= 0 ? links.at(link.older).newer : oldest) = link.newer;
        (link.newer >= 0 ? links.at(link.newer).older : newest) = link.older;
        bytes -= nbytes;
        --count;
    }
};

}  // namespace moetriage
