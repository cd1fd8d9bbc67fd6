// Vectors of floats, as wide as the instruction set has them, and the element types that are read into them.
#pragma once

#include <stdint.h>
#include <string.h>

#include "runtime.hpp"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float Vec __attribute__((vector_size(W * 4)));
typedef int32_t IntVec __attribute__((vector_size(W * 4)));
typedef uint32_t UintVec __attribute__((vector_size(W * 4)));
typedef uint16_t HalfVec __attribute__((vector_size(W * 2)));

struct BFloat16 {
    uint16_t bits;
};
struct Float16 {
    uint16_t bits;
};

#define INLINE inline __attribute__((always_inline))

template <class To, class From>
INLINE To bit_cast(const From& from) {
    static_assert(sizeof(To) == sizeof(From), "");
    To to;
    memcpy(&to, &from, sizeof(To));
    return to;
}

INLINE Vec splat(float x) { return x - Vec{}; }
INLINE IntVec splat_int(int32_t x) { return x - IntVec{}; }
INLINE UintVec splat_bits(uint32_t x) { return x - UintVec{}; }
INLINE Vec select(IntVec condition, Vec yes, Vec no) { return condition ? yes : no; }

INLINE bool any(IntVec lanes) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)lanes, (__m512i)lanes) != 0;
#elif defined(__AVX2__)
    return !_mm256_testz_si256((__m256i)lanes, (__m256i)lanes);
#else
    int32_t seen = 0;
    for (int k = 0; k < W; ++k) seen |= lanes[k];
    return seen != 0;
#endif
}

INLINE Vec load(const float* from) {
    Vec v;
    memcpy(&v, from, sizeof v);
    return v;
}

INLINE Vec load(const BFloat16* from) {
    HalfVec half;
    memcpy(&half, from, sizeof half);
    return bit_cast<Vec>(__builtin_convertvector(half, UintVec) << 16);
}

INLINE Vec load(const Float16* from) {
    HalfVec half;
    memcpy(&half, from, sizeof half);
#if defined(__AVX512F__)
    return (Vec)_mm512_cvtph_ps((__m256i)half);
#elif defined(__F16C__)
    return (Vec)_mm256_cvtph_ps((__m128i)half);
#else
    const UintVec bits = __builtin_convertvector(half, UintVec), magnitude = (bits & 0x7fff) << 13;
    const Vec scaled = bit_cast<Vec>(magnitude) * 0x1p112f;  // denormal halves come out right: they are normal floats
    const UintVec special = bit_cast<UintVec>(magnitude >= splat_bits(0x0f800000)) & splat_bits(0x7f800000);
    return bit_cast<Vec>(bit_cast<UintVec>(scaled) | special | (bits & 0x8000) << 16);
#endif
}

INLINE void store(float* to, Vec v) { memcpy(to, &v, sizeof v); }

INLINE void store(BFloat16* to, Vec v) {  // to nearest, ties to even; NaN stays NaN
#if defined(__AVX512BF16__)
    const __m256bh half = _mm512_cvtneps_pbh((__m512)v);
#else
    const UintVec bits = bit_cast<UintVec>(v);
    const UintVec rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const UintVec is_nan = bit_cast<UintVec>(v != v);
    const HalfVec half = __builtin_convertvector((rounded & ~is_nan) | (is_nan & 0x7fc0), HalfVec);
#endif
    memcpy(to, &half, sizeof half);
}

INLINE void store(Float16* to, Vec v) {
#if defined(__AVX512F__)
    const __m256i half = _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__F16C__)
    const __m128i half = _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT);
#else
    const UintVec bits = bit_cast<UintVec>(v), magnitude = bits & 0x7fffffff;
    // Below the smallest normal half, adding 0.5 leaves the rounded denormal in the low bits.
    const UintVec small = bit_cast<UintVec>(bit_cast<Vec>(magnitude) + 0.5f) - 0x3f000000;
    const UintVec normal = (magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13;
    UintVec result = magnitude < splat_bits(0x38800000) ? small : normal;
    result = magnitude >= splat_bits(0x477ff000) ? splat_bits(0x7c00) : result;
    result = magnitude > splat_bits(0x7f800000) ? splat_bits(0x7e00) : result;
    const HalfVec half = __builtin_convertvector(result | (bits >> 16 & 0x8000), HalfVec);
#endif
    memcpy(to, &half, sizeof half);
}

