// Which instruction sets can this processor run, and who lends us threads? Compiled once, for any processor.

#include "runtime.hpp"

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

Parallel openmp_parallel = nullptr;

// Whether there is a matrix unit for bfloat16 (AMX), and the system keeps its tiles for this process: it has to be asked, and
// refuses where a thread's stack for signals has no room for them. Threads and children of the process inherit the answer.
bool may_use_tiles() {
#if defined(__x86_64__) && defined(__linux__)
    constexpr unsigned BF16_AND_TILES = 1u << 22 | 1u << 24, SYSTEM_SAVES = 1u << 27, TILE_STATES = 3u << 17;
    constexpr int ARCH_REQ_XCOMP_PERM_ = 0x1023, XFEATURE_XTILEDATA = 18;  // of Linux's asm/prctl.h, from 5.16 on
    unsigned a, b, c, d, enabled, high;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & SYSTEM_SAVES)) return false;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & BF16_AND_TILES) != BF16_AND_TILES) return false;
    asm("xgetbv" : "=a"(enabled), "=d"(high) : "c"(0));
    if ((enabled & TILE_STATES) != TILE_STATES) return false;
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM_, XFEATURE_XTILEDATA) == 0;
#else
    return false;
#endif
}

}  // namespace

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

// Names of the sets that this process may use, the best first.
API const char* instruction_sets() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2") &&
                      __builtin_cpu_supports("avx");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    const bool bf16 = avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
    if (bf16 && may_use_tiles()) return "amx avx512bf16 avx512 avx2 baseline";
    return bf16 ? "avx512bf16 avx512 avx2 baseline" : avx512 ? "avx512 avx2 baseline" : avx2 ? "avx2 baseline" : "baseline";
#else
    return "baseline";
#endif
}
