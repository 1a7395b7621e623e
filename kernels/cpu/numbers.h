// What all native CPU kernels share: number types, small vector helpers, exp.
//
// The kernels have a C interface (interface.cpp); kernels/cpu/native.py calls it, kernels/cpu/build.py
// compiles it. Each does what its PyTorch reference in kernels/ does; the tests hold them equal.
// KV is float or bfloat16 in memory (`kv_bf16`), everything else is float.
//
// The rule of this folder: what a token's numbers become depends on that token and its sequence
// alone. Every sum has one order, given by positions and columns, whatever the number of other
// rows, of threads, or of tokens computed at a time. So no loop here picks another order by size,
// and the compiler may not fuse multiplications and additions as it likes (-ffp-contract=off).

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#include <immintrin.h>
#define SKERRY_WIDE 1
#if defined(__AVX512VNNI__)
#define SKERRY_INTEGER 1  // products of bytes
#endif
#if defined(__AVX512BF16__)
#define SKERRY_PAIRS 1  // products of bfloat16 pairs
#endif
#endif

namespace skerry {

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

template <typename T>
inline T read(const void *from) {  // any alignment
    T value;
    std::memcpy(&value, from, sizeof(T));
    return value;
}

// 2^x for x ≤ 0, relative error below 2e-7; below −126 the result is 0. NaN stays NaN.
inline float exp2_negative(float x) {
    float whole = std::nearbyint(x), f = x - whole;
    float p = 1.5353362e-4f;
    p = p * f + 1.3398874e-3f;
    p = p * f + 9.6184373e-3f;
    p = p * f + 5.5503324e-2f;
    p = p * f + 2.4022648e-1f;
    p = p * f + 6.9314720e-1f;
    p = p * f + 1.0f;
    int32_t exponent = whole >= -126.0f ? int32_t(whole) : -126;
    uint32_t bits = uint32_t(exponent + 127) << 23;
    float scale;
    std::memcpy(&scale, &bits, 4);
    return x < -126.0f ? 0.0f : p * scale;
}

constexpr float LOG2_E = 1.44269504088896341f;

#ifdef SKERRY_WIDE

inline __m512 exp2_negative(__m512 x) {
    x = _mm512_max_ps(_mm512_set1_ps(-150.0f), x);  // of (a, NaN) the NaN is taken
    __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 f = _mm512_sub_ps(x, whole);
    __m512 p = _mm512_set1_ps(1.5353362e-4f);
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.3398874e-3f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(9.6184373e-3f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.5503324e-2f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.4022648e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.9314720e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, whole);
}

// 16 rows of 16 four-byte elements, in place.
inline void transpose(__m512i (&v)[16]) {
    __m512i t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        v[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        v[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        v[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        v[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int i = 0; i < 4; ++i) {
        t[i] = _mm512_shuffle_i32x4(v[i], v[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(v[i], v[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(v[i + 8], v[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(v[i + 8], v[i + 12], 0xdd);
    }
    for (int i = 0; i < 4; ++i) {
        v[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        v[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
        v[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
        v[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
    }
}

#endif

}  // namespace skerry
