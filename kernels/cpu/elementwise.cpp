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
        const __m512 u = _mm512_maskz_loadu_ps(mask, up + i);
        _mm512_mask_storeu_ps(out + i, mask, gated(g, u));
    }
#else
    for (; i < width; ++i) {
        const float g = gate_up[i], e = exp2_negative(std::fabs(g) * -LOG2_E);
        out[i] = g * ((g >= 0 ? 1.0f : e) / (1.0f + e)) * up[i];
    }
#endif
}

}  // namespace skerry
