// How do keys and values lie in the cache, and how is a row multiplied with them?
//
// Cache of one layer: [blocks, kv heads, 2, block size * head size]; keys, then values, of one head in one block. Both are cut in
// panels of 16 tokens. E elements fill 32 bits (two of 16 bits, one of 32), and E products are summed in one step:
//   keys    [head size / E, 16 tokens, E]     a vector holds W tokens: scores come out side by side, nothing is summed across lanes
//   values  [16 tokens / E, head size, E]     a vector holds W elements of the head
#pragma once

#include "vector.hpp"

namespace {

constexpr int PANEL = 16;

template <class T>
constexpr int E = 4 / sizeof(T);

struct CacheShape {
    int64_t num_kv_heads, block_size, head_size;

    int64_t keys(int64_t block, int64_t kv_head, int64_t offset) const {  // of the panel that holds the token at that offset
        return ((block * num_kv_heads + kv_head) * 2 * block_size + offset / PANEL * PANEL) * head_size;
    }
    int64_t keys_to_values() const { return block_size * head_size; }
};

// A vector of a panel, spread out so that it can be multiplied, and what a row brings to one step: E of its elements.
template <class T>
struct Operand {  // two elements of 16 bits, computed as floats
    struct Row {
        float even, odd;
    };
    Vec even, odd;

    static INLINE Operand of(const T* from);
    INLINE void multiply_add(Vec& to, const Row& row) const { to += row.even * even + row.odd * odd; }
    static INLINE void put(Row* row, int64_t i, Vec v) { store(reinterpret_cast<float*>(row) + i, v); }
};

template <>
INLINE Operand<Float16> Operand<Float16>::of(const Float16* from) {
    UintVec pairs;
    memcpy(&pairs, from, sizeof pairs);
    const HalfVec even = __builtin_convertvector(pairs & 0xffff, HalfVec), odd = __builtin_convertvector(pairs >> 16, HalfVec);
    Float16 halves[2 * W];
    memcpy(halves, &even, sizeof even);
    memcpy(halves + W, &odd, sizeof odd);
    return {load(halves), load(halves + W)};
}

template <>
INLINE Operand<BFloat16> Operand<BFloat16>::of(const BFloat16* from) {
    UintVec pairs;
    memcpy(&pairs, from, sizeof pairs);
    return {bit_cast<Vec>(pairs << 16), bit_cast<Vec>(pairs & 0xffff0000)};
}

template <>
struct Operand<float> {
    using Row = float;
    Vec values;

    static INLINE Operand of(const float* from) { return {load(from)}; }
    INLINE void multiply_add(Vec& to, Row row) const { to += row * values; }
    static INLINE void put(Row* row, int64_t i, Vec v) { store(row + i, v); }
};

#if defined(__AVX512BF16__)
// The processor multiplies pairs by itself. Rows are rounded to bfloat16: queries are already, weights of values lose 8 bits.
struct NativeOperand {
    using Row = uint32_t;
    __m512bh pairs;

    static INLINE NativeOperand of(const BFloat16* from) { return {(__m512bh)_mm512_loadu_si512(from)}; }
    INLINE void multiply_add(Vec& to, Row row) const {
        to = (Vec)_mm512_dpbf16_ps((__m512)to, pairs, (__m512bh)_mm512_set1_epi32(static_cast<int>(row)));
    }
    static INLINE void put(Row* row, int64_t i, Vec v) { store(reinterpret_cast<BFloat16*>(row) + i, v); }
};
template <class T>
struct OperandOf {
    using type = Operand<T>;
};
template <>
struct OperandOf<BFloat16> {
    using type = NativeOperand;
};
template <class T>
using Op = typename OperandOf<T>::type;
#else
template <class T>
using Op = Operand<T>;
#endif

template <class T>
using Row = typename Op<T>::Row;

// Registers: rows * vectors accumulators, the vectors, and one to spare.
#if defined(__AVX512F__)
constexpr int MAX_ROWS = 6, MAX_VECTORS = 4;
#else
constexpr int MAX_ROWS = 4, MAX_VECTORS = 2;
#endif

// Panels that will be needed soon, fetched bit by bit while something else is computed: eight of them side by side, for a
// processor reads few streams of a page each far below its memory's speed (Zen 4, random pages: 1 stream 7 GB/s, 4: 15, 8: 20).
class Ahead {
public:
    Ahead(const void* const* panels, int num_panels, int64_t panel_bytes)
        : panels_(panels), num_left_(num_panels), panel_bytes_(panel_bytes) {}

