// Python bindings of moetriage._native: the only file here that knows Python.

#include <nanobind/nanobind.h>

NB_MODULE(_native, m) {
    m.doc() = "Native parts of moetriage.";
    m.attr("version") = MOETRIAGE_VERSION;
}
