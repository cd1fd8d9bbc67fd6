// Attention that reads the paged cache in place, for any mix of prefills, chunks with a history and decodes.
//
// Work is cut in units: up to 48 rows (queries and the heads that share a key head) of one sequence against a span of its tokens.
// A unit goes over its span in tiles with a running softmax. Single queries are split over spans of 512 tokens, whose results are
// merged at the end, so that one long context occupies all threads. How work is cut depends on the sequence alone: a result
// is the same bits in any batch and with any number of threads.

#include <math.h>
#include <stdlib.h>

#include "attention_vectors.hpp"

#if defined(__AMX_BF16__)
#include "attention_tiles.hpp"
#endif

namespace {

constexpr int ROWS = 48;                  // of a unit
constexpr int TILE_SCORES = 48 * 128;     // rows * tokens of a tile: scores and weights stay in the first caches
constexpr int TILE = 256;                 // tokens of a tile, at most
constexpr int SPAN = 512;                 // tokens of a unit with a single query
constexpr int MAX_HEAD = 256;
constexpr int LINES_PER_WEIGHTS = 3;      // fetched ahead for each vector of weights: memory must not rest during the softmax
constexpr float NOTHING = -INFINITY;
constexpr float LOG2_E = 1.44269504f;     // scores are turned to powers of two: those are computed faster than of e

struct Problem {
    const void *q, *cache;
    void* out;
    const int32_t *query_starts, *seq_lens, *block_table;
    const float* sinks;  // one per head, or null
    int64_t num_seqs, table_stride, q_stride, num_heads;
    CacheShape shape;
    float scale, soft_cap;  // no cap: 0
    int64_t window;         // tokens that a query sees, its own included; no window: 0
};

struct Unit {
    int32_t seq, kv_head;
    int32_t first_row, num_rows;  // row = query * group + head within the group
    int32_t first_token, end_token;
    int32_t part;  // where its unmerged result goes; -1: it is the whole result
};

struct Part {  // rows of [head size] sums follow in another array
    float largest[ROWS], total[ROWS];
};

// A part has a single query.
int64_t part_rows(const Problem& p) {
    const int64_t group = p.num_heads / p.shape.num_kv_heads;
    return group < ROWS ? group : ROWS;
}

struct Plan {
    Unit* units;
    int64_t num_units, num_parts;
};

int32_t min_(int32_t a, int32_t b) { return a < b ? a : b; }
int32_t max_(int32_t a, int32_t b) { return a > b ? a : b; }

// The tokens that a row sees: [first, last].
struct Sight {
    int32_t first, last;
};

Sight sight(const Problem& p, int32_t seq, int32_t row) {
    const int32_t group = static_cast<int32_t>(p.num_heads / p.shape.num_kv_heads);
    const int32_t num_queries = p.query_starts[seq + 1] - p.query_starts[seq];
    const int32_t last = p.seq_lens[seq] - num_queries + row / group;
    return {p.window ? max_(0, last - static_cast<int32_t>(p.window) + 1) : 0, last};
}

// Whether all that will be read and written is there: plans come from another process.
bool is_sound(const Problem& p, int64_t num_tokens, int64_t num_blocks, int64_t table_width) {
    for (int64_t seq = 0; seq < p.num_seqs; ++seq) {
        const int64_t start = p.query_starts[seq], end = p.query_starts[seq + 1], length = p.seq_lens[seq];
        const int64_t used = (length + p.shape.block_size - 1) / p.shape.block_size;
        if (start < 0 || end < start || end > num_tokens || length < 0 || used > table_width) return false;
        if (length > 0 && end - start > length) return false;
        const int32_t* blocks = p.block_table + seq * p.table_stride;
        const int64_t first_seen = p.window ? length - (end - start) - p.window + 1 : 0;
        for (int64_t i = first_seen > 0 ? first_seen / p.shape.block_size : 0; i < used; ++i) {
            if (blocks[i] < 0 || blocks[i] >= num_blocks) return false;
        }
    }
    return true;
}

// Long units first, so that no thread is left with one at the end: sequences as they come, tiles of a sequence from its end.
// With units null, only counts.
Plan cut(const Problem& p, Unit* units) {
    Plan plan{units, 0, 0};
    const int32_t group = static_cast<int32_t>(p.num_heads / p.shape.num_kv_heads);
    const int32_t rows_at_once = group >= ROWS ? ROWS : ROWS / group * group;
    for (int32_t seq = 0; seq < p.num_seqs; ++seq) {
        const int32_t num_queries = p.query_starts[seq + 1] - p.query_starts[seq];
        if (num_queries <= 0 || p.seq_lens[seq] <= 0) continue;
        const int32_t num_rows = num_queries * group;
        for (int32_t tile = (num_rows - 1) / rows_at_once; tile >= 0; --tile) {
            const int32_t first_row = tile * rows_at_once, rows = min_(rows_at_once, num_rows - first_row);
            const int32_t first = sight(p, seq, first_row).first / PANEL * PANEL;
            const int32_t end = sight(p, seq, first_row + rows - 1).last + 1;
            const int32_t span = num_queries == 1 ? SPAN : end - first;
            for (int32_t kv_head = 0; kv_head < p.shape.num_kv_heads; ++kv_head) {
                for (int32_t token = first; token < end; token += span) {
                    const int32_t part = end - first > span ? static_cast<int32_t>(plan.num_parts++) : -1;
                    if (units) units[plan.num_units] = {seq, kv_head, first_row, rows, token, min_(token + span, end), part};
                    ++plan.num_units;
                }
            }
        }
    }
    return plan;
}

template <class Products>
int32_t tile_of(const Unit& unit) {
    return min_(TILE, TILE_SCORES / Products::touched(unit.num_rows) / PANEL * PANEL);
}

template <class T>
struct Scratch {
    alignas(64) Row<T> queries[ROWS * MAX_HEAD / E<T>];
    alignas(64) float scores[TILE_SCORES];
    alignas(64) Row<T> weights[TILE_SCORES / E<T>];
    alignas(64) float sums[ROWS * MAX_HEAD];
    alignas(64) T edge[2][PANEL * MAX_HEAD];
    const T* keys[TILE / PANEL];
    const T* values[TILE / PANEL];
    const T* ahead[2 * TILE / PANEL];
    float largest[ROWS], total[ROWS];
};

// The values of a panel of which only tokens [first, end) are to be seen: others may be anything, and 0 * NaN is NaN.
template <class T>
const T* without_others(const T* values, int32_t first, int32_t end, int64_t head_size, T* copy) {
    for (int token = 0; token < PANEL; ++token) {
        const bool is_seen = token >= first && token < end;
        for (int64_t i = 0; i < head_size; ++i) {
            const int64_t at = (token / E<T> * head_size + i) * E<T> + token % E<T>;
            copy[at] = is_seen ? values[at] : T{};
        }
    }
    return copy;
}

template <class T>
int find_keys(const Problem& p, const Unit& unit, int32_t first, int32_t end, const T** keys) {
    const int32_t* blocks = p.block_table + unit.seq * p.table_stride;
    const int32_t block_size = static_cast<int32_t>(p.shape.block_size);
    int count = 0;
    for (int32_t token = first; token < end; token += PANEL) {
        keys[count++] = static_cast<const T*>(p.cache) + p.shape.keys(blocks[token / block_size], unit.kv_head, token % block_size);
    }
    return count;
}

// Values lie behind their keys; those of the first and the last panel may have to be cleaned.
template <class T>
void find_values(const Problem& p, int32_t first, int32_t end, int32_t first_seen, int num_panels, Scratch<T>& s) {
    for (int i = 0; i < num_panels; ++i) s.values[i] = s.keys[i] + p.shape.keys_to_values();
    const int32_t last = first + (num_panels - 1) * PANEL;
    if (first_seen > first) {
        s.values[0] = without_others(s.values[0], first_seen - first, min_(PANEL, end - first), p.shape.head_size, s.edge[0]);
    }
    if (last + PANEL > end && (num_panels > 1 || first_seen <= first)) {
        s.values[num_panels - 1] = without_others(s.values[num_panels - 1], 0, end - last, p.shape.head_size, s.edge[1]);
    }
}

// cap * tanh(x / cap): near zero by its series, where the quotient loses what small scores differ by.
INLINE Vec capped(Vec x, float cap) {
    const Vec share = x / cap, square = share * share;
    const Vec near = x * (1.0f + square * (-1.0f / 3 + square * (2.0f / 15 + square * (-17.0f / 315))));
    const Vec far = cap - (2.0f * cap) / (exponential(share + share) + 1.0f);
    return select(square < 0.0625f, near, far);
}

// The scores of a tile whose row is capped, or doesn't see all of it: scaled, and in powers of two, where they lay.
Vec prepare(const Problem& p, Sight sees, int32_t first, int32_t num_padded, float* scores) {
    IntVec lanes;
    for (int i = 0; i < W; ++i) lanes[i] = i;
    Vec tops = splat(NOTHING);
    for (int32_t i = 0; i < num_padded; i += W) {
        Vec v = load(scores + i) * p.scale;
        if (p.soft_cap != 0) v = capped(v, p.soft_cap);
        v *= LOG2_E;
        if (first + i < sees.first || first + i + W - 1 > sees.last) {
            const IntVec tokens = lanes + (first + i);
            v = (tokens >= splat_int(sees.first)) & (tokens <= splat_int(sees.last)) ? v : splat(NOTHING);
        }
        store(scores + i, v);
        tops = larger(v, tops);
    }
    return tops;
}

// One row's scores of a tile become weights; what was summed before shrinks to the new largest score.
template <class T>
void soften(const Problem& p, Sight sees, int32_t first, int32_t num_padded, int row, int64_t stride, Scratch<T>& s, Ahead& ahead) {
    float* scores = s.scores + row * stride;
    const bool is_plain = p.soft_cap == 0 && p.scale >= 0 && first >= sees.first && first + num_padded - 1 <= sees.last;
    const float factor = is_plain ? p.scale * LOG2_E : 1.0f;
    Vec tops = splat(NOTHING);
    if (is_plain) {
        for (int32_t i = 0; i < num_padded; i += W) tops = larger(load(scores + i), tops);
    } else {
        tops = prepare(p, sees, first, num_padded, scores);
    }
    const float top = largest_of(tops) * factor, largest = top > s.largest[row] ? top : s.largest[row];
    const float base = largest == NOTHING ? 0.0f : largest;
    Vec total = {};
    for (int32_t i = 0; i < num_padded; i += W) {
        const Vec v = power_of_two(load(scores + i) * factor - base);
        ahead.pull(LINES_PER_WEIGHTS);
        total += v;
        Op<T>::put(s.weights + row * (stride / E<T>), i, v);
    }
    if (largest > s.largest[row]) {
        const float shrink = s.largest[row] == NOTHING ? 0.0f : exp2f(s.largest[row] - largest);
        s.total[row] *= shrink;
        float* sums = s.sums + row * p.shape.head_size;
        for (int64_t i = 0; i < p.shape.head_size; i += W) store(sums + i, load(sums + i) * shrink);
        s.largest[row] = largest;
    }
    s.total[row] += sum(total);
}

// While it computes, it has its values fetched, and then the keys of what comes next.
template <class T, class Products>
void add_tile(const Problem& p, const Unit& unit, int32_t first, int32_t end, int num_next, bool is_first,
              const Products& products, Scratch<T>& s) {
    const int32_t first_seen = sight(p, unit.seq, unit.first_row).first;
    const int64_t head_size = p.shape.head_size, panel_bytes = head_size * PANEL * sizeof(T);
    const int num_panels = find_keys(p, unit, first, end, s.keys);
    const int64_t stride = num_panels * PANEL;
    const T** fetched = s.ahead + TILE / PANEL - num_panels;
    for (int i = 0; i < num_panels; ++i) fetched[i] = s.keys[i] + p.shape.keys_to_values();
    Ahead ahead(reinterpret_cast<const void* const*>(fetched), num_panels + num_next, panel_bytes);
    products.score(s.queries, s.keys, num_panels, s.scores, ahead);
    find_values(p, first, end, first_seen, num_panels, s);
    for (int row = 0; row < unit.num_rows; ++row) {
        soften(p, sight(p, unit.seq, unit.first_row + row), first, static_cast<int32_t>(stride), row, stride, s, ahead);
    }
    products.mix(s.weights, s.values, num_panels, s.sums, !is_first, ahead);
}

template <class T>
T* row_of_out(const Problem& p, int32_t seq, int32_t kv_head, int32_t row) {
    const int64_t group = p.num_heads / p.shape.num_kv_heads, token = p.query_starts[seq] + row / group;
    return static_cast<T*>(p.out) + (token * p.num_heads + kv_head * group + row % group) * p.shape.head_size;
}

// A sink is a score that takes its share of the weight and brings no value.
template <class T>
void finish_row(const Problem& p, T* out, const float* sums, float largest, float total, int64_t head) {
    float factor = 1.0f;
    if (p.sinks) {
        const float sink = p.sinks[head] * LOG2_E, top = sink > largest ? sink : largest;
        factor = exp2f(largest - top);
        total = total * factor + exp2f(sink - top);
    }
    for (int64_t i = 0; i < p.shape.head_size; i += W) store(out + i, load(sums + i) * (factor / total));
}

template <class T, class Products>
void run(const Problem& p, const Unit& unit, const Unit* next, Part* parts, float* part_sums) {
    Scratch<T> s;
    const int64_t head_size = p.shape.head_size, group = p.num_heads / p.shape.num_kv_heads;
    for (int row = 0; row < unit.num_rows; ++row) {
        const int64_t r = unit.first_row + row, token = p.query_starts[unit.seq] + r / group;
        const T* q = static_cast<const T*>(p.q) + token * p.q_stride + (unit.kv_head * group + r % group) * head_size;
        for (int64_t i = 0; i < head_size; i += W) Op<T>::put(s.queries + row * (head_size / E<T>), i, load(q + i));
        s.largest[row] = NOTHING;
        s.total[row] = 0;
    }
    const int touched = Products::touched(unit.num_rows);
    memset(s.queries + unit.num_rows * head_size / E<T>, 0, (touched - unit.num_rows) * head_size / E<T> * sizeof(Row<T>));
    memset(s.sums, 0, touched * head_size * sizeof(float));
    const Products products(unit.num_rows, head_size);
    const int32_t tile = tile_of<Products>(unit);
    for (int32_t token = unit.first_token; token < unit.end_token; token += tile) {
        const int32_t end = min_(token + tile, unit.end_token);
        int num_next = 0;
        if (end < unit.end_token) {
            num_next = find_keys(p, unit, end, min_(end + tile, unit.end_token), s.ahead + TILE / PANEL);
        } else if (next) {
            num_next = find_keys(p, *next, next->first_token, min_(next->first_token + tile_of<Products>(*next), next->end_token), s.ahead + TILE / PANEL);
        }
        add_tile(p, unit, token, end, num_next, token == unit.first_token, products, s);
    }
    if (unit.part >= 0) {
        memcpy(parts[unit.part].largest, s.largest, unit.num_rows * sizeof(float));
        memcpy(parts[unit.part].total, s.total, unit.num_rows * sizeof(float));
        memcpy(part_sums + unit.part * part_rows(p) * head_size, s.sums, unit.num_rows * head_size * sizeof(float));
        return;
    }
    for (int row = 0; row < unit.num_rows; ++row) {
        const int64_t head = unit.kv_head * group + (unit.first_row + row) % group;
        finish_row(p, row_of_out<T>(p, unit.seq, unit.kv_head, unit.first_row + row), s.sums + row * head_size, s.largest[row],
                   s.total[row], head);
    }
}

// Parts of the same rows follow each other; `unit` is the first of them, `count` how many they are.
template <class T>
void merge(const Problem& p, const Unit& unit, int count, const Part* parts, const float* part_sums) {
    const int64_t head_size = p.shape.head_size, group = p.num_heads / p.shape.num_kv_heads;
    alignas(64) float sums[MAX_HEAD];
    for (int row = 0; row < unit.num_rows; ++row) {
        float largest = NOTHING, total = 0;
        for (int i = 0; i < count; ++i) {
            const float top = parts[unit.part + i].largest[row];
            largest = top > largest ? top : largest;
        }
        memset(sums, 0, sizeof sums);
        for (int i = 0; i < count; ++i) {
            const Part& part = parts[unit.part + i];
            const float factor = part.largest[row] == largest ? 1.0f : exp2f(part.largest[row] - largest);
            const float* from = part_sums + ((unit.part + i) * part_rows(p) + row) * head_size;
            total += part.total[row] * factor;
            for (int64_t j = 0; j < head_size; j += W) store(sums + j, load(sums + j) + load(from + j) * factor);
        }
        const int64_t head = unit.kv_head * group + (unit.first_row + row) % group;
        finish_row(p, row_of_out<T>(p, unit.seq, unit.kv_head, unit.first_row + row), sums, largest, total, head);
    }
}

// Calls body(Type<Products>) with the way in which a unit is multiplied.
template <class T, class Body>
void with_products(Type<T>, const Unit&, const Body& body) {
    body(Type<VectorProducts<T>>());
}

#if defined(__AMX_BF16__)
// With few rows memory is the limit, and vectors leave it more time to bring what comes next.
template <class Body>
void with_products(Type<BFloat16>, const Unit& unit, const Body& body) {
    if (unit.num_rows > MAX_ROWS) {
        body(Type<TileProducts>());
    } else {
        body(Type<VectorProducts<BFloat16>>());
    }
}
#endif

template <class T>
void attend(const Problem& p, int num_threads) {
    const Plan needed = cut(p, nullptr);
    if (!needed.num_units) return;
    Unit* units = static_cast<Unit*>(malloc(needed.num_units * sizeof(Unit)));
    Part* parts = static_cast<Part*>(malloc(needed.num_parts * sizeof(Part)));
    float* part_sums = static_cast<float*>(malloc(needed.num_parts * part_rows(p) * p.shape.head_size * sizeof(float)));
    if (!units || (needed.num_parts && (!parts || !part_sums))) abort();
    const Plan plan = cut(p, units);
    // A few neighbours at a time: a thread knows what it reads next.
    const int64_t chunk = plan.num_units / (num_threads * 8) + 1;
    parallel_for(plan.num_units, chunk, num_threads, [&](int64_t i) {
        with_products(Type<T>(), units[i], [&](auto type) {
            using Products = typename decltype(type)::type;
            run<T, Products>(p, units[i], (i + 1) % chunk && i + 1 < plan.num_units ? &units[i + 1] : nullptr, parts, part_sums);
        });
    });
    for (int64_t i = 0; i < plan.num_units;) {
        int count = 1;
        if (units[i].part >= 0) {
            while (i + count < plan.num_units && units[i + count].seq == units[i].seq && units[i + count].kv_head == units[i].kv_head &&
                   units[i + count].first_row == units[i].first_row) {
                ++count;
            }
            merge<T>(p, units[i], count, parts, part_sums);
        }
        i += count;
    }
    free(units);
    free(parts);
    free(part_sums);
}

template <class T>
void put_key(T* panel, int64_t token, const T* key, int64_t head_size) {
    for (int64_t i = 0; i < head_size; i += E<T>) memcpy(panel + i * PANEL + token * E<T>, key + i, 4);
}

template <class T>
void put_value(T* panel, int64_t token, const T* value, int64_t head_size) {
    T* to = panel + token / E<T> * E<T> * head_size;
#if defined(__AVX512BW__)
    if constexpr (E<T> == 2) {  // its neighbour may be another thread's: that one's elements are not written
        const uint32_t is_written = token % 2 ? 0xaaaaaaaa : 0x55555555;
        for (int64_t i = 0; i < head_size; i += W) {
            const __m512i pairs = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(value + i)));
            _mm512_mask_storeu_epi16(to + 2 * i, is_written, _mm512_slli_epi32(pairs, static_cast<unsigned>(token % 2 * 16)));
        }
        return;
    }
