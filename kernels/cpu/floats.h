// Products of weights as floats: of float32 models, and of weights that are stored as floats.

#pragma once

#include "unpack.h"

namespace skerry {

#ifdef SKERRY_WIDE

// Four sums of every fourth k each: one alone would wait for itself, and lose more to rounding.
template <int ROWS>
inline void float_rows(const float *weight, const Operands &x, int64_t token, __m512 *sums) {
    const float *values = x.values + token * x.ins;
    __m512 parts[ROWS][4];
    for (int r = 0; r < ROWS; ++r)
        for (int i = 0; i < 4; ++i) parts[r][i] = _mm512_setzero_ps();
    for (int64_t k = 0; k < x.ins; k += 4)
        for (int i = 0; i < 4; ++i) {
            const __m512 w = _mm512_loadu_ps(weight + (k + i) * 16);
            for (int r = 0; r < ROWS; ++r)
                parts[r][i] =
                    _mm512_fmadd_ps(w, _mm512_set1_ps(values[r * x.ins + k + i]), parts[r][i]);
        }
    for (int r = 0; r < ROWS; ++r)
        sums[r] = _mm512_add_ps(_mm512_add_ps(parts[r][0], parts[r][1]),
                                _mm512_add_ps(parts[r][2], parts[r][3]));
}

using Lanes = __m512;

#else

struct Lanes {
    float at[16];
};

template <int ROWS>
inline void float_rows(const float *weight, const Operands &x, int64_t token, Lanes *sums) {
    const float *values = x.values + token * x.ins;
    for (int r = 0; r < ROWS; ++r) {
        Lanes parts[4] = {};
        for (int64_t k = 0; k < x.ins; ++k)
            for (int i = 0; i < 16; ++i)
                parts[k % 4].at[i] += weight[k * 16 + i] * values[r * x.ins + k];
        for (int i = 0; i < 16; ++i)
            sums[r].at[i] = (parts[0].at[i] + parts[1].at[i]) + (parts[2].at[i] + parts[3].at[i]);
    }
}

#endif

#ifdef SKERRY_WIDE
inline void finish(const Target &to, const Panel &panel, int64_t token, __m512 sums) {
    const __mmask16 mask = __mmask16((1u << panel.count) - 1);
    float *y = to.y + token * to.stride + panel.first;
    if (to.bias != nullptr)
        sums = _mm512_add_ps(sums, _mm512_maskz_loadu_ps(mask, to.bias + panel.first));
    if (to.add) sums = _mm512_add_ps(_mm512_maskz_loadu_ps(mask, y), sums);
    _mm512_mask_storeu_ps(y, mask, sums);
}
#else
inline void finish(const Target &to, const Panel &panel, int64_t token, const Lanes &sums) {
    float *y = to.y + token * to.stride + panel.first;
    for (int64_t i = 0; i < panel.count; ++i) {
        float value = sums.at[i];
        if (to.bias != nullptr) value = value + to.bias[panel.first + i];
        y[i] = to.add ? y[i] + value : value;
    }
}
#endif

// Each computes that many tokens from the one given.
template <typename Four, typename Two, typename One>
void go_through(int64_t first, int64_t last, const Panel &panel, const Target &to, Four four,
                Two two, One one) {
    Lanes sums[4];
    for (int64_t token = first; token < last;) {
        int64_t left = last - token, count = left >= 4 ? 4 : left >= 2 ? 2 : 1;
        if (count == 4)
            four(token, sums);
        else if (count == 2)
            two(token, sums);
        else
            one(token, sums);
        for (int64_t r = 0; r < count; ++r) finish(to, panel, token + r, sums[r]);
        token += count;
    }
}

template <int KIND>
void panel_floats(const Panel &panel, const Operands &x, int64_t first, int64_t last,
                  const Target &to, uint8_t *scratch) {
    float *weight = (float *)scratch;
    unpack_floats<KIND>(panel, x.ins, weight);
    go_through(
        first, last, panel, to,
        [&](int64_t t, Lanes *s) { float_rows<4>(weight, x, t, s); },
        [&](int64_t t, Lanes *s) { float_rows<2>(weight, x, t, s); },
        [&](int64_t t, Lanes *s) { float_rows<1>(weight, x, t, s); });
}

inline void panel_product(const Panel &panel, const Operands &x, int64_t first, int64_t last,
                          const Target &to, uint8_t *scratch) {
    if (panel.kind == Q8_0) return panel_floats<Q8_0>(panel, x, first, last, to, scratch);
    if (panel.kind == Q4_0) return panel_floats<Q4_0>(panel, x, first, last, to, scratch);
    if (panel.kind == Q4_1) return panel_floats<Q4_1>(panel, x, first, last, to, scratch);
    if (panel.kind == F32) return panel_floats<F32>(panel, x, first, last, to, scratch);
    if (panel.kind == F16) return panel_floats<F16>(panel, x, first, last, to, scratch);
    panel_floats<BF16>(panel, x, first, last, to, scratch);
}

}  // namespace skerry
