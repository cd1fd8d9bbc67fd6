// Which instruction sets can this processor run, and who lends us threads? Compiled once, for any processor.

#include "runtime.hpp"

namespace {
Parallel openmp_parallel = nullptr;
}

void run_in_team(void (*body)(void*), void* argument, int num_threads) {
    if (num_threads <= 1 || openmp_parallel == nullptr) {
        body(argument);
    } else {
        openmp_parallel(body, argument, static_cast<unsigned>(num_threads), 0);
    }
}

// The GOMP_parallel of the OpenMP runtime that torch has loaded; without it everything runs on one thread.
API void set_parallel(void* function) { openmp_parallel = reinterpret_cast<Parallel>(function); }

API const char* source_digest() { return SOURCE_DIGEST; }

// Names of the sets that this processor runs, the best first.
API const char* instruction_sets() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2") &&
                      __builtin_cpu_supports("avx");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    const bool bf16 = avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
    return bf16 ? "avx512bf16 avx512 avx2 baseline" : avx512 ? "avx512 avx2 baseline" : avx2 ? "avx2 baseline" : "baseline";
#else
    return "baseline";
#endif
}