// A few elements at the end of a row: through a full vector whose other lanes are zero.
template <class T>
INLINE Vec load_some(const T* from, int64_t count) {
    T buffer[W] = {};
    memcpy(buffer, from, count * sizeof(T));
    return load(buffer);
}

template <class T>
INLINE void store_some(T* to, Vec v, int64_t count) {
    T buffer[W];
    store(buffer, v);
    memcpy(to, buffer, count * sizeof(T));
}

#if defined(__AVX512F__)
INLINE float sum(Vec v) { return _mm512_reduce_add_ps((__m512)v); }
INLINE float largest_of(Vec v) { return _mm512_reduce_max_ps((__m512)v); }
INLINE Vec larger(Vec a, Vec b) { return (Vec)_mm512_max_ps((__m512)a, (__m512)b); }  // b when either is NaN
#else
INLINE float sum(Vec v) {
    float total = 0;
    for (int i = 0; i < W; ++i) total += v[i];
    return total;
}

INLINE float largest_of(Vec v) {  // when none is NaN
    float largest = v[0];
    for (int i = 1; i < W; ++i) largest = v[i] > largest ? v[i] : largest;
    return largest;
}

INLINE Vec larger(Vec a, Vec b) { return a > b ? a : b; }  // b when either is NaN
#endif

// 2^x for x below 127, within 2 units in the last place; 0 below -126 or a little less, NaN stays NaN.
INLINE Vec power_of_two(Vec x) {
#if defined(__AVX512F__)
    const Vec rest = (Vec)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);  // of minus infinity: 0
#else
    const Vec clamped = x < -126.0f ? splat(-126.0f) : x;
    const Vec shifted = clamped - 0.5f + 12582912.0f;  // 1.5 * 2^23: rounds to a whole number
    const Vec rest = clamped - (shifted - 12582912.0f);
#endif
    Vec power = splat(1.877576695e-3f);  // 2^rest for rest in [0, 1]
    power = power * rest + 8.989339694e-3f;
    power = power * rest + 5.582631752e-2f;
    power = power * rest + 2.401536107e-1f;
    power = power * rest + 6.931530833e-1f;
    power = power * rest + 9.999999404e-1f;
#if defined(__AVX512F__)
    return (Vec)_mm512_scalef_ps((__m512)power, (__m512)x);
#else
    const IntVec exponent = (bit_cast<IntVec>(shifted) - 0x4b400000) << 23;
    const Vec result = bit_cast<Vec>(bit_cast<IntVec>(power) + exponent);
    return x >= -126.0f ? result : (x == x ? splat(0.0f) : x);
#endif
}

// e^x, within 2 units in the last place; 0 below -87, NaN stays NaN.
INLINE Vec exponential(Vec x) {
    const Vec clamped = x < -87.3f ? splat(-87.3f) : (x > 88.7f ? splat(88.7f) : x);
    const Vec shifted = clamped * 1.44269504f + 12582912.0f;  // 1.5 * 2^23: rounds to a whole number
    const Vec whole = shifted - 12582912.0f;
    const Vec rest = (clamped - whole * 0.693359375f) + whole * 2.12194440e-4f;
    Vec power = splat(1.9875691500e-4f);
    power = power * rest + 1.3981999507e-3f;
    power = power * rest + 8.3334519073e-3f;
    power = power * rest + 4.1665795894e-2f;
    power = power * rest + 1.6666665459e-1f;
    power = power * rest + 5.0000001201e-1f;
    power = power * rest * rest + rest + 1.0f;
    const IntVec exponent = (bit_cast<IntVec>(shifted) - 0x4b400000) << 23;
    const Vec result = bit_cast<Vec>(bit_cast<IntVec>(power) + exponent);
    return x >= -87.3f ? result : (x == x ? splat(0.0f) : x);
}

enum { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };

template <class T>
struct Type {
    using type = T;
};

// Calls body(Type<T>) with the element type that the number stands for.
template <class Body>
INLINE void with_type(int dtype, const Body& body) {
    if (dtype == FLOAT32) body(Type<float>());
    if (dtype == BFLOAT16) body(Type<BFloat16>());
    if (dtype == FLOAT16) body(Type<Float16>());
}

}  // namespace
