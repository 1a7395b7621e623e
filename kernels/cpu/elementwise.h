// RMSNorm and the gated activation, token by token.

#pragma once

#include "numbers.h"

namespace skerry {

#ifdef SKERRY_WIDE
// silu(g) · u
inline __m512 gated(__m512 g, __m512 u) {
    const __m512 one = _mm512_set1_ps(1);
    const __m512 e = exp2_negative(_mm512_mul_ps(_mm512_abs_ps(g), _mm512_set1_ps(-LOG2_E)));
    const __mmask16 positive = _mm512_cmp_ps_mask(g, _mm512_setzero_ps(), _CMP_GE_OQ);
    const __m512 above = _mm512_mask_mov_ps(e, positive, one);
    const __m512 sigmoid = _mm512_div_ps(above, _mm512_add_ps(one, e));
    return _mm512_mul_ps(_mm512_mul_ps(g, sigmoid), u);
}
#endif

void rms_norm(int64_t hidden, const float *x, const float *weight, float eps, float *out);
// gate_up [2·width], gate first → silu(gate) · up
void silu_mul(int64_t width, const float *gate_up, float *out);

}  // namespace skerry
