// How do logits change before a draw: penalties, and tokens that are not allowed?

#include <math.h>

#include "vector.hpp"

namespace {

// One bit a token, the lowest bit of a word first; W divides 32.
INLINE IntVec bits_at(const int32_t* words, int64_t token) {
    UintVec lanes;
    for (int k = 0; k < W; ++k) lanes[k] = k;
    const UintVec word = splat_bits(static_cast<uint32_t>(words[token / 32])) >> static_cast<uint32_t>(token % 32);
    return bit_cast<IntVec>(((word >> lanes) & 1) != 0);
}

void penalise(float* logits, const int32_t* in_prompt, const int32_t* counts, int64_t width, float repetition, float presence,
              float frequency) {
    for (int64_t i = 0; i < width; i += W) {
        const int64_t some = width - i < W ? width - i : W;
        IntVec said = {};
        memcpy(&said, counts + i, some * sizeof(int32_t));
        const IntVec is_said = said > 0, is_known = is_said | bits_at(in_prompt, i);
        if (!any(is_known)) continue;
        Vec values = load_some(logits + i, some);
        const Vec lowered = select(values > 0.0f, values / repetition, values * repetition);
        values = select(is_known, lowered, values) - frequency * __builtin_convertvector(said, Vec);
        store_some(logits + i, values - select(is_said, splat(presence), Vec{}), some);
    }
}

void forbid(float* logits, const int32_t* allowed, int64_t width) {
    for (int64_t i = 0; i < width; i += W) {
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
    parallel_for(num_rows, num_rows / num_threads + 1, num_threads, [&](int64_t i) {
        if (repetition[i] == 1.0f && presence[i] == 0.0f && frequency[i] == 0.0f) return;
        penalise(logits + i * width, in_prompt + rows[i] * num_words, counts + rows[i] * width, width, repetition[i],
                 presence[i], frequency[i]);
    });
}

// logits: [., width]; allowed: [num_masks, words], rows: [num_masks], whose logits each mask is for
EXPORT(void, token_mask)
(float* logits, const int32_t* allowed, const int64_t* rows, int64_t num_masks, int64_t width, int num_threads) {
    const int64_t num_words = (width + 31) / 32;
    parallel_for(num_masks, num_masks / num_threads + 1, num_threads,
                 [&](int64_t i) { forbid(logits + rows[i] * width, allowed + i * num_words, width); });
}
