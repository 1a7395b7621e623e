// Products of tokens with a weight that stays in the form, and at the place, it is stored in.

#pragma once

#include "team.h"

namespace skerry {

enum Kind { Q8_0 = 0, Q4_0 = 1, Q4_1 = 2, F32 = 3, F16 = 4, BF16 = 5 };

constexpr int64_t BLOCK = 32;  // values that share a scale; all column counts are multiples of it

constexpr int64_t block_bytes(int kind) {
    return kind == Q8_0 ? 34 : kind == Q4_0 ? 18 : kind == Q4_1 ? 20 : kind == F32 ? 128 : 64;
}

// Up to 16 rows of a weight: the first row of each and the bytes to the next one.
struct Panel {
    const uint8_t *base;
    int64_t stride;
    int64_t kind, first, count;  // the columns of the result: first … first + count − 1
};

struct Product {
    const Panel *panels;
    int64_t panel_count, outs, ins;
    const float *bias;  // [outs] or null
    int64_t exact;      // all panels as floats; else 4- and 8-bit blocks as integers
    int64_t alike;      // all panels are such blocks, of one kind
};

// What products take in. Integers: of each block of 32, x ≈ scale · (256·high + low), the scale being
// that of the largest. A block whose largest exceeds OUTLIER times the root mean square of its row
// has 16 bits; the others have 8, their low part is zero. Integers lie in groups of 8 tokens, which
// are multiplied at once: the low parts only of blocks that are fine for one of them.
struct Operands {
    float *values;         // [tokens, ins]
    int8_t *high, *low;    // [tokens / 8, ins / 4, 8, 4]
    float *scales, *sums;  // [tokens / 8, ins / 32, 8]; sums: scale · Σ (256·high + low)
    int32_t *offsets;      // the same: 128 · Σ (256·high + low)
    uint8_t *fine;         // [tokens / 8, ins / 32]; where 0, scales are 256 times as large, offsets
                           // 256 times as small, and `low` holds nothing
    int64_t ins;
};

constexpr int64_t GROUP = 8;

constexpr int64_t operand_bytes(int64_t tokens, int64_t ins) {
    return (tokens + GROUP - 1) / GROUP * GROUP * (ins * 6 + ins / BLOCK * 13) + 64;
}
Operands operands_at(uint8_t *memory, int64_t tokens, int64_t ins);

// Fill the integers of the tokens first … last − 1 of one group, from their values.
void to_integers(const Operands &x, int64_t first, int64_t last);

// Bytes that `multiply` needs for each thread.
int64_t panel_bytes(const Product &product);

// Where a product goes: y[token][out] = x · w (+ bias), or y += that. `y` has a distance of `stride`
// between tokens. Gated: y[token][out] = silu(x · gate) · (x · up) of the two halves of w.
struct Target {
    float *y;
    int64_t stride;
    const float *bias;
    bool add, gated;
};

// One phase of the board; `scratch` belongs to the calling thread alone.
void multiply(Board &board, const Product &product, const Operands &x, int64_t tokens,
              const Target &to, uint8_t *scratch);

// Whether `multiply` can gate what it computes.
inline bool gates(const Product &product) {
    return product.alike && !product.exact && product.bias == nullptr && product.outs % 32 == 0;
}

// The numbers of stored row `row`, as floats.
void decode_row(int kind, const uint8_t *row, int64_t columns, float *out);

}  // namespace skerry
