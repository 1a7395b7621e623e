// What all native CPU kernels share: the two number types, and whether this machine has the
// AVX-512 products of bfloat16 pairs.
//
// The kernels have a C interface; kernels/cpu/native.py calls them, kernels/cpu/build.py compiles
// them. Each does what its PyTorch reference in kernels/ does; the tests hold them equal. Numbers
// are float or bfloat16 (`dtype` 0 or 1) in memory and float in registers. Loops are plain, so
// that the compiler turns them into the machine's own vectors; where it cannot, there are AVX-512
// versions beside the plain ones.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#include <immintrin.h>
#define SKERRY_WIDE 1
#endif

namespace {

struct bf16 {
    uint16_t bits;
};

inline float load(float value) { return value; }
inline float load(bf16 value) {
    uint32_t wide = uint32_t(value.bits) << 16;
    float out;
    std::memcpy(&out, &wide, 4);
    return out;
}

inline void store(float &place, float value) { place = value; }
inline void store(bf16 &place, float value) {  // to nearest even; NaN stays NaN
    uint32_t wide;
    std::memcpy(&wide, &value, 4);
    uint32_t rounded = (wide + 0x7fff + ((wide >> 16) & 1)) >> 16;
    place.bits = value == value ? uint16_t(rounded) : uint16_t(0x7fc0);
}

inline float half_to_float(uint16_t half) {
    _Float16 value;
    std::memcpy(&value, &half, 2);
    return float(value);
}

// exp for x ≤ 0, relative error below 2e-7; below −87 the result is 0. NaN stays NaN.
inline float exp_negative(float x) {
    float shifted = x * 1.44269504088896341f;
    float whole = std::nearbyint(shifted);
    float f = x - whole * 0.693359375f + whole * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * f + 1.3981999507e-3f;
    p = p * f + 8.3334519073e-3f;
    p = p * f + 4.1665795894e-2f;
    p = p * f + 1.6666665459e-1f;
    p = p * f + 5.0000001201e-1f;
    p = p * f * f + f + 1.0f;
    int32_t exponent = int32_t(whole < -126.0f ? -126.0f : whole);
    uint32_t bits = uint32_t(exponent + 127) << 23;
    float scale;
    std::memcpy(&scale, &bits, 4);
    return x < -87.0f ? 0.0f : p * scale;
}

}  // namespace
