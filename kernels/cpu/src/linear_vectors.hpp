// How are rows multiplied with panels by vectors?
//
// A step multiplies two inputs of a row with 64 pairs. A tile of rows goes over a panel with all its sums in registers, so each
// sum is taken in the order of the inputs.
#pragma once

#include "product.hpp"

namespace {

constexpr int64_t ROW_MULTIPLE = 2;  // of inputs, when rows are multiplied as they lie
constexpr int UNROLL = 8;

// Registers: rows * vectors sums, the operands' vectors (one or, spread out, two each), and what is broadcast.
#if defined(__AVX512BF16__)
constexpr int TILE_ROWS = 6;
#elif defined(__AVX512F__)
constexpr int TILE_ROWS = 5;
#else
constexpr int TILE_ROWS = 4;
#endif

int64_t rows_at_once(int64_t) { return 192; }  // their inputs stay in the second cache, beside a panel; whole tiles

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
        // A single pass reads as fast as memory gives, and fetching would only disturb it. With few tiles the first cache is
        // not for what comes next: there it would drive out rows.
        const int64_t num_tiles = parts_of(end_row - first_row, TILE_ROWS);
        const int64_t num_passes = num_tiles * parts_of(panel_end - output, most * W);
        NextPanel next(p, panel, num_passes == 1 ? 0 : num_passes * (p.num_steps / UNROLL), num_tiles >= 4);
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

}  // namespace
