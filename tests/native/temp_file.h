// A temporary file whose bytes are a function of their offset, so that any wrong read shows.
#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <vector>

#include "check.h"

inline std::byte byte_at(uint64_t offset) {
    return static_cast<std::byte>((offset * 2654435761u) >> 13);
}

class TempFile {
   public:
    explicit TempFile(uint64_t size) {
        char name[] = "/var/tmp/moetriage-test-XXXXXX";  // /tmp may be a tmpfs, which refuses O_DIRECT before Linux 6.1
        const int fd = mkstemp(name);
        CHECK(fd >= 0);
        path = name;
        std::vector<std::byte> bytes(size);
        for (uint64_t i = 0; i < size; ++i) bytes[i] = byte_at(i);
        CHECK(write(fd, bytes.data(), size) == static_cast<ssize_t>(size));
        CHECK(fsync(fd) == 0);
        close(fd);
    }
    ~TempFile() { unlink(path.c_str()); }

    std::string path;
};
