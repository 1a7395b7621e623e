// RMSNorm and the gated activation, token by token.

#pragma once

#include "numbers.h"

namespace skerry {

void rms_norm(int64_t hidden, const float *x, const float *weight, float eps, float *out);
// gate_up [2·width], gate first → silu(gate) · up
void silu_mul(int64_t width, const float *gate_up, float *out);

}  // namespace skerry
