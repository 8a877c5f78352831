// A sanitizer build that is not sanitized passes everything and proves nothing: hold the build to what its folder claims.

#include <string_view>

#include "check.h"

#if defined(__SANITIZE_THREAD__)
constexpr bool thread_sanitizer = true;
#else
constexpr bool thread_sanitizer = false;
#endif

#if defined(__SANITIZE_ADDRESS__)
constexpr bool address_sanitizer = true;
#else
constexpr bool address_sanitizer = false;
#endif

int main() {
    constexpr std::string_view requested = MOETRIAGE_SANITIZE;
    CHECK(thread_sanitizer == (requested.find("thread") != std::string_view::npos));
    CHECK(address_sanitizer == (requested.find("address") != std::string_view::npos));
    CHECK(__cplusplus >= 202002L);
}
