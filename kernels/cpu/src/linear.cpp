// Products with a packed matrix: out = x W^T + bias, bfloat16 in, sums in float32, for any number of rows.
//
// W [outputs, inputs] is cut in panels of 64 outputs, each [inputs / 2, 64, 2]: a step multiplies two inputs of a row with 64
// pairs, and a panel is read from its begin to its end. Outputs and inputs beyond the last are zero. A tile of rows goes over a
// panel with all its sums in registers, so each sum is taken in the order of the inputs: a row's result is the same bits
// beside any others and with any number of threads.

#include <stdlib.h>

#include "panels.hpp"

namespace {

constexpr int64_t PANEL_OUTPUTS = 64;
constexpr int64_t PIECE = 32;           // outputs: what threads share out, half a panel
constexpr int64_t ROWS_AT_ONCE = 192;   // their inputs stay in the second cache, beside a panel; whole tiles
constexpr int64_t ROWS_OF_A_PART = 24;  // at least, where rows are shared out too
constexpr int UNROLL = 8;

// Registers: rows * vectors sums, the operands' vectors (one or, spread out, two each), and what is broadcast.
#if defined(__AVX512BF16__)
constexpr int TILE_ROWS = 6;
#elif defined(__AVX512F__)
constexpr int TILE_ROWS = 5;
#else
constexpr int TILE_ROWS = 4;
#endif

using Pairs = Row<BFloat16>;

int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
int64_t parts_of(int64_t count, int64_t size) { return (count + size - 1) / size; }

struct Product {
    const char* rows;  // of Pairs, perhaps not aligned
    int64_t row_bytes, num_rows;
    const BFloat16* panels;
    int64_t num_steps, num_outputs;
    const BFloat16* bias;  // or null
    void* out;

    int64_t panel_size() const { return num_steps * 2 * PANEL_OUTPUTS; }
};

// The panel that comes next, fetched bit by bit while this one is computed with. A single pass reads as fast as memory gives,
// and fetching would only disturb it. With few tiles the first cache is not for what comes next: there it would drive out rows.
class NextPanel {
public:
    NextPanel(const Product& p, int64_t panel, int64_t num_tiles, int64_t num_passes) : is_near_(num_tiles >= 4) {
        const int64_t num_pulls = num_tiles * num_passes * (p.num_steps / UNROLL);
        const bool is_last = (panel + 1) * PANEL_OUTPUTS >= p.num_outputs;
        if (num_tiles * num_passes == 1 || num_pulls == 0 || is_last) return;
        at_ = reinterpret_cast<const char*>(p.panels + (panel + 1) * p.panel_size());
        lines_per_pull_ = parts_of(p.panel_size() * sizeof(BFloat16) / 64, num_pulls);
    }

