# Read by llama-cpp-python's own CMake project when scripts/setup compiles it (CMAKE_PROJECT_llama_cpp_INCLUDE).
# libllama-common serves llama.cpp's own programs; the Python package neither loads nor ships it beside its libraries, and it takes a
# third of the compilation. That project forces the cache entry on, so only a plain variable can turn it off.
set(LLAMA_BUILD_COMMON OFF)
