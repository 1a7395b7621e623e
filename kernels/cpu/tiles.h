// Products of 4- and 8-bit blocks: two panels by up to eight tokens at a time, so that a weight that
// was loaded meets eight tokens and a token two weights. For one such group blocks are unpacked as
// they are needed; for many, panels once for a part of the tokens that stays in the second cache.

#pragma once

#include "elementwise.h"
#include "floats.h"

namespace skerry {

#ifdef SKERRY_INTEGER

constexpr int64_t KEPT_BLOCKS = 24;  // two panels of 30 KB

// Two panels that were unpacked before.
struct Kept {
    const Unpacked *own[2];
    void load() {}
    const Unpacked &at(int p) const { return *own[p]; }
    void move() { ++own[0], ++own[1]; }
};

// Panels that are unpacked now.
template <int KIND, int PANELS>
struct Passing {
    Unpacker<KIND> from[PANELS];
    Unpacked here[PANELS];
    void load() {
        for (int p = 0; p < PANELS; ++p) from[p].block(here[p]);
    }
    const Unpacked &at(int p) const { return here[p]; }
    void move() {}
};

// Of each block: part = Σ q·x; total = fma(float(part) · x's scale, d, total), and of 4-bit blocks
// total = fma(zero, x's sum, total). `ROWS` tokens of one group. EIGHT: of 8-bit blocks, whose
// numbers were made positive by adding 128.
template <bool EIGHT, int PANELS, int ROWS, typename Weight>
inline void tile(Weight weight, const Operands &x, int64_t token,
                 __m512 (&total)[PANELS][ROWS]) {
    const int64_t blocks = x.ins / BLOCK, group = token / GROUP, lane = token % GROUP;
    const int8_t *high = x.high + group * x.ins * GROUP + lane * 4;
    const int8_t *low = x.low + group * x.ins * GROUP + lane * 4;
    const int64_t first = group * blocks * GROUP + lane;
    const float *scales = x.scales + first, *sums = x.sums + first;
    const int32_t *offsets = x.offsets + first;
    const uint8_t *fine = x.fine + group * blocks;
    for (auto &panel : total)
        for (__m512 &one : panel) one = _mm512_setzero_ps();
    for (int64_t b = 0; b < blocks; ++b) {
        weight.load();
        __m512i part[PANELS][ROWS];
        for (auto &panel : part)
            for (__m512i &one : panel) one = _mm512_setzero_si512();
        auto meet = [&](const int8_t *bytes) {
#pragma GCC unroll 8
            for (int j = 0; j < 8; ++j)
#pragma GCC unroll 8
                for (int r = 0; r < ROWS; ++r) {
                    const __m512i four = _mm512_set1_epi32(read<int>(bytes + j * 32 + r * 4));
#pragma GCC unroll 2
                    for (int p = 0; p < PANELS; ++p)
                        part[p][r] = _mm512_dpbusd_epi32(part[p][r], weight.at(p).quads[j], four);
                }
        };
        meet(high);
        if (fine[b]) {
            for (auto &panel : part)
                for (__m512i &one : panel) one = _mm512_slli_epi32(one, 8);
            meet(low);
        }
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) {
            const __m512 scale = _mm512_set1_ps(scales[r]);
#pragma GCC unroll 2
            for (int p = 0; p < PANELS; ++p) {
                if (EIGHT) part[p][r] = _mm512_sub_epi32(part[p][r], _mm512_set1_epi32(offsets[r]));
                const __m512 value = _mm512_mul_ps(_mm512_cvtepi32_ps(part[p][r]), scale);
                total[p][r] = _mm512_fmadd_ps(value, weight.at(p).scales, total[p][r]);
                if (!EIGHT)
                    total[p][r] =
                        _mm512_fmadd_ps(weight.at(p).zeros, _mm512_set1_ps(sums[r]), total[p][r]);
            }
        }
        high += 32 * GROUP, low += 32 * GROUP, scales += GROUP, sums += GROUP, offsets += GROUP;
        weight.move();
    }
}

template <bool EIGHT, int PANELS, int ROWS, typename Weight>
void tile_of(const Panel *const *panels, const Weight &weight, const Operands &x, int64_t token,
             const Target &to) {
    __m512 total[PANELS][ROWS];
    tile<EIGHT, PANELS, ROWS>(weight, x, token, total);
    if constexpr (PANELS == 2)
        if (to.gated) {
            for (int r = 0; r < ROWS; ++r)
                finish(to, *panels[0], token + r, gated(total[0][r], total[1][r]));
            return;
        }
    for (int r = 0; r < ROWS; ++r)
        for (int p = 0; p < PANELS; ++p) finish(to, *panels[p], token + r, total[p][r]);
}

// `count` tokens of one group from `token`, at most all of it.
template <bool EIGHT, int PANELS, typename Weight>
void group_of(const Panel *const *panels, const Weight &weight, const Operands &x, int64_t token,
              int64_t count, const Target &to) {
    auto compute = [&](auto rows) {
        tile_of<EIGHT, PANELS, decltype(rows)::value>(panels, weight, x, token, to);
    };
    switch (count) {
        case 1: return compute(std::integral_constant<int, 1>());
        case 2: return compute(std::integral_constant<int, 2>());
        case 3: return compute(std::integral_constant<int, 3>());
        case 4: return compute(std::integral_constant<int, 4>());
        case 5: return compute(std::integral_constant<int, 5>());
        case 6: return compute(std::integral_constant<int, 6>());
        case 7: return compute(std::integral_constant<int, 7>());
        default: return compute(std::integral_constant<int, 8>());
    }
}

// One or two panels of one kind. `ahead`: see Unpacker.
template <int KIND, int PANELS>
void panels_of(const Panel *const *panels, int64_t ahead, const Operands &x, int64_t first,
               int64_t last, const Target &to, uint8_t *scratch) {
    constexpr bool EIGHT = KIND == Q8_0;
    const int64_t blocks = x.ins / BLOCK;
    Unpacked *weight = (Unpacked *)scratch;
    uint8_t *copies = (uint8_t *)(weight + 2 * blocks);
    Passing<KIND, PANELS> passing;
    for (int p = 0; p < PANELS; ++p) {
        uint8_t *copy = copies + p * blocks * 16 * block_bytes(KIND);
        passing.from[p] = Unpacker<KIND>(whole<KIND>(*panels[p], blocks, copy), ahead);
    }
    // Kept panels are a little quicker (measured), while they fit the first cache.
    if (last - first <= GROUP && (EIGHT || blocks > KEPT_BLOCKS))
        return group_of<EIGHT, PANELS>(panels, passing, x, first, last - first, to);
    for (int p = 0; p < PANELS; ++p)
        for (int64_t b = 0; b < blocks; ++b) passing.from[p].block(weight[p * blocks + b]);
    const Kept kept{{weight, weight + blocks}};
    for (; first < last; first += GROUP)  // `first` begins a group
        group_of<EIGHT, PANELS>(panels, kept, x, first, std::min(last - first, GROUP), to);
}

template <int PANELS>
void panels_product(const Panel *const *panels, int64_t ahead, const Operands &x, int64_t first,
                    int64_t last, const Target &to, uint8_t *scratch) {
    if (panels[0]->kind == Q8_0)
        panels_of<Q8_0, PANELS>(panels, ahead, x, first, last, to, scratch);
    else if (panels[0]->kind == Q4_0)
        panels_of<Q4_0, PANELS>(panels, ahead, x, first, last, to, scratch);
    else
        panels_of<Q4_1, PANELS>(panels, ahead, x, first, last, to, scratch);
}

#endif

}  // namespace skerry
