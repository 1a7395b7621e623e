// Products of 4- and 8-bit blocks: two panels by up to eight tokens at a time, so that a weight that
// was loaded meets eight tokens and a token two weights. Panels are unpacked once for a part of the
// tokens that stays in the second cache.

#pragma once

#include "elementwise.h"
#include "floats.h"

namespace skerry {

#ifdef SKERRY_INTEGER

// Of each block: part = Σ q·x; total = fma(float(part) · x's scale, d, total), and of 4-bit blocks
// total = fma(zero, x's sum, total). `ROWS` tokens of one group. EIGHT: of 8-bit blocks, whose
// numbers were made positive by adding 128.
template <bool EIGHT, int PANELS, int ROWS>
inline void tile(const Unpacked *weight, int64_t to_next, const Operands &x, int64_t token,
                 __m512 (&total)[PANELS][ROWS]) {
    const int64_t blocks = x.ins / BLOCK, group = token / GROUP, lane = token % GROUP;
    const int8_t *high = x.high + group * x.ins * GROUP + lane * 4;
    const int8_t *low = x.low + group * x.ins * GROUP + lane * 4;
    const int64_t first = group * blocks * GROUP + lane;
    const float *scales = x.scales + first, *sums = x.sums + first;
    const int32_t *offsets = x.offsets + first;
    const uint8_t *fine = x.fine + group * blocks;
    const Unpacked *own[2] = {weight, weight + to_next};
    for (auto &panel : total)
        for (__m512 &one : panel) one = _mm512_setzero_ps();
    for (int64_t b = 0; b < blocks; ++b) {
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
                        part[p][r] = _mm512_dpbusd_epi32(part[p][r], own[p]->quads[j], four);
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
                total[p][r] = _mm512_fmadd_ps(value, own[p]->scales, total[p][r]);
                if (!EIGHT)
                    total[p][r] =
                        _mm512_fmadd_ps(own[p]->zeros, _mm512_set1_ps(sums[r]), total[p][r]);
            }
        }
        high += 32 * GROUP, low += 32 * GROUP, scales += GROUP, sums += GROUP, offsets += GROUP;
        ++own[0], ++own[1];
    }
}

template <bool EIGHT, int PANELS, int ROWS>
void tile_of(const Panel *const *panels, const Unpacked *weight, int64_t to_next, const Operands &x,
             int64_t token, const Target &to) {
    __m512 total[PANELS][ROWS];
    tile<EIGHT, PANELS, ROWS>(weight, to_next, x, token, total);
    if constexpr (PANELS == 2)
        if (to.gated) {
            for (int r = 0; r < ROWS; ++r)
                finish(to, *panels[0], token + r, gated(total[0][r], total[1][r]));
            return;
        }
    for (int r = 0; r < ROWS; ++r)
        for (int p = 0; p < PANELS; ++p) finish(to, *panels[p], token + r, total[p][r]);
}

template <bool EIGHT, int PANELS>
void tiles(const Panel *const *panels, const Unpacked *weight, int64_t to_next, const Operands &x,
           int64_t first, int64_t last, const Target &to) {
    for (; first < last; first += GROUP) {  // `first` begins a group
        auto compute = [&](auto rows) {
            tile_of<EIGHT, PANELS, decltype(rows)::value>(panels, weight, to_next, x, first, to);
        };
        switch (std::min(last - first, GROUP)) {
            case 1: compute(std::integral_constant<int, 1>()); break;
            case 2: compute(std::integral_constant<int, 2>()); break;
            case 3: compute(std::integral_constant<int, 3>()); break;
            case 4: compute(std::integral_constant<int, 4>()); break;
            case 5: compute(std::integral_constant<int, 5>()); break;
            case 6: compute(std::integral_constant<int, 6>()); break;
            case 7: compute(std::integral_constant<int, 7>()); break;
            default: compute(std::integral_constant<int, 8>());
        }
    }
}

inline void unpack_panel(const Panel &panel, int64_t blocks, Unpacked *out, uint8_t *copy) {
    if (panel.kind == Q8_0)
        unpack<Q8_0>(whole<Q8_0>(panel, blocks, copy), blocks, out);
    else if (panel.kind == Q4_0)
        unpack<Q4_0>(whole<Q4_0>(panel, blocks, copy), blocks, out);
    else
        unpack<Q4_1>(whole<Q4_1>(panel, blocks, copy), blocks, out);
}

// One or two panels of blocks, of the same number of bits.
template <int PANELS>
void panels_product(const Panel *const *panels, const Operands &x, int64_t first, int64_t last,
                    const Target &to, uint8_t *scratch) {
    const int64_t blocks = x.ins / BLOCK;
    Unpacked *weight = (Unpacked *)scratch;
    for (int p = 0; p < PANELS; ++p)
        unpack_panel(*panels[p], blocks, weight + p * blocks, (uint8_t *)(weight + 2 * blocks));
    if (panels[0]->kind == Q8_0)
        tiles<true, PANELS>(panels, weight, blocks, x, first, last, to);
    else
        tiles<false, PANELS>(panels, weight, blocks, x, first, last, to);
}

#endif

}  // namespace skerry
