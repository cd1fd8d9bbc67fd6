// How are rows multiplied with panels by the matrix unit?
//
// A panel lies as tiles want it: 16 pairs of inputs of 16 outputs, 256 bytes apart. A tile holds the sums of up to 16 rows and 16
// outputs, and four are held at a time: of two tiles of rows and half a panel, or of one and a whole panel. A sum takes in
// 32 inputs at a time, in their order, whatever the height of its tile and the other rows in it.
#pragma once

#include "product.hpp"
#include "tiles.hpp"

namespace {

constexpr int64_t TILE_STEPS = 16;                // that a tile takes in at once
constexpr int64_t ROW_MULTIPLE = 2 * TILE_STEPS;  // of inputs, when rows are multiplied as they lie
constexpr int64_t STEP_BYTES = PANEL_OUTPUTS * 2 * sizeof(BFloat16);

int64_t rows_at_once(int64_t num_inputs) {  // their inputs stay in the second cache, beside two panels
    const int64_t fitting = (768 << 10) / (num_inputs * sizeof(BFloat16) + 1) / (2 * TILE_HEIGHT) * 2 * TILE_HEIGHT;
    return fitting < 4 * TILE_HEIGHT ? 4 * TILE_HEIGHT : fitting;
}

// Tiles 0 to 3 are sums, 4 and 5 hold rows, 6 and 7 columns.
TileShapes shapes(int64_t height) {
    TileShapes shapes;
    shapes.set(0, 5, height, TILE_BYTES);
    shapes.set(6, 7, TILE_STEPS, TILE_BYTES);
    return shapes;
}

// The columns of a panel from an output on. Where inputs are no multiple of 32, the last ones are read from a copy that zeros
// follow: what follows them in the panel may be anything.
struct Columns {
    const char *whole, *rest;  // rest: null when there is none
    int64_t num_whole;         // times 16 steps

    Columns from(int64_t output) const {
        const int64_t offset = output % PANEL_OUTPUTS * 2 * sizeof(BFloat16);
        return {whole + offset, rest ? rest + offset : nullptr, num_whole};
    }
};

// Up to 16 rows, and as many rows again.
struct RowTiles {
    int64_t first, second, height;
};

template <int M, int N, int Column = 0>
INLINE void add_columns(const char* columns) {
    constexpr int B = 6 + Column % 2;
    load_tile<B>(columns + Column * TILE_BYTES, STEP_BYTES);
    multiply_add_tile<Column, 4, B>();
    if constexpr (M == 2) multiply_add_tile<N + Column, 5, B>();
    if constexpr (Column + 1 < N) add_columns<M, N, Column + 1>(columns);
}

template <int M, int N>
INLINE void add_tile_steps(const char* first, const char* second, int64_t row_bytes, const char* columns) {
    load_tile<4>(first, row_bytes);
    if constexpr (M == 2) load_tile<5>(second, row_bytes);
    add_columns<M, N>(columns);
}

// Memory gives lines faster in their order than as tiles read them.
template <int N>
INLINE void fetch(const char* columns) {
    for (int64_t step = 0; step < TILE_STEPS; ++step) {
        for (int64_t n = 0; n < N; ++n) __builtin_prefetch(columns + step * STEP_BYTES + n * TILE_BYTES);
    }
}

template <class Out>
INLINE void store_two(Out* to, Vec a, Vec b) {
    store(to, a);
    store(to + W, b);
}
INLINE void store_two(BFloat16* to, Vec a, Vec b) {
    _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a));
}

template <int N, class Out>
INLINE void write_rows(const Product& p, int64_t row, int64_t num_rows, int64_t output, const float* sums) {
    if (output + N * W > p.num_outputs) {
        for (int64_t i = 0; i < num_rows; ++i) write_row<Out>(p, row + i, output, sums + i * N * W, N * W);
        return;
    }
    Vec bias[N] = {};
    for (int n = 0; p.bias && n < N; ++n) bias[n] = load(p.bias + output + n * W);
    Out* out = static_cast<Out*>(p.out) + row * p.num_outputs + output;
    for (int64_t i = 0; i < num_rows; ++i, out += p.num_outputs, sums += N * W) {
        for (int n = 0; n < N; n += 2) store_two(out + n * W, load(sums + n * W) + bias[n], load(sums + (n + 1) * W) + bias[n + 1]);
    }
}