    INLINE void pull() {
        for (int64_t i = 0; i < lines_per_pull_; ++i, at_ += 64) {
            if (is_near_) {
                __builtin_prefetch(at_, 0, 3);
            } else {
                __builtin_prefetch(at_, 0, 2);
            }
        }
    }

private:
    const char* at_ = nullptr;
    int64_t lines_per_pull_ = 0;
    bool is_near_;
};

template <int M, int N>
INLINE void add_step(Vec (&totals)[M][N], const char* rows, int64_t row_bytes, const BFloat16* from) {
    Op<BFloat16> operands[N];
    for (int n = 0; n < N; ++n) operands[n] = Op<BFloat16>::of(from + n * W * 2);
    for (int m = 0; m < M; ++m) {
        Pairs pair;
        memcpy(&pair, rows + m * row_bytes, sizeof pair);
        for (int n = 0; n < N; ++n) operands[n].multiply_add(totals[m][n], pair);
    }
}

// sums[M][N * W] of M rows and N vectors of outputs.
template <int M, int N>
void multiply(const Product& p, const char* rows, const BFloat16* from, float* sums, NextPanel& next) {
    Vec totals[M][N] = {};
    int64_t step = 0;
    for (; step + UNROLL <= p.num_steps; step += UNROLL) {
        next.pull();
#pragma GCC unroll 8
        for (int i = 0; i < UNROLL; ++i) {
            add_step<M, N>(totals, rows + (step + i) * sizeof(Pairs), p.row_bytes, from + (step + i) * 2 * PANEL_OUTPUTS);
        }
    }
    for (; step < p.num_steps; ++step) {
        add_step<M, N>(totals, rows + step * sizeof(Pairs), p.row_bytes, from + step * 2 * PANEL_OUTPUTS);
    }
    for (int m = 0; m < M; ++m) {
        for (int n = 0; n < N; ++n) store(sums + (m * N + n) * W, totals[m][n]);
    }
}

template <class Out>
void write_row(const Product& p, int64_t row, int64_t output, const float* sums, int64_t count) {
    Out* out = static_cast<Out*>(p.out) + row * p.num_outputs + output;
    count = least(count, p.num_outputs - output);
    int64_t i = 0;
    for (; i + W <= count; i += W) {
        const Vec v = load(sums + i);
        store(out + i, p.bias ? v + load(p.bias + output + i) : v);
    }
    if (i < count) {
        const Vec v = load(sums + i);
        store_some(out + i, p.bias ? v + load_some(p.bias + output + i, count - i) : v, count - i);
    }
}

template <int Max, class Body>
INLINE void with_rows(int64_t count, const Body& body) {
    if (count == Max) {
        body(Number<Max>());
    } else if constexpr (Max > 1) {
        with_rows<Max - 1>(count, body);
    }
}

// Vectors of outputs in a pass over a panel. Few rows take more at once: a sum waits for its last addition to end.
constexpr int most_vectors(int64_t num_rows) { return W == 16 ? 4 : num_rows == 1 ? 8 : num_rows == 2 ? 4 : 2; }
constexpr int rows_with(int num_vectors) { return W == 16 || num_vectors == 2 ? TILE_ROWS : 8 / num_vectors; }

// All rows [first, end), in tiles as equal as can be, with N vectors of outputs.
template <int N, class Out>
void run_rows(const Product& p, int64_t first, int64_t end, int64_t output, NextPanel& next) {
    const BFloat16* from = p.panels + output / PANEL_OUTPUTS * p.panel_size() + output % PANEL_OUTPUTS * 2;
    for (int64_t num_tiles = parts_of(end - first, rows_with(N)); num_tiles > 0; --num_tiles) {
        const int64_t count = parts_of(end - first, num_tiles);
        with_rows<rows_with(N)>(count, [&](auto m) {
            alignas(64) float sums[m.value * N * W];
            multiply<m.value, N>(p, p.rows + first * p.row_bytes, from, sums, next);
            for (int i = 0; i < m.value; ++i) write_row<Out>(p, first + i, output, sums + i * N * W, N * W);
        });
        first += count;
    }
}

template <class Out>
void run(const Product& p, int64_t first_row, int64_t end_row, int64_t first_piece, int64_t end_piece) {
    const int64_t end = least(end_piece * PIECE, p.num_outputs);
    const int most = most_vectors(end_row - first_row);
    for (int64_t output = first_piece * PIECE; output < end;) {
        const int64_t panel = output / PANEL_OUTPUTS, panel_end = least((panel + 1) * PANEL_OUTPUTS, end_piece * PIECE);
        NextPanel next(p, panel, parts_of(end_row - first_row, TILE_ROWS), parts_of(panel_end - output, most * W));
        while (output < least(panel_end, end)) {
            const int64_t fitting = least((panel_end - output) / W, most);
            if (fitting >= 8) {
                run_rows<W == 16 ? 4 : 8, Out>(p, first_row, end_row, output, next);
                output += 8 * W;
            } else if (fitting >= 4) {
                run_rows<4, Out>(p, first_row, end_row, output, next);
                output += 4 * W;
            } else {
                run_rows<2, Out>(p, first_row, end_row, output, next);
                output += 2 * W;
            }
        }
    }
}

// Each thread gets pieces that lie side by side, in more than one part where there are many: threads may be disturbed. Rows
// are shared out too where pieces are too few.
template <class Out>
void share_out(const Product& p, int num_threads) {
    const int64_t num_pieces = parts_of(p.num_outputs, PIECE);
    int64_t num_parts = 1, row_parts = 1;
    if (num_threads > 1) {
        const int64_t each = num_pieces / (16 * num_threads);
        num_parts = least(num_pieces, num_threads * (each < 1 ? 1 : least(each, 8)));
        if (num_pieces < 2 * num_threads) {
            row_parts = least(parts_of(p.num_rows, ROWS_OF_A_PART), parts_of(2 * num_threads, num_pieces));
        }
    }
    parallel_for(num_parts * row_parts, 1, num_threads, [&](int64_t i) {
        const int64_t part = i / row_parts, row_part = i % row_parts;
        run<Out>(p, p.num_rows * row_part / row_parts, p.num_rows * (row_part + 1) / row_parts, num_pieces * part / num_parts,
                 num_pieces * (part + 1) / num_parts);
    });
}

// A row as the processor multiplies it; an input beyond the last is zero.
void spread(char* to, const BFloat16* from, int64_t num_inputs) {
    Pairs* row = reinterpret_cast<Pairs*>(to);
    int64_t i = 0;
    for (; i + W <= num_inputs; i += W) Op<BFloat16>::put(row, i, load(from + i));
    if (i < num_inputs) Op<BFloat16>::put(row, i, load_some(from + i, num_inputs - i));
}

}  // namespace

