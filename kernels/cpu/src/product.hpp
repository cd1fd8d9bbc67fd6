// What is multiplied, and what do all ways to multiply it have in common?
#pragma once

#include "panels.hpp"

namespace {

using Pairs = Row<BFloat16>;

constexpr int64_t PANEL_OUTPUTS = 64;
constexpr int64_t PIECE = 32;  // outputs: what threads share out, half a panel

int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
int64_t parts_of(int64_t count, int64_t size) { return (count + size - 1) / size; }

struct Product {
    const char* rows;  // of Pairs, perhaps not aligned
    int64_t row_bytes, num_rows;
    const BFloat16* panels;
    int64_t num_steps, num_outputs;  // a step: two inputs
    const BFloat16* bias;            // or null
    void* out;

    int64_t panel_size() const { return num_steps * 2 * PANEL_OUTPUTS; }
};

// The panel that comes next, fetched bit by bit while this one is computed with: into the first cache, or only the second.
class NextPanel {
public:
    NextPanel(const Product& p, int64_t panel, int64_t num_pulls, bool is_near) : is_near_(is_near) {
        const bool is_last = (panel + 1) * PANEL_OUTPUTS >= p.num_outputs;
        if (num_pulls == 0 || is_last) return;
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

// A row's sums of outputs [output, output + count), as far as there are such outputs.
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

}  // namespace
