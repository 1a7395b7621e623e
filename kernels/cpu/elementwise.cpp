#include "elementwise.h"

namespace skerry {

void rms_norm(int64_t hidden, const float *x, const float *weight, float eps, float *out) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < hidden; ++i) sum += x[i] * x[i];
    const float scale = 1.0f / std::sqrt(sum / float(hidden) + eps);
    for (int64_t i = 0; i < hidden; ++i) out[i] = x[i] * scale * weight[i];
}

void silu_mul(int64_t width, const float *gate_up, float *out) {
    const float *up = gate_up + width;
    int64_t i = 0;
#ifdef SKERRY_WIDE
    for (; i < width; i += 16) {
        const __mmask16 mask = width - i >= 16 ? 0xffff : __mmask16((1u << (width - i)) - 1);
        const __m512 g = _mm512_maskz_loadu_ps(mask, gate_up + i);
        const __m512 u = _mm512_maskz_loadu_ps(mask, up + i), one = _mm512_set1_ps(1);
        const __m512 size = _mm512_mul_ps(_mm512_abs_ps(g), _mm512_set1_ps(-LOG2_E));
        const __m512 e = exp2_negative(size);
        const __mmask16 positive = _mm512_cmp_ps_mask(g, _mm512_setzero_ps(), _CMP_GE_OQ);
        const __m512 above = _mm512_mask_mov_ps(e, positive, one);
        const __m512 sigmoid = _mm512_div_ps(above, _mm512_add_ps(one, e));
        _mm512_mask_storeu_ps(out + i, mask, _mm512_mul_ps(_mm512_mul_ps(g, sigmoid), u));
    }
#else
    for (; i < width; ++i) {
        const float g = gate_up[i], e = exp2_negative(std::fabs(g) * -LOG2_E);
        out[i] = g * ((g >= 0 ? 1.0f : e) / (1.0f + e)) * up[i];
    }
#endif
}

}  // namespace skerry
