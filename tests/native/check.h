// The whole test framework of tests/native: one executable a file, CHECK(condition) in main() or below, exit code 1 at the first failure.
// Not assert(): that is compiled out of the optimised builds which the tests are meant to cover.
#pragma once

#include <cstdio>
#include <cstdlib>

#define CHECK(condition)                                                                       \
    do {                                                                                       \
        if (!(condition)) {                                                                    \
            std::fprintf(stderr, "%s:%d: CHECK(%s) failed\n", __FILE__, __LINE__, #condition); \
            std::exit(1);                                                                      \
        }                                                                                      \
    } while (false)
