// How does a kernel get its name, and its threads?
//
// Every source but runtime.cpp is compiled once per instruction set, with ISA defined as the set's name. Rules for such a source:
// everything but what EXPORT names is in an anonymous namespace, and no inline function or template of the standard library is
// called (the linker keeps one copy of those, perhaps the one compiled for a processor that is not this one).
#pragma once

#include <stdint.h>

#define API extern "C" __attribute__((visibility("default")))
#define JOIN_(a, b) a##_##b
#define JOIN(a, b) JOIN_(a, b)

// EXPORT(void, rms_norm)(...) defines avx2_rms_norm, avx512_rms_norm, ...
#define EXPORT(result, name) API result JOIN(ISA, name)

using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);

// Calls body(argument) on each of at most num_threads threads, and returns when all have.
void run_in_team(void (*body)(void*), void* argument, int num_threads);

namespace {

// body(i) for each i below count, on up to num_threads threads, in any order; a thread takes `chunk` numbers at a time.
template <class Body>
void parallel_for(int64_t count, int64_t chunk, int num_threads, const Body& body) {
    struct Work {
        const Body& body;
        int64_t next, count, chunk;
    } work{body, 0, count, chunk};
    if (count <= chunk) num_threads = 1;
    run_in_team(
        [](void* argument) {
            Work& shared = *static_cast<Work*>(argument);
            for (;;) {
                const int64_t first = __atomic_fetch_add(&shared.next, shared.chunk, __ATOMIC_RELAXED);
                if (first >= shared.count) return;
                const int64_t last = first + shared.chunk < shared.count ? first + shared.chunk : shared.count;
                for (int64_t i = first; i < last; ++i) shared.body(i);
            }
        },
        &work, num_threads);
}

}  // namespace
