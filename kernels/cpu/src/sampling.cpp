// Which tokens do a row's filters keep, and which one is drawn?
//
// Filters keep a beginning of the row's ranking: larger logits first, of equal ones lower ids. So the last token kept, its
// logit and its id, tells them all; this is a cut. A token's weight is exp((logit - peak) / temperature), in double.

#include <math.h>
#include <stdlib.h>

#include "vector.hpp"

namespace {

constexpr int64_t BYTES_WORTH_A_THREAD = 64 << 10;
constexpr int64_t MAX_PARTS = 2048;
constexpr int64_t FEW = 48;  // tokens that are put in order by insertion
constexpr int64_t PIECE = 64;  // logits of which the largest is looked at first
constexpr int NUM_SLICES = 1024;

typedef double Wide __attribute__((vector_size(W * 4)));  // half as many as floats
typedef int64_t WideInt __attribute__((vector_size(W * 4)));
constexpr int HALF = W / 2;
typedef float HalfFloats __attribute__((vector_size(W * 2)));

INLINE Wide splat_wide(double x) { return x - Wide{}; }

INLINE Wide load_wide(const float* from) {
    HalfFloats half;
    memcpy(&half, from, sizeof half);
    return __builtin_convertvector(half, Wide);
}

// e^x for x <= 0, within 2 units in the last place; 0 below -700.
INLINE Wide exponential(Wide x) {
    const Wide clamped = x < -700.0 ? splat_wide(-700.0) : x;
    const Wide shifted = clamped * 1.4426950408889634 + 0x1.8p52;  // rounds to a whole number
    const Wide whole = shifted - 0x1.8p52;
    const Wide rest = (clamped - whole * 0x1.62e42feep-1) - whole * 0x1.a39ef35793c76p-33;
    Wide power = splat_wide(1.0 / 6227020800.0);
    power = power * rest + 1.0 / 479001600.0;
    power = power * rest + 1.0 / 39916800.0;
    power = power * rest + 1.0 / 3628800.0;
    power = power * rest + 1.0 / 362880.0;
    power = power * rest + 1.0 / 40320.0;
    power = power * rest + 1.0 / 5040.0;
    power = power * rest + 1.0 / 720.0;
    power = power * rest + 1.0 / 120.0;
    power = power * rest + 1.0 / 24.0;
    power = power * rest + 1.0 / 6.0;
    power = power * rest + 0.5;
    power = power * rest + 1.0;
    power = power * rest + 1.0;
    const WideInt exponent = (bit_cast<WideInt>(shifted) - bit_cast<WideInt>(splat_wide(0x1.8p52))) << 52;
    const Wide result = bit_cast<Wide>(bit_cast<WideInt>(power) + exponent);
    return x < -700.0 ? splat_wide(0.0) : result;
}

// log x for positive normal x, within 2 units in the last place.
INLINE Vec logarithm(Vec x) {
    const IntVec bits = bit_cast<IntVec>(x) - 0x3f3504f3;  // of the square root of a half
    const Vec exponent = __builtin_convertvector(bits >> 23, Vec);
    const Vec rest = bit_cast<Vec>((bits & 0x007fffff) + 0x3f3504f3) - 1.0f;
    Vec power = splat(7.0376836292e-2f);
    power = power * rest - 1.1514610310e-1f;
    power = power * rest + 1.1676998740e-1f;
    power = power * rest - 1.2420140846e-1f;
    power = power * rest + 1.4249322787e-1f;
    power = power * rest - 1.6668057665e-1f;
    power = power * rest + 2.0000714765e-1f;
    power = power * rest - 2.4999993993e-1f;
    power = power * rest + 3.3333331174e-1f;
    const Vec square = rest * rest;
    const Vec tail = power * rest * square + exponent * -2.12194440e-4f - 0.5f * square;
    return rest + tail + exponent * 0.693359375f;
}

// ---------------------------------------------------------------------------------------------------------------- noise

INLINE uint64_t mix64(uint64_t x) {
    x += 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

// A uniform number for each token, as kernels/sampling.py defines it.
INLINE Vec uniform(UintVec ids, uint32_t first, uint32_t second) {
    UintVec bits = ids ^ first;
    bits ^= bits >> 16;
    bits *= 0x7FEB352D;
    bits ^= bits >> 15;
    bits ^= second;
    bits *= 0x846CA68B;
    bits ^= bits >> 16;
    bits *= 0x7FEB352D;
    bits ^= bits >> 15;
    const Vec drawn = __builtin_convertvector(bit_cast<IntVec>(bits & 0x7FFFFFFF), Vec);
    const Vec result = (drawn + 0.5f) * 0x1p-31f;
    return result > 1.0f - 0x1p-24f ? splat(1.0f - 0x1p-24f) : result;
}

// Gumbel noise of uniform numbers.
INLINE Vec gumbel(Vec uniform) {
    // log(1 - u), times what rounding took from u: the winners of a draw have a small one.
    const Vec left = 1.0f - uniform, taken = 1.0f - left;
    const Vec exponential = left == 1.0f ? uniform : -logarithm(left) * (uniform / (left == 1.0f ? splat(1.0f) : taken));
    return -logarithm(exponential);
}

// At least the noise, and hardly more where it is large: it is below -log u, and a float's bits are a line below its logarithm.
INLINE Vec most_noise(Vec uniform) {
    const Vec line = __builtin_convertvector(bit_cast<IntVec>(uniform), Vec) * 0x1p-23f - 127.0f;
    return line * -0.69314718f + 0.001f;
}

// -------------------------------------------------------------------------------------------------------------- ranking

// Rises with the value; -0 and 0 are one.
INLINE int32_t key_of(float value) {
    const int32_t bits = bit_cast<int32_t>(value + 0.0f);
    return bits ^ ((bits >> 31) & 0x7FFFFFFF);
}

INLINE float value_of(int32_t key) { return bit_cast<float>(key ^ ((key >> 31) & 0x7FFFFFFF)); }

struct Row {
    const float* logits;
    int64_t width;
    float peak;
    double heat;
};

struct Cut {
    float floor;
    int64_t last_id;  // of the tokens at the floor, the last one kept
};

// Some tokens of a row, in the order of their ids.
struct Tokens {
    int32_t* keys;
    int32_t* ids;
    double* weights;
    int64_t count;
};

float largest(const float* row, int64_t width) {
    Vec tops[4] = {splat(-INFINITY), splat(-INFINITY), splat(-INFINITY), splat(-INFINITY)};
    int64_t i = 0;
    for (; i + 4 * W <= width; i += 4 * W) {
        for (int k = 0; k < 4; ++k) tops[k] = larger(load(row + i + k * W), tops[k]);
    }
    float buffer[W], top = -INFINITY;
    store(buffer, larger(larger(tops[0], tops[1]), larger(tops[2], tops[3])));
    for (int k = 0; k < W; ++k) top = buffer[k] > top ? buffer[k] : top;
    for (; i < width; ++i) top = row[i] > top ? row[i] : top;
    return top;
}

// The first of a row's largest elements; NaN counts as smaller than all.
int64_t first_largest(const float* row, int64_t width) {
    constexpr int64_t PIECE = 64 * W;
    float largest = -INFINITY;
    int64_t start = 0, i = 0;
    for (; i + PIECE <= width; i += PIECE) {
        Vec tops[4] = {splat(-INFINITY), splat(-INFINITY), splat(-INFINITY), splat(-INFINITY)};
        for (int64_t j = 0; j < PIECE; j += 4 * W) {
            for (int k = 0; k < 4; ++k) {
                const Vec v = load(row + i + j + k * W);
                tops[k] = v > tops[k] ? v : tops[k];
            }
        }
        float buffer[W], top = -INFINITY;
        store(buffer, larger(larger(tops[0], tops[1]), larger(tops[2], tops[3])));
        for (int k = 0; k < W; ++k) top = buffer[k] > top ? buffer[k] : top;
        if (top > largest) {
            largest = top;
            start = i;
        }
    }
    int64_t in_rest = -1;
    for (; i < width; ++i) {
        if (row[i] > largest) {
            largest = row[i];
            in_rest = i;
        }
    }
    if (in_rest >= 0) return in_rest;
    for (i = start; i < width; ++i) {
        if (row[i] == largest) return i;
    }
    return 0;
}

// W logits from the i-th on, -inf where the row is over.
INLINE Vec logits_at(const Row& row, int64_t i) {
    if (row.width - i >= W) return load(row.logits + i);
    float buffer[W];
    for (int k = 0; k < W; ++k) buffer[k] = i + k < row.width ? row.logits[i + k] : -INFINITY;
    return load(buffer);
}

INLINE UintVec ids_from(int64_t i) {
    UintVec lanes;
    for (int k = 0; k < W; ++k) lanes[k] = k;
    return lanes + static_cast<uint32_t>(i);
}

// Those of probability zero are never kept.
INLINE IntVec is_kept(const Cut& cut, Vec logits, UintVec ids) {
    const IntVec at_floor = (logits == cut.floor) & (ids <= static_cast<uint32_t>(cut.last_id)) & (logits > -INFINITY);
    return (logits > cut.floor) | at_floor;
}

INLINE Wide weights_of(const float* logits, const Row& row) { return exponential((load_wide(logits) - row.peak) / row.heat); }

// All tokens down to the cut, without their weights.
void collect(Tokens& out, const Row& row, const Cut& cut) {
    out.count = 0;
    for (int64_t i = 0; i < row.width; i += W) {
        const Vec logits = logits_at(row, i);
        const IntVec kept = is_kept(cut, logits, ids_from(i));
        if (!any(kept)) continue;
        float buffer[W];
        store(buffer, logits);
        for (int k = 0; k < W; ++k) {
            out.keys[out.count] = key_of(buffer[k]);
            out.ids[out.count] = static_cast<int32_t>(i) + k;
            out.count -= kept[k];
        }
    }
}

// What is still to be found: of the tokens left, as many as it takes to have this many, or to have this weight.
struct Wanted {
    int64_t count;
    double weight;

    bool is_reached_by(int64_t more, double heavier) const { return more >= count || heavier >= weight; }
};

void sort_few(Tokens& tokens, bool has_weights) {
    for (int64_t i = 1; i < tokens.count; ++i) {
        const int32_t key = tokens.keys[i], id = tokens.ids[i];
        const double weight = has_weights ? tokens.weights[i] : 0.0;
        int64_t j = i;
        for (; j > 0 && tokens.keys[j - 1] < key; --j) {
            tokens.keys[j] = tokens.keys[j - 1];
            tokens.ids[j] = tokens.ids[j - 1];
            if (has_weights) tokens.weights[j] = tokens.weights[j - 1];
        }
        tokens.keys[j] = key;
        tokens.ids[j] = id;
        if (has_weights) tokens.weights[j] = weight;
    }
}

// In the order of the list.
Cut walk(const Tokens& tokens, const Wanted& wanted, bool has_weights) {
    double weight = 0;
    int64_t i = 0;
    for (; i < tokens.count - 1; ++i) {
        weight += has_weights ? tokens.weights[i] : 0.0;
        if (wanted.is_reached_by(i + 1, weight)) break;
    }
    return {value_of(tokens.keys[i]), tokens.ids[i]};
}

// Equal parts of a range of keys, the highest first; all tokens of a part rank before those of the next one.
struct Parts {
    uint32_t top;
    int shift;
    int64_t count;

    uint32_t of(int32_t key) const { return (top - static_cast<uint32_t>(key)) >> shift; }
};

// At most MAX_PARTS; a single one only when all keys are equal.
Parts parts_of(const Tokens& tokens) {
    int32_t high = tokens.keys[0], low = high;
    for (int64_t i = 0; i < tokens.count; ++i) {
        high = tokens.keys[i] > high ? tokens.keys[i] : high;
        low = tokens.keys[i] < low ? tokens.keys[i] : low;
    }
    const uint32_t range = static_cast<uint32_t>(high) - static_cast<uint32_t>(low);
    int shift = 0;
    while (range >> shift >= MAX_PARTS) ++shift;
    return {static_cast<uint32_t>(high), shift, static_cast<int64_t>(range >> shift) + 1};
}

// The part where what is wanted is reached; takes from what is wanted the parts before it.
uint32_t part_with_end(const Tokens& tokens, const Parts& parts, Wanted& wanted, bool has_weights) {
    int32_t counts[MAX_PARTS] = {};
    double weights[MAX_PARTS] = {};
    for (int64_t i = 0; i < tokens.count; ++i) ++counts[parts.of(tokens.keys[i])];
    for (int64_t i = 0; has_weights && i < tokens.count; ++i) weights[parts.of(tokens.keys[i])] += tokens.weights[i];
    uint32_t part = 0;
    for (; part < parts.count - 1; ++part) {
        if (wanted.is_reached_by(counts[part], weights[part])) break;
        wanted.count -= counts[part];
        wanted.weight -= weights[part];
    }
    return part;
}

// The last token of the shortest beginning of the ranking that has what is wanted. Uses the list up. Three rounds split all
// 32 bits of a key.
Cut find_end(Tokens& tokens, Wanted wanted, bool has_weights) {
    while (tokens.count > FEW) {
        const Parts parts = parts_of(tokens);
        if (parts.count == 1) return walk(tokens, wanted, has_weights);
        const uint32_t part = part_with_end(tokens, parts, wanted, has_weights);
        int64_t kept = 0;
        for (int64_t i = 0; i < tokens.count; ++i) {
            const int32_t key = tokens.keys[i];
            tokens.keys[kept] = key;
            tokens.ids[kept] = tokens.ids[i];
            if (has_weights) tokens.weights[kept] = tokens.weights[i];
            kept += parts.of(key) == part;
        }
        tokens.count = kept;
    }
    sort_few(tokens, has_weights);
    return walk(tokens, wanted, has_weights);
}

// The lowest logit whose weight is at least this.
float lowest_of(double weight, const Row& row) {
    const double lowest = row.peak + row.heat * log(weight);
    const float rounded = static_cast<float>(lowest);
    return rounded < lowest ? nextafterf(rounded, INFINITY) : rounded;
}

// Keep exactly k tokens. The k-th largest of the largest in each piece of the row is a floor that k tokens reach.
Cut cut_to_count(const Row& row, int64_t k, Tokens& scratch) {
    Cut floor = {-INFINITY, row.width};
    scratch.count = row.width / PIECE;
    if (k < scratch.count) {
        for (int64_t i = 0; i < scratch.count; ++i) {
            scratch.keys[i] = key_of(largest(row.logits + i * PIECE, PIECE));
            scratch.ids[i] = static_cast<int32_t>(i);
        }
        floor.floor = find_end(scratch, {k, INFINITY}, false).floor;
    }
    collect(scratch, row, floor);
    return scratch.count > k ? find_end(scratch, {k, INFINITY}, false) : floor;
}

// Slices of a row by how far a logit is below the peak; all tokens of a slice rank before those of the next one.
struct Slices {
    float peak, scale;

    // Of W logits; the last slice has all that are further away, also those that never come.
    INLINE IntVec of(Vec logits) const {
        const Vec place = (splat(peak) - logits) * scale;
        return __builtin_convertvector(place < NUM_SLICES - 1 ? place : splat(NUM_SLICES - 1), IntVec);
    }
};

// From the peak to the lowest logit, but not to where weights no longer count.
Slices slices_of(const Row& row) {
    Vec low = splat(INFINITY);
    for (int64_t i = 0; i < row.width; i += W) {
        const Vec logits = logits_at(row, i);
        low = select((logits < low) & (logits > -INFINITY), logits, low);
    }
    float lowest = row.peak;
    for (int k = 0; k < W; ++k) lowest = low[k] < lowest ? low[k] : lowest;
    const double reach = fmin(static_cast<double>(row.peak) - lowest, 60.0 * row.heat);
    const double scale = reach > 0 ? (NUM_SLICES - 1) / reach : 0.0;
    return {row.peak, static_cast<float>(scale < 1e30 ? scale : 1e30)};
}

// Weights of each slice's tokens down to the cut.
void weigh_slices(double* weights, const Slices& slices, const Row& row, const Cut& cut) {
    for (int64_t i = 0; i < row.width; i += W) {
        const Vec logits = logits_at(row, i);
        const IntVec kept = is_kept(cut, logits, ids_from(i));
        if (!any(kept)) continue;
        float buffer[W];
        store(buffer, select(kept, logits, splat(-INFINITY)));
        const Wide halves[2] = {weights_of(buffer, row), weights_of(buffer + HALF, row)};
        const IntVec places = slices.of(logits);
        for (int k = 0; k < HALF; ++k) weights[places[k]] += halves[0][k];
        for (int k = 0; k < HALF; ++k) weights[places[HALF + k]] += halves[1][k];
    }
}

// All tokens of a slice down to the cut, with their weights.
void collect_slice(Tokens& out, const Slices& slices, int32_t slice, const Row& row, const Cut& cut) {
    out.count = 0;
    for (int64_t i = 0; i < row.width; i += W) {
        const Vec logits = logits_at(row, i);
        const IntVec chosen = (slices.of(logits) == slice) & is_kept(cut, logits, ids_from(i));
        if (!any(chosen)) continue;
        float buffer[W];
        double weights[W];
        store(buffer, logits);
        const Wide halves[2] = {weights_of(buffer, row), weights_of(buffer + HALF, row)};
        memcpy(weights, halves, sizeof weights);
        for (int k = 0; k < W; ++k) {
            out.keys[out.count] = key_of(buffer[k]);
            out.ids[out.count] = static_cast<int32_t>(i) + k;
            out.weights[out.count] = weights[k];
            out.count -= chosen[k];
        }
    }
}

// Keep the smallest beginning whose share of the weight reaches p.
Cut cut_to_share(const Row& row, double p, const Cut& within, Tokens& scratch) {
    const Slices slices = slices_of(row);
    double weights[NUM_SLICES] = {}, total = 0;
    weigh_slices(weights, slices, row, within);
    for (int slice = 0; slice < NUM_SLICES; ++slice) total += weights[slice];
    double wanted = p * total;
    int32_t slice = 0, last = NUM_SLICES - 1;
    while (last > 0 && weights[last] == 0) --last;
    for (; slice < last && weights[slice] < wanted; ++slice) wanted -= weights[slice];
    collect_slice(scratch, slices, slice, row, within);
    return find_end(scratch, {scratch.count, wanted}, true);
}

Cut cut_row(const Row& row, int64_t k, double p, double min_p, Tokens& scratch) {
    Cut cut = {-INFINITY, row.width};
    if (!(row.peak > -INFINITY && row.peak < INFINITY)) return cut;
    if (k > 0 && k < row.width) cut = cut_to_count(row, k, scratch);
    if (p < 1.0) cut = cut_to_share(row, p, cut, scratch);
    if (min_p > 0.0) {
        const float floor = lowest_of(min_p, row);
        if (floor > cut.floor) cut = {floor, row.width};
    }
    return cut;
}

// The token with the largest sum of scaled logit and noise.
int64_t draw_row(const Row& row, const Cut& cut, uint64_t seed, uint64_t position) {
    const uint64_t keys = mix64(mix64(seed) + position);
    const uint32_t first = static_cast<uint32_t>(keys), second = static_cast<uint32_t>(keys >> 32);
    const float heat = static_cast<float>(row.heat);
    Vec best = splat(-INFINITY);
    UintVec winners = {};
    float top = -INFINITY;
    for (int64_t i = 0; i < row.width; i += W) {
        const Vec logits = logits_at(row, i);
        const UintVec ids = ids_from(i);
        const IntVec kept = is_kept(cut, logits, ids);
        if (!any(kept)) continue;
        const Vec scaled = select(kept, (logits - row.peak) / heat, splat(-INFINITY));
        const Vec drawn = uniform(ids, first, second);
        if (!any(scaled + most_noise(drawn) > top)) continue;
        const Vec scores = scaled + gumbel(drawn);
        const IntVec is_better = scores > best;
        if (!any(is_better)) continue;
        best = select(is_better, scores, best);
        winners = is_better ? ids : winners;
        for (int k = 0; k < W; ++k) top = best[k] > top ? best[k] : top;
    }
    int64_t token = row.width;
    for (int k = 0; k < W; ++k) {
        if (best[k] == top && winners[k] < token) token = winners[k];
    }
    return token < row.width ? token : 0;
}

}  // namespace

// out: [num_rows], x: [num_rows, width]
EXPORT(void, argmax)(int64_t* out, const float* x, int64_t num_rows, int64_t width, int num_threads) {
    const int64_t chunk = BYTES_WORTH_A_THREAD / (width * sizeof(float)) + 1;
    parallel_for(num_rows, chunk, num_threads, [&](int64_t row) { out[row] = first_largest(x + row * width, width); });
}

// floors, last_ids: [num_rows]; logits: [num_rows, width]; the rest [num_rows]. Returns 0 when there is no memory.
EXPORT(int, cut)
(float* floors, int64_t* last_ids, const float* logits, const float* temperature, const int64_t* top_k, const double* top_p,
 const double* min_p, int64_t num_rows, int64_t width, int num_threads) {
    const int64_t teams = num_threads < num_rows ? num_threads : num_rows;
    int has_memory = 1;
    parallel_for(teams, 1, num_threads, [&](int64_t team) {
        char* memory = static_cast<char*>(malloc((width + HALF) * (sizeof(double) + 2 * sizeof(int32_t))));
        if (memory == nullptr) {
            __atomic_store_n(&has_memory, 0, __ATOMIC_RELAXED);
            return;
        }
        double* weights = reinterpret_cast<double*>(memory);
        int32_t* keys = reinterpret_cast<int32_t*>(weights + width + HALF);
        Tokens scratch = {keys, keys + width + HALF, weights, 0};
        for (int64_t i = team; i < num_rows; i += teams) {
            const bool has_filter = (top_k[i] > 0 && top_k[i] < width) || top_p[i] < 1.0 || min_p[i] > 0.0;
            Cut cut = {-INFINITY, width};
            if (has_filter && temperature[i] > 0.0f) {
                const float* logits_of_row = logits + i * width;
                const Row row = {logits_of_row, width, largest(logits_of_row, width), temperature[i]};
                cut = cut_row(row, top_k[i], top_p[i], min_p[i], scratch);
            }
            floors[i] = cut.floor;
            last_ids[i] = cut.last_id;
        }
        free(memory);
    });
    return has_memory;
}

// tokens: [num_rows]; logits: [num_rows, width]; the rest [num_rows].
EXPORT(void, draw)
(int64_t* tokens, const float* logits, const float* floors, const int64_t* last_ids, const float* temperature,
 const int64_t* seeds, const int64_t* positions, int64_t num_rows, int64_t width, int num_threads) {
    parallel_for(num_rows, 1, num_threads, [&](int64_t i) {
        const float* row = logits + i * width;
        if (temperature[i] > 0) {
            const Row whole = {row, width, largest(row, width), temperature[i]};
            tokens[i] = draw_row(whole, {floors[i], last_ids[i]}, seeds[i], positions[i]);
        } else {
            tokens[i] = first_largest(row, width);
        }
    });
}