#endif
    for (int64_t i = 0; i < head_size; ++i) to[i * E<T> + token % E<T>] = value[i];
}

}  // namespace

// q: tokens q_stride elements apart, [num_heads, head_size] each; out: the same, contiguous; tokens of no sequence are not written.
// head_size is a multiple of 16 up to 256, block_size a multiple of 16. Returns 0, and does nothing, when starts, lengths or
// tables point outside of what there is.
EXPORT(int, attention)
(void* out, const void* q, const void* cache, const int32_t* query_starts, const int32_t* seq_lens, const int32_t* block_table,
 const float* sinks, int64_t num_tokens, int64_t num_blocks, int64_t table_width, int64_t num_seqs, int64_t table_stride,
 int64_t q_stride, int64_t num_heads, int64_t num_kv_heads, int64_t block_size, int64_t head_size, int64_t window, float scale, float soft_cap, int dtype, int num_threads) {
    const Problem problem{q,        cache,        out,      query_starts, seq_lens,
                          block_table, sinks,     num_seqs, table_stride, q_stride,
                          num_heads, {num_kv_heads, block_size, head_size}, scale, soft_cap, window};
    if (!is_sound(problem, num_tokens, num_blocks, table_width)) return 0;
    with_type(dtype, [&](auto type) { attend<typename decltype(type)::type>(problem, num_threads); });
    return 1;
}

