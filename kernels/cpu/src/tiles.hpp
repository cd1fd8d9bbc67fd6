// The processor's matrix unit (AMX): eight tiles of up to 16 rows of 64 bytes, and sums[M][N] += a[M][2K] b[K][2N] of bfloat16.
//
// Shapes of tiles belong to a thread, and so does their content, which the system has to keep while other threads run: whoever
// uses tiles holds `Tiles`, which sets their shapes and lets go of all at its end.
#pragma once

#include "vector.hpp"

namespace {

constexpr int TILE_BYTES = 64;  // of a row, at most: 16 sums, or 16 pairs
constexpr int TILE_HEIGHT = 16;

// Tiles 0 to 3 are sums, 4 and 5 hold rows (a), 6 and 7 columns (b).
class Tiles {
public:
    Tiles(int64_t num_rows, int64_t num_pairs) {
        Shapes shapes = {};
        shapes.palette = 1;
        for (int tile = 0; tile < 4; ++tile) shapes.set(tile, num_rows, TILE_BYTES);
        for (int tile = 4; tile < 6; ++tile) shapes.set(tile, num_rows, num_pairs * 4);
        for (int tile = 6; tile < 8; ++tile) shapes.set(tile, num_pairs, TILE_BYTES);
        asm volatile("ldtilecfg %0" : : "m"(shapes));
    }
    ~Tiles() { asm volatile("tilerelease"); }
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;

private:
    struct Shapes {
        uint8_t palette, start_row, reserved[14];
        uint16_t row_bytes[16];
        uint8_t num_rows[16];

        void set(int tile, int64_t rows, int64_t bytes) {
            num_rows[tile] = static_cast<uint8_t>(rows);
            row_bytes[tile] = static_cast<uint16_t>(bytes);
        }
    };
};

template <int Tile>
INLINE void zero_tile() {
    asm volatile("tilezero %%tmm%c0" : : "i"(Tile));
}

template <int Count, int Tile = 0>
INLINE void zero_tiles() {
    zero_tile<Tile>();
    if constexpr (Tile + 1 < Count) zero_tiles<Count, Tile + 1>();
}

template <int Tile>
INLINE void load_tile(const void* from, int64_t row_bytes) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(row_bytes), "i"(Tile) : "memory");
}

template <int Tile>
INLINE void store_tile(void* to, int64_t row_bytes) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(row_bytes), "i"(Tile) : "memory");
}

template <int Sums, int A, int B>
INLINE void multiply_add_tile() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(Sums), "i"(A), "i"(B));
}

// Tiles 0 to M * N - 1, N side by side, `stride` sums from a row to the next.
template <int M, int N, int Tile = 0>
INLINE void store_tiles(float* sums, int64_t stride) {
    store_tile<Tile>(sums + Tile / N * TILE_HEIGHT * stride + Tile % N * 16, stride * sizeof(float));
    if constexpr (Tile + 1 < M * N) store_tiles<M, N, Tile + 1>(sums, stride);
}

}  // namespace