    INLINE void pull(int num_lines) {
        for (int i = 0; i < num_lines && num_left_ > 0; ++i) {
            __builtin_prefetch(static_cast<const char*>(panels_[stream_]) + offset_);
            if (++stream_ < STREAMS && stream_ < num_left_) continue;
            stream_ = 0;
            offset_ += 64;
            if (offset_ < panel_bytes_) continue;
            offset_ = 0;
            panels_ += STREAMS;
            num_left_ -= STREAMS;
        }
    }

private:
    static constexpr int STREAMS = 8;
    const void* const* panels_;
    int num_left_, stream_ = 0;
    int64_t panel_bytes_, offset_ = 0;
};

// scores[r][i] = rows[r] . key i, for N vectors of W keys; `keys` are the vectors' first steps.
template <class T, int M, int N>
void score(const Row<T>* rows, int64_t row_stride, const T* const* keys, int64_t num_steps, float* scores, int64_t score_stride,
           Ahead& ahead) {
    Vec sums[M][N] = {};
    for (int64_t step = 0; step < num_steps; ++step) {
        Op<T> operands[N];
        for (int n = 0; n < N; ++n) operands[n] = Op<T>::of(keys[n] + step * PANEL * E<T>);
        if (step % 4) ahead.pull(N * W / PANEL);  // what memory can give meanwhile; the softmax asks for the rest
        for (int m = 0; m < M; ++m) {
            const Row<T> row = rows[m * row_stride + step];
            for (int n = 0; n < N; ++n) operands[n].multiply_add(sums[m][n], row);
        }
    }
    for (int m = 0; m < M; ++m) {
        for (int n = 0; n < N; ++n) store(scores + m * score_stride + n * W, sums[m][n]);
    }
}

// sums[r][i] (+)= weights[r] . values[:, i], for N vectors of W elements, over all panels.
template <class T, int M, int N>
void mix(const Row<T>* weights, int64_t weight_stride, const T* const* values, int64_t num_panels, int64_t head_size, int64_t first,
         float* sums, bool adds, Ahead& ahead) {
    Vec totals[M][N];
    for (int m = 0; m < M; ++m) {
        for (int n = 0; n < N; ++n) totals[m][n] = adds ? load(sums + m * head_size + first + n * W) : Vec{};
    }
    for (int64_t panel = 0; panel < num_panels; ++panel) {
        const T* from = values[panel] + first * E<T>;
        for (int step = 0; step < PANEL / E<T>; ++step, from += head_size * E<T>) {
            Op<T> operands[N];
            for (int n = 0; n < N; ++n) operands[n] = Op<T>::of(from + n * W * E<T>);
            if (step % 4) ahead.pull(N * W / PANEL);  // what memory can give meanwhile; the softmax asks for the rest
            for (int m = 0; m < M; ++m) {
                const Row<T> row = weights[m * weight_stride + panel * (PANEL / E<T>) + step];
                for (int n = 0; n < N; ++n) operands[n].multiply_add(totals[m][n], row);
            }
        }
    }
    for (int m = 0; m < M; ++m) {
        for (int n = 0; n < N; ++n) store(sums + m * head_size + first + n * W, totals[m][n]);
    }
}

template <int N>
struct Number {
    static constexpr int value = N;
};

// Calls body(Number<M>, first) so that the Ms are at most Max, cover 0 to count, and are as few as can be.
template <int Max, class Body>
INLINE void in_rows(int count, const Body& body) {
    int first = 0;
    for (; first + Max <= count; first += Max) body(Number<Max>(), first);
    const int rest = count - first;
    if (rest == 1) body(Number<1>(), first);
    if (rest == 2) body(Number<2>(), first);
    if (rest == 3) body(Number<3>(), first);
    if constexpr (Max > 4) {
        if (rest == 4) body(Number<4>(), first);
        if (rest == 5) body(Number<5>(), first);
    }
}

template <class Body>
INLINE void in_vectors(int count, const Body& body) {
    int first = 0;
    for (; first + MAX_VECTORS <= count; first += MAX_VECTORS) body(Number<MAX_VECTORS>(), first);
    if constexpr (MAX_VECTORS > 2) {
        if (first + 2 <= count) {
            body(Number<2>(), first);
            first += 2;
        }
    }
    if (first < count) body(Number<1>(), first);
}

}  // namespace
