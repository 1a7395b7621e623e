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
};

// What products take in. Integers: of each block of 32, x ≈ scale · (256·high + low), with
// 16 bits in all: the scale is that of the largest, so the error is below 2⁻¹⁶ of it. They lie in
// groups of 8 tokens, which are multiplied at once.
struct Operands {
    float *values;         // [tokens, ins]
    int8_t *high, *low;    // [tokens / 8, ins / 4, 8, 4]
    float *scales, *sums;  // [tokens / 8, ins / 32, 8]; sums: scale · Σ (256·high + low)
    int32_t *offsets;      // the same: 128 · Σ (256·high + low)
    int64_t ins;
};

constexpr int64_t GROUP = 8;

constexpr int64_t operand_bytes(int64_t tokens, int64_t ins) {
    return (tokens + GROUP - 1) / GROUP * GROUP * (ins * 6 + ins / BLOCK * 12) + 64;
}
Operands operands_at(uint8_t *memory, int64_t tokens, int64_t ins);

// Fill the integers of one token from its values.
void to_integers(const Operands &x, int64_t token);

// Bytes that `multiply` needs for each thread.
int64_t panel_bytes(const Product &product);

// y[token][out] = x · w (+ bias), or y += that. `y` has a distance of `stride` between tokens.
// One phase of the board; `scratch` belongs to the calling thread alone.
void multiply(Board &board, const Product &product, const Operands &x, int64_t tokens, float *y,
              int64_t stride, bool add, uint8_t *scratch);

// The numbers of stored row `row`, as floats.
void decode_row(int kind, const uint8_t *row, int64_t columns, float *out);

}  // namespace skerry
