// Products with a packed matrix: out = x W^T + bias, bfloat16 in, sums in float32, for any number of rows.
//
// W [outputs, inputs] is cut in panels of 64 outputs, each [inputs / 2, 64, 2]: a step multiplies two inputs of a row with 64
// pairs, and a panel is read from its begin to its end. Outputs and inputs beyond the last are zero. A tile of rows goes over a
// panel with all its sums in registers, so each sum is taken in one order of the inputs: a row's result is the same bits
// beside any others and with any number of threads.

#include <stdlib.h>

#if defined(__AMX_BF16__)
#include "linear_tiles.hpp"
#else
#include "linear_vectors.hpp"
#endif

namespace {

constexpr int64_t ROWS_OF_A_PART = 24;  // at least, where rows are shared out too

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

int64_t padded(int64_t num_inputs) { return parts_of(num_inputs, 2 * W) * 2 * W; }

// A row as the processor multiplies it; inputs beyond the last are zero, up to a multiple of 2 * W.
void spread(char* to, const BFloat16* from, int64_t num_inputs) {
    Pairs* row = reinterpret_cast<Pairs*>(to);
    for (int64_t i = 0; i < padded(num_inputs); i += W) {
        const int64_t count = least(num_inputs - i, W);
        Op<BFloat16>::put(row, i, count == W ? load(from + i) : count > 0 ? load_some(from + i, count) : Vec{});
    }
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
    const bool is_as_it_lies = sizeof(Pairs) == 2 * sizeof(BFloat16) && num_inputs % ROW_MULTIPLE == 0;
    p.row_bytes = is_as_it_lies ? x_stride * sizeof(BFloat16) : padded(num_inputs) / 2 * sizeof(Pairs);
    const int64_t most_rows = rows_at_once(num_inputs);
    char* spread_rows = nullptr;
    if (!is_as_it_lies) {
        spread_rows = static_cast<char*>(malloc(least(num_rows, most_rows) * p.row_bytes + 1));
        if (!spread_rows) return -1;
    }
    for (int64_t first = 0; first < num_rows; first += most_rows) {
        const BFloat16* rows = static_cast<const BFloat16*>(x) + first * x_stride;
        p.num_rows = least(num_rows - first, most_rows);
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
