// Operations on the rows of an activation, each element read and written once: norms, gates, turns.

#include <math.h>

#include "vector.hpp"

namespace {

constexpr int64_t BYTES_WORTH_A_THREAD = 16 << 10;

// Rows that a thread takes at a time: fewer bytes than this are not worth waking another for.
int64_t rows_at_a_time(int64_t num_rows, int64_t row_bytes, int num_threads) {
    const int64_t least = BYTES_WORTH_A_THREAD / (row_bytes + 1) + 1;
    const int64_t fair = (num_rows + num_threads - 1) / num_threads;
    return least > fair ? least : fair;
}

// The sum is rounded to T before it is normalised: what is kept is what was looked at.
template <class T>
void normalise(T* out, T* sum_out, const T* x, const T* delta, const float* weight, int64_t width, float eps) {
    Vec squares = {};
    int64_t i = 0;
    for (; i + W <= width; i += W) {
        Vec v = load(x + i);
        if (delta) {
            store(sum_out + i, v + load(delta + i));
            v = load(sum_out + i);
        }
        squares += v * v;
    }
    if (i < width) {
        Vec v = load_some(x + i, width - i);
        if (delta) {
            store_some(sum_out + i, v + load_some(delta + i, width - i), width - i);
            v = load_some(sum_out + i, width - i);
        }
        squares += v * v;
    }
    const T* values = delta ? sum_out : x;
    const Vec scale = splat(1.0f / sqrtf(sum(squares) / static_cast<float>(width) + eps));
    for (i = 0; i + W <= width; i += W) store(out + i, load(values + i) * scale * load(weight + i));
    if (i < width) {
        store_some(out + i, load_some(values + i, width - i) * scale * load_some(weight + i, width - i), width - i);
    }
}

// Element i of a head turns with element i + half.
template <class T>
void turn(T* head, const float* cosines, const float* sines, int64_t half) {
    int64_t i = 0;
    for (; i + W <= half; i += W) {
        const Vec first = load(head + i), second = load(head + half + i), c = load(cosines + i), s = load(sines + i);
        store(head + i, first * c - second * s);
        store(head + half + i, second * c + first * s);
    }
    if (i < half) {
        const int64_t rest = half - i;
        const Vec first = load_some(head + i, rest), second = load_some(head + half + i, rest);
        const Vec c = load_some(cosines + i, rest), s = load_some(sines + i, rest);
        store_some(head + i, first * c - second * s, rest);
        store_some(head + half + i, second * c + first * s, rest);
    }
}

INLINE Vec silu(Vec x) { return x / (1.0f + exponential(-x)); }

template <class T>
void gate(T* out, const T* gate_up, int64_t width) {
    int64_t i = 0;
    for (; i + W <= width; i += W) store(out + i, silu(load(gate_up + i)) * load(gate_up + width + i));
    if (i < width) {
        const int64_t rest = width - i;
        store_some(out + i, silu(load_some(gate_up + i, rest)) * load_some(gate_up + width + i, rest), rest);
    }
}

}  // namespace

// out, sum, x, delta: [num_rows, width] of dtype; weight [width]. out is the norm of x, or of sum = x + delta when there is a
// delta; sum may be x.
EXPORT(void, rms_norm)
(void* out, void* sum_out, const void* x, const void* delta, const float* weight, int64_t num_rows, int64_t width,
 float eps, int dtype, int num_threads) {
    with_type(dtype, [&](auto type) {
        using T = typename decltype(type)::type;
        parallel_for(num_rows, rows_at_a_time(num_rows, width * sizeof(T), num_threads), num_threads, [&](int64_t row) {
            const int64_t at = row * width;
            normalise(static_cast<T*>(out) + at, static_cast<T*>(sum_out) + (delta ? at : 0),
                      static_cast<const T*>(x) + at, delta ? static_cast<const T*>(delta) + at : nullptr, weight, width, eps);
        });
    });
}

// x: [num_tokens, num_heads, head_size] of dtype, in place, tokens `stride` elements apart; cosines, sines: [num_tokens, head_size / 2]
EXPORT(void, rope)
(void* x, const float* cosines, const float* sines, int64_t num_tokens, int64_t stride, int64_t num_heads,
 int64_t head_size, int dtype, int num_threads) {
    with_type(dtype, [&](auto type) {
        using T = typename decltype(type)::type;
        const int64_t half = head_size / 2, chunk = rows_at_a_time(num_tokens, num_heads * head_size * sizeof(T), num_threads);
        parallel_for(num_tokens, chunk, num_threads, [&](int64_t token) {
            T* heads = static_cast<T*>(x) + token * stride;
            for (int64_t head = 0; head < num_heads; ++head) {
                turn(heads + head * head_size, cosines + token * half, sines + token * half, half);
            }
        });
    });
}

// out: [num_rows, width], gate_up: [num_rows, 2 * width], of dtype
EXPORT(void, silu_mul)
(void* out, const void* gate_up, int64_t num_rows, int64_t width, int dtype, int num_threads) {
    with_type(dtype, [&](auto type) {
        using T = typename decltype(type)::type;
        parallel_for(num_rows, rows_at_a_time(num_rows, 3 * width * sizeof(T), num_threads), num_threads, [&](int64_t row) {
            gate(static_cast<T*>(out) + row * width, static_cast<const T*>(gate_up) + 2 * row * width, width);
        });
    });
}
