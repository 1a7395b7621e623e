// RMSNorm with the residual added, and the gated activation.

#include "numbers.h"

namespace {

template <typename T>
void add_rms_norm(int64_t tokens, int64_t hidden, const T *x, T *residual, const T *weight,
                  float eps, T *out, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && tokens > 8)
    for (int64_t token = 0; token < tokens; ++token) {
        T *row = residual + token * hidden;
        T *to = out + token * hidden;
        float sum = 0;
        if (x != nullptr) {
            const T *add = x + token * hidden;
#pragma omp simd
            for (int64_t i = 0; i < hidden; ++i) store(row[i], load(row[i]) + load(add[i]));
        }
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < hidden; ++i) sum += load(row[i]) * load(row[i]);
        float scale = 1.0f / std::sqrt(sum / float(hidden) + eps);
#pragma omp simd
        for (int64_t i = 0; i < hidden; ++i) store(to[i], load(row[i]) * scale * load(weight[i]));
    }
}

template <typename T>
void silu_mul(int64_t tokens, int64_t width, const T *gate_up, T *out, int threads) {
#pragma omp parallel for num_threads(threads) if (threads > 1 && tokens > 8)
    for (int64_t token = 0; token < tokens; ++token) {
        const T *gate = gate_up + token * 2 * width;
        const T *up = gate + width;
        T *to = out + token * width;
#pragma omp simd
        for (int64_t i = 0; i < width; ++i) {
            float g = load(gate[i]);
            float e = exp_negative(-std::fabs(g));
            float sigmoid = (g >= 0 ? 1.0f : e) / (1.0f + e);
            store(to[i], g * sigmoid * load(up[i]));
        }
    }
}

}  // namespace

extern "C" {

void skerry_add_rms_norm(int dtype, int64_t tokens, int64_t hidden, const void *x, void *residual,
                         const void *weight, float eps, void *out, int threads) {
    if (dtype)
        add_rms_norm(tokens, hidden, (const bf16 *)x, (bf16 *)residual, (const bf16 *)weight, eps,
                     (bf16 *)out, threads);
    else
        add_rms_norm(tokens, hidden, (const float *)x, (float *)residual, (const float *)weight,
                     eps, (float *)out, threads);
}

void skerry_silu_mul(int dtype, int64_t tokens, int64_t width, const void *gate_up, void *out,
                     int threads) {
    if (dtype)
        silu_mul(tokens, width, (const bf16 *)gate_up, (bf16 *)out, threads);
    else
        silu_mul(tokens, width, (const float *)gate_up, (float *)out, threads);
}

}  // extern "C"