// The sums of M tiles of rows and N * 16 outputs.
template <int M, int N, class Out>
INLINE void multiply(const Product& p, const RowTiles& rows, const Columns& columns, int64_t output, NextPanel& next) {
    const char *first = p.rows + rows.first * p.row_bytes, *second = p.rows + rows.second * p.row_bytes;
    zero_tiles<M * N>();
    for (int64_t i = 0; i < columns.num_whole; ++i, first += TILE_BYTES, second += TILE_BYTES) {
        const char* from = columns.whole + i * TILE_STEPS * STEP_BYTES;
        fetch<N>(from + TILE_STEPS * STEP_BYTES);
        next.pull();
        add_tile_steps<M, N>(first, second, p.row_bytes, from);
    }
    if (columns.rest) add_tile_steps<M, N>(first, second, p.row_bytes, columns.rest);
    alignas(64) float sums[M * TILE_HEIGHT * N * W];
    store_tiles<M, N>(sums, N * W, TILE_HEIGHT);
    write_rows<N, Out>(p, rows.first, rows.height, output, sums);
    if constexpr (M == 2) write_rows<N, Out>(p, rows.second, rows.height, output, sums + TILE_HEIGHT * N * W);
}

// Outputs [output, end) of one panel, for all rows [first, end): tiles are of one height, so the last may begin before the one
// before it has ended.
template <class Out>
void run_panel(const Product& p, int64_t first_row, int64_t end_row, int64_t height, int64_t output, int64_t end,
               const Columns& panel) {
    const int64_t num_tiles = parts_of(end_row - first_row, height), last = end_row - height;
    const bool is_whole = output % PANEL_OUTPUTS == 0 && end - output > PIECE;
    const int64_t num_passes = num_tiles / 2 * (is_whole ? 2 : 1) + num_tiles % 2;
    NextPanel next(p, output / PANEL_OUTPUTS, num_tiles == 1 ? 0 : num_passes * panel.num_whole, false);
    for (int64_t tile = 0; tile < num_tiles; tile += 2) {
        const int64_t row = least(first_row + tile * height, last);
        const RowTiles rows{row, least(row + height, last), height};
        if (tile + 1 < num_tiles) {
            for (int64_t piece = output; piece < end; piece += PIECE) multiply<2, 2, Out>(p, rows, panel.from(piece), piece, next);
        } else if (is_whole) {
            multiply<1, 4, Out>(p, rows, panel.from(output), output, next);
        } else {
            multiply<1, 2, Out>(p, rows, panel.from(output), output, next);
        }
    }
}

template <class Out>
void run(const Product& p, int64_t first_row, int64_t end_row, int64_t first_piece, int64_t end_piece) {
    const int64_t num_rows = end_row - first_row, num_whole = p.num_steps / TILE_STEPS, num_rest = p.num_steps % TILE_STEPS;
    if (num_rows == 0) return;
    const int64_t height = parts_of(num_rows, parts_of(num_rows, TILE_HEIGHT)), end = least(end_piece * PIECE, p.num_outputs);
    const Tiles tiles(shapes(height));
    alignas(64) char rest[TILE_STEPS * STEP_BYTES] = {};
    for (int64_t output = first_piece * PIECE; output < end;) {
        const int64_t panel = output / PANEL_OUTPUTS, panel_end = least((panel + 1) * PANEL_OUTPUTS, end);
        const char* whole = reinterpret_cast<const char*>(p.panels + panel * p.panel_size());
        memcpy(rest, whole + num_whole * TILE_STEPS * STEP_BYTES, num_rest * STEP_BYTES);
        run_panel<Out>(p, first_row, end_row, height, output, panel_end, {whole, num_rest ? rest : nullptr, num_whole});
        output = panel_end;
    }
}

}  // namespace
