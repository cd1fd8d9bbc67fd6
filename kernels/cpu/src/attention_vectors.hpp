// How are the rows of a unit of attention multiplied with keys and values by vectors?
#pragma once

#include "panels.hpp"

namespace {

template <class T>
class VectorProducts {
public:
    VectorProducts(int num_rows, int64_t head_size) : num_rows_(num_rows), head_size_(head_size) {}

    // Rows that it reads and writes: as many as a unit has, or more.
    static int touched(int num_rows) { return num_rows; }

    // scores[row][token] = queries[row] . key, for all tokens of the panels.
    void score(const Row<T>* queries, const T* const* panels, int num_panels, float* scores, Ahead& ahead) const {
        constexpr int PARTS = PANEL / W;
        const int64_t row_size = head_size_ / E<T>, stride = num_panels * PANEL;
        in_vectors(num_panels * PARTS, [&](auto n, int vector) {
            const T* keys[n.value];
            for (int i = 0; i < n.value; ++i) keys[i] = panels[(vector + i) / PARTS] + (vector + i) % PARTS * W * E<T>;
            in_rows<MAX_ROWS>(num_rows_, [&](auto m, int row) {
                ::score<T, m.value, n.value>(queries + row * row_size, row_size, keys, row_size, scores + row * stride + vector * W,
                                             stride, ahead);
            });
        });
    }

    // sums[row] (+)= weights[row] . values
    void mix(const Row<T>* weights, const T* const* panels, int num_panels, float* sums, bool adds, Ahead& ahead) const {
        const int64_t row_size = num_panels * PANEL / E<T>;
        in_vectors(static_cast<int>(head_size_ / W), [&](auto n, int vector) {
            in_rows<MAX_ROWS>(num_rows_, [&](auto m, int row) {
                ::mix<T, m.value, n.value>(weights + row * row_size, row_size, panels, num_panels, head_size_, vector * W,
                                           sums + row * head_size_, adds, ahead);
            });
        });
    }

private:
    int num_rows_;
    int64_t head_size_;
};

}  // namespace
