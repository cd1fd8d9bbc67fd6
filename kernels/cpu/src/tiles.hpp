// The processor's matrix unit (AMX): eight tiles of up to 16 rows of 64 bytes, and sums[M][N] += a[M][2K] b[K][2N] of bfloat16.
//
// Shapes of tiles belong to a thread, and so does their content, which the system has to keep while other threads run: whoever
// uses tiles holds `Tiles`, which sets their shapes and lets go of all at its end.
#pragma once

#include "vector.hpp"

namespace {

constexpr int TILE_BYTES = 64;  // of a row, at most: 16 sums, or 16 pairs
constexpr int TILE_HEIGHT = 16;

class TileShapes {
public:
    // All tiles from `first` to `last`.
    void set(int first, int last, int64_t num_rows, int64_t row_bytes) {
        for (int tile = first; tile <= last; ++tile) {
            num_rows_[tile] = static_cast<uint8_t>(num_rows);
            row_bytes_[tile] = static_cast<uint16_t>(row_bytes);
        }
    }

private:
    uint8_t palette_ = 1, start_row_ = 0, reserved_[14] = {};
    uint16_t row_bytes_[16] = {};
    uint8_t num_rows_[16] = {};
};
static_assert(sizeof(TileShapes) == 64, "as the processor reads them");

class Tiles {
public:
    explicit Tiles(const TileShapes& shapes) { asm volatile("ldtilecfg %0" : : "m"(shapes)); }
    ~Tiles() { asm volatile("tilerelease"); }
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;
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

// Tiles 0 to M * N - 1, N of them side by side, `height` rows each; `stride` sums from a row to the next.
template <int M, int N, int Tile = 0>
INLINE void load_tiles(const float* sums, int64_t stride, int64_t height) {
    load_tile<Tile>(sums + Tile / N * height * stride + Tile % N * 16, stride * sizeof(float));
    if constexpr (Tile + 1 < M * N) load_tiles<M, N, Tile + 1>(sums, stride, height);
}

template <int M, int N, int Tile = 0>
INLINE void store_tiles(float* sums, int64_t stride, int64_t height) {
    store_tile<Tile>(sums + Tile / N * height * stride + Tile % N * 16, stride * sizeof(float));
    if constexpr (Tile + 1 < M * N) store_tiles<M, N, Tile + 1>(sums, stride, height);
}

}  // namespace