// k, v: tokens k_stride and v_stride elements apart, [num_kv_heads, head_size] each. A negative slot is padding. Returns 0, and
// does nothing, when a slot lies behind the cache.
EXPORT(int, append_kv)
(void* cache, const void* k, const void* v, const int64_t* slots, int64_t num_blocks, int64_t num_tokens, int64_t k_stride,
 int64_t v_stride, int64_t num_kv_heads, int64_t block_size, int64_t head_size, int dtype, int num_threads) {
    const CacheShape shape{num_kv_heads, block_size, head_size};
    for (int64_t token = 0; token < num_tokens; ++token) {
        if (slots[token] >= num_blocks * block_size) return 0;
    }
    with_type(dtype, [&](auto type) {
        using T = typename decltype(type)::type;
        parallel_for(num_tokens, 16, num_threads, [&](int64_t token) {
            if (slots[token] < 0) return;
            const int64_t block = slots[token] / block_size, offset = slots[token] % block_size;
            for (int64_t kv_head = 0; kv_head < num_kv_heads; ++kv_head) {
                T* keys = static_cast<T*>(cache) + shape.keys(block, kv_head, offset);
                put_key(keys, offset % PANEL, static_cast<const T*>(k) + token * k_stride + kv_head * head_size, head_size);
                put_value(keys + shape.keys_to_values(), offset % PANEL, static_cast<const T*>(v) + token * v_stride + kv_head * head_size,
                          head_size);
            }
        });
    });
    return 1;
}
