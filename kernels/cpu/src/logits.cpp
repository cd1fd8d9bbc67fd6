// How do logits change before a draw: penalties, and tokens that are not allowed?

#include <math.h>

#include "vector.hpp"

namespace {

constexpr int WORD = 32;  // tokens that have their bits in one word

// One bit a token, the lowest bit of a word first; W divides 32.
INLINE IntVec bits_at(const int32_t* words, int64_t token) {
    UintVec lanes;
    for (int k = 0; k < W; ++k) lanes[k] = k;
    const UintVec word = splat_bits(static_cast<uint32_t>(words[token / 32])) >> static_cast<uint32_t>(token % 32);
    return bit_cast<IntVec>(((word >> lanes) & 1) != 0);
}

// What a row's penalties are.
struct Penalty {
    float repetition, presence, frequency;

    INLINE Vec of(Vec values, IntVec said, IntVec is_in_prompt) const {
        const IntVec is_said = said > 0;
        const Vec lowered = select(values > 0.0f, values / repetition, values * repetition);
        values = select(is_said | is_in_prompt, lowered, values) - frequency * __builtin_convertvector(said, Vec);
        return values - select(is_said, splat(presence), Vec{});
    }
};

INLINE IntVec load_ints(const int32_t* from) {
    IntVec v;
    memcpy(&v, from, sizeof v);
    return v;
}

// Words of 32 tokens of which none was said, which are most of them, are passed over.
void penalise(float* logits, const int32_t* in_prompt, const int32_t* counts, int64_t width, const Penalty& penalty) {
    int64_t i = 0;
    for (; i + WORD <= width; i += WORD) {
        IntVec said = {};
        for (int k = 0; k < WORD; k += W) said |= load_ints(counts + i + k);
        if (in_prompt[i / WORD] == 0 && !any(said)) continue;
        for (int k = 0; k < WORD; k += W) {
            store(logits + i + k, penalty.of(load(logits + i + k), load_ints(counts + i + k), bits_at(in_prompt, i + k)));
        }
    }
    for (; i < width; i += W) {
        const int64_t some = width - i < W ? width - i : W;
        IntVec said = {};
        memcpy(&said, counts + i, some * sizeof(int32_t));
        store_some(logits + i, penalty.of(load_some(logits + i, some), said, bits_at(in_prompt, i)), some);
    }
}

void forbid(float* logits, const int32_t* allowed, int64_t width) {
    int64_t i = 0;
    for (; i + WORD <= width; i += WORD) {
        if (allowed[i / WORD] == -1) continue;
        for (int k = 0; k < WORD; k += W) {
            store(logits + i + k, select(bits_at(allowed, i + k), load(logits + i + k), splat(-INFINITY)));
        }
    }
    for (; i < width; i += W) {
        const int64_t some = width - i < W ? width - i : W;
        store_some(logits + i, select(bits_at(allowed, i), load_some(logits + i, some), splat(-INFINITY)), some);
    }
}

}  // namespace

// logits: [num_rows, width]; rows[i] is whose in_prompt [., words] and counts [., width] row i has; the rest [num_rows].
EXPORT(void, penalties)
(float* logits, const int64_t* rows, const int32_t* in_prompt, const int32_t* counts, const float* repetition,
 const float* presence, const float* frequency, int64_t num_rows, int64_t width, int num_threads) {
    const int64_t num_words = (width + 31) / 32;
    const auto is_on = [&](int64_t i) { return repetition[i] != 1.0f || presence[i] != 0.0f || frequency[i] != 0.0f; };
    int64_t num_on = 0;
    for (int64_t i = 0; i < num_rows; ++i) num_on += is_on(i);
    parallel_for(num_rows, 1, num_on > 1 ? num_threads : 1, [&](int64_t i) {
        if (!is_on(i)) return;
        penalise(logits + i * width, in_prompt + rows[i] * num_words, counts + rows[i] * width, width,
                 {repetition[i], presence[i], frequency[i]});
    });
}

// logits: [., width]; allowed: [num_masks, words], rows: [num_masks], whose logits each mask is for
EXPORT(void, token_mask)
(float* logits, const int32_t* allowed, const int64_t* rows, int64_t num_masks, int64_t width, int num_threads) {
    const int64_t num_words = (width + 31) / 32;
    parallel_for(num_masks, num_masks / num_threads + 1, num_threads,
                 [&](int64_t i) { forbid(logits + rows[i] * width, allowed + i * num_words, width); });
}