// packed: what `linear` reads; dense: [num_outputs, num_inputs]
EXPORT(void, pack_linear)(void* packed, const void* dense, int64_t num_outputs, int64_t num_inputs, int num_threads) {
    const int64_t num_steps = parts_of(num_inputs, 2);
    parallel_for(parts_of(num_outputs, PANEL_OUTPUTS), 1, num_threads, [&](int64_t panel) {
        BFloat16* to = static_cast<BFloat16*>(packed) + panel * num_steps * 2 * PANEL_OUTPUTS;
        for (int64_t i = 0; i < PANEL_OUTPUTS; ++i) {
            const int64_t output = panel * PANEL_OUTPUTS + i;
            const BFloat16* from = static_cast<const BFloat16*>(dense) + output * num_inputs;
            const int64_t num_there = output < num_outputs ? num_inputs : 0;
            for (int64_t input = 0; input < 2 * num_steps; ++input) {
                to[(input / 2 * PANEL_OUTPUTS + i) * 2 + input % 2] = input < num_there ? from[input] : BFloat16{};
            }
        }
    });
}

// out: [num_rows, num_outputs] of out_dtype, float32 or bfloat16; x: [num_rows, num_inputs], rows x_stride elements apart;
// bias: [num_outputs] or null. 0, or -1 where memory is missing.
EXPORT(int, linear)
(void* out, const void* x, const void* packed, const void* bias, int64_t num_rows, int64_t x_stride, int64_t num_outputs,
 int64_t num_inputs, int out_dtype, int num_threads) {
    Product p = {};
    p.panels = static_cast<const BFloat16*>(packed);
    p.bias = static_cast<const BFloat16*>(bias);
    p.num_steps = parts_of(num_inputs, 2);
    p.num_outputs = num_outputs;
    const bool is_as_it_lies = sizeof(Pairs) == 2 * sizeof(BFloat16) && num_inputs % 2 == 0;
    p.row_bytes = is_as_it_lies ? x_stride * sizeof(BFloat16) : parts_of(num_inputs, W) * W / 2 * sizeof(Pairs);
    char* spread_rows = nullptr;
    if (!is_as_it_lies) {
        spread_rows = static_cast<char*>(malloc(least(num_rows, ROWS_AT_ONCE) * p.row_bytes + 1));
        if (!spread_rows) return -1;
    }
    for (int64_t first = 0; first < num_rows; first += ROWS_AT_ONCE) {
        const BFloat16* rows = static_cast<const BFloat16*>(x) + first * x_stride;
        p.num_rows = least(num_rows - first, ROWS_AT_ONCE);
        if (is_as_it_lies) {
            p.rows = reinterpret_cast<const char*>(rows);
        } else {
            parallel_for(p.num_rows, parts_of(p.num_rows, num_threads), num_threads,
                         [&](int64_t row) { spread(spread_rows + row * p.row_bytes, rows + row * x_stride, num_inputs); });
            p.rows = spread_rows;
        }
        with_type(out_dtype, [&](auto type) {
            using Out = typename decltype(type)::type;
            p.out = static_cast<Out*>(out) + first * num_outputs;
            share_out<Out>(p, num_threads);
        });
    }
    free(spread_rows);
    return 0;
}
