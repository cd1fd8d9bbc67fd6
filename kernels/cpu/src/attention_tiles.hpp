// How are the rows of a unit of attention multiplied with keys and values by the matrix unit?
//
// Panels lie as tiles want them: of keys 16 pairs of elements of 16 tokens, 64 bytes apart; of values the 8 pairs of a panel's
// tokens for 16 elements of the head. A unit's rows are in up to three tiles of one height; what comes out for rows that fill the
// last tile up is looked at by nobody.
#pragma once

#include "panels.hpp"
#include "tiles.hpp"

namespace {

// Tiles 0 to 3 are sums; 4 and 5 hold queries and keys, 6 and 7 weights and values.
class TileProducts {
public:
    TileProducts(int num_rows, int64_t head_size)
        : num_tiles_(tiles_of(num_rows)),
          height_(touched(num_rows) / num_tiles_),
          head_size_(head_size),
          key_pairs_(head_size % 32 ? 8 : 16),
          tiles_(shapes(height_, key_pairs_)) {}

    static int touched(int num_rows) {
        const int num_tiles = tiles_of(num_rows);
        return (num_rows + num_tiles - 1) / num_tiles * num_tiles;
    }

    void score(const Row<BFloat16>* queries, const BFloat16* const* panels, int num_panels, float* scores,
               Ahead& ahead) const {
        const int64_t stride = num_panels * PANEL;
        in_blocks(num_panels, [&](auto m, auto n, int panel) {
            zero_tiles<m.value * n.value>();
            for (int64_t step = 0; step * key_pairs_ * 2 < head_size_; ++step) {
                const int64_t at = step * key_pairs_;
                add_columns<m.value, n.value, 4, 5>(queries + at, head_size_ / 2, height_, TILE_BYTES,
                                                    [&](int i) { return panels[panel + i] + at * PANEL * 2; });
                ahead.pull(n.value * static_cast<int>(key_pairs_));
            }
            store_tiles<m.value, n.value>(scores + panel * PANEL, stride, height_);
        });
    }

    void mix(const Row<BFloat16>* weights, const BFloat16* const* panels, int num_panels, float* sums, bool adds,
             Ahead& ahead) const {
        in_blocks(static_cast<int>(head_size_ / 16), [&](auto m, auto n, int column) {
            float* to = sums + column * 16;
            if (adds) {
                load_tiles<m.value, n.value>(to, head_size_, height_);
            } else {
                zero_tiles<m.value * n.value>();
            }
            for (int64_t panel = 0; panel < num_panels; ++panel) {
                add_columns<m.value, n.value, 6, 7>(weights + panel * PANEL / 2, num_panels * PANEL / 2, height_,
                                                    head_size_ * 4, [&](int i) { return panels[panel] + (column + i) * 16 * 2; });
                ahead.pull(n.value * PANEL / 2);
            }
            store_tiles<m.value, n.value>(to, head_size_, height_);
        });
    }

private:
    static int tiles_of(int num_rows) { return (num_rows + TILE_HEIGHT - 1) / TILE_HEIGHT; }

    static TileShapes shapes(int64_t height, int64_t key_pairs) {
        TileShapes shapes;
        shapes.set(0, 3, height, TILE_BYTES);
        shapes.set(4, 4, height, key_pairs * 4);
        shapes.set(5, 5, key_pairs, TILE_BYTES);
        shapes.set(6, 6, height, PANEL * sizeof(BFloat16));
        shapes.set(7, 7, PANEL / 2, TILE_BYTES);
        return shapes;
    }

    // Calls body(Number<M>, Number<N>, first) for all M tiles of rows and N columns at a time that cover 0 to count.
    template <class Body>
    void in_blocks(int count, const Body& body) const {
        if (num_tiles_ == 1) in_columns<1, 4>(count, body);
        if (num_tiles_ == 2) in_columns<2, 2>(count, body);
        if (num_tiles_ == 3) in_columns<3, 1>(count, body);
    }

    template <int M, int N, class Body>
    static INLINE void in_columns(int count, const Body& body) {
        int first = 0;
        for (; first + N <= count; first += N) body(Number<M>(), Number<N>(), first);
        for (; first < count; ++first) body(Number<M>(), Number<1>(), first);
    }

    // The sums of M tiles of rows and N columns grow by one step of both.
    template <int M, int N, int A, int B, int Column = 0, class Place>
    static INLINE void add_columns(const Row<BFloat16>* rows, int64_t row_size, int64_t height, int64_t column_bytes,
                                   const Place& place) {
        load_tile<B>(place(Column), column_bytes);
        add_rows<M, N, A, B, Column>(rows, row_size, height);
        if constexpr (Column + 1 < N) add_columns<M, N, A, B, Column + 1>(rows, row_size, height, column_bytes, place);
    }

    template <int M, int N, int A, int B, int Column, int Tile = 0>
    static INLINE void add_rows(const Row<BFloat16>* rows, int64_t row_size, int64_t height) {
        if constexpr (M > 1 || Column == 0) load_tile<A>(rows + Tile * height * row_size, row_size * sizeof(*rows));
        multiply_add_tile<Tile * N + Column, A, B>();
        if constexpr (Tile + 1 < M) add_rows<M, N, A, B, Column, Tile + 1>(rows, row_size, height);
    }

    int num_tiles_;
    int64_t height_, head_size_, key_pairs_;
    Tiles tiles_;
};

}  // namespace
