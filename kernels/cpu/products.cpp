// Products of a few rows with weights kept in GGUF's blocks.
//
// y[m][n] = Σ_k x[m][k] · w[n][k], w in blocks of 32: Q8_0 (d, 32 × int8: d·q),
// Q4_0 (d, 16 bytes: d·(q−8)), Q4_1 (d, m, 16 bytes: d·q + m); low nibbles are the first half.
// Per block: d · Σ x·q + zero · Σ x, the sums of x taken once per product.

#include "numbers.h"

namespace {

enum Kind { Q8_0 = 0, Q4_0 = 1, Q4_1 = 2 };

constexpr int64_t block_bytes(int kind) { return kind == Q8_0 ? 34 : kind == Q4_0 ? 18 : 20; }

#ifdef SKERRY_WIDE

// ROWS tokens at a time. x as bf16 is exact: it is what the model computes in.
template <int KIND, int ROWS>
void block_rows(int64_t first, int64_t last, int64_t outs, int64_t blocks, const uint16_t *x,
                const float *sums, const uint8_t *weight, bf16 *y) {
    // bf16 of 0 … 15, twice
    const __m512i table = _mm512_set_epi16(
        0x4170, 0x4160, 0x4150, 0x4140, 0x4130, 0x4120, 0x4110, 0x4100, 0x40e0, 0x40c0, 0x40a0,
        0x4080, 0x4040, 0x4000, 0x3f80, 0, 0x4170, 0x4160, 0x4150, 0x4140, 0x4130, 0x4120, 0x4110,
        0x4100, 0x40e0, 0x40c0, 0x40a0, 0x4080, 0x4040, 0x4000, 0x3f80, 0);
    const __m256i low = _mm256_set1_epi16(15);
    constexpr int64_t size = block_bytes(KIND);
    for (int64_t n = first; n < last; ++n) {
        const uint8_t *block = weight + n * blocks * size;
        __m512 total[ROWS];
        float offset[ROWS];
        for (int m = 0; m < ROWS; ++m) total[m] = _mm512_setzero_ps(), offset[m] = 0;
        for (int64_t b = 0; b < blocks; ++b, block += size) {
            uint16_t half;
            std::memcpy(&half, block, 2);
            float scale = _cvtsh_ss(half);
            __m512 grid = _mm512_set1_ps(scale);
            __m512i values;
            if (KIND == Q8_0) {
                __m256i bytes = _mm256_loadu_si256((const __m256i *)(block + 2));
                __m512 a = _mm512_cvtepi32_ps(
                    _mm512_cvtepi8_epi32(_mm256_castsi256_si128(bytes)));
                __m512 c = _mm512_cvtepi32_ps(
                    _mm512_cvtepi8_epi32(_mm256_extracti128_si256(bytes, 1)));
                values = (__m512i)_mm512_cvtne2ps_pbh(c, a);
            } else {
                __m256i words = _mm256_cvtepu8_epi16(
                    _mm_loadu_si128((const __m128i *)(block + size - 16)));
                __m512i both = _mm512_inserti64x4(
                    _mm512_castsi256_si512(_mm256_and_si256(words, low)),
                    _mm256_srli_epi16(words, 4), 1);
                values = _mm512_permutexvar_epi16(both, table);
            }
            float zero = 0;
            if (KIND == Q4_0) zero = -8 * scale;
            if (KIND == Q4_1) {
                std::memcpy(&half, block + 2, 2);
                zero = _cvtsh_ss(half);
            }
            for (int m = 0; m < ROWS; ++m) {
                __m512i own = _mm512_loadu_si512(x + (m * blocks + b) * 32);
                __m512 part = _mm512_dpbf16_ps(_mm512_setzero_ps(), (__m512bh)values,
                                               (__m512bh)own);
                total[m] = _mm512_fmadd_ps(part, grid, total[m]);
                if (KIND != Q8_0) offset[m] += zero * sums[m * blocks + b];
            }
        }
        for (int m = 0; m < ROWS; ++m)
            store(y[m * outs + n], _mm512_reduce_add_ps(total[m]) + offset[m]);
    }
}

#else

template <int KIND, int ROWS>
void block_rows(int64_t first, int64_t last, int64_t outs, int64_t blocks, const uint16_t *x,
                const float *sums, const uint8_t *weight, bf16 *y) {
    constexpr int64_t size = block_bytes(KIND);
    const bf16 *own = reinterpret_cast<const bf16 *>(x);
    for (int64_t n = first; n < last; ++n) {
        const uint8_t *block = weight + n * blocks * size;
        float total[ROWS] = {0};
        for (int64_t b = 0; b < blocks; ++b, block += size) {
            uint16_t half;
            std::memcpy(&half, block, 2);
            float scale = half_to_float(half), zero = KIND == Q4_0 ? -8 * scale : 0;
            if (KIND == Q4_1) {
                std::memcpy(&half, block + 2, 2);
                zero = half_to_float(half);
            }
            float values[32];
            const uint8_t *bytes = block + (KIND == Q8_0 ? 2 : size - 16);
            for (int i = 0; i < 16; ++i) {
                values[i] = KIND == Q8_0 ? float(int8_t(bytes[i])) : float(bytes[i] & 15);
                values[i + 16] = KIND == Q8_0 ? float(int8_t(bytes[i + 16])) : float(bytes[i] >> 4);
            }
            for (int m = 0; m < ROWS; ++m) {
                float sum = 0;
#pragma omp simd reduction(+ : sum)
                for (int i = 0; i < 32; ++i)
                    sum += values[i] * load(own[(m * blocks + b) * 32 + i]);
                total[m] += scale * sum + zero * sums[m * blocks + b];
            }
        }
        for (int m = 0; m < ROWS; ++m) store(y[m * outs + n], total[m]);
    }
}

#endif

template <int KIND, int ROWS>
void block_product(int64_t outs, int64_t blocks, const uint16_t *x, const float *sums,
                   const uint8_t *weight, bf16 *y, int threads) {
    const int64_t step = (outs + threads * 4 - 1) / (threads * 4);
#pragma omp parallel for num_threads(threads) if (threads > 1) schedule(dynamic)
    for (int64_t first = 0; first < outs; first += step)
        block_rows<KIND, ROWS>(first, std::min(first + step, outs), outs, blocks, x, sums, weight,
                               y);
}

template <int KIND>
void block_linear(int64_t tokens, int64_t outs, int64_t ins, const bf16 *x, const uint8_t *weight,
                  bf16 *y, int threads) {
    const int64_t blocks = ins / 32;
    std::vector<float> sums(tokens * blocks);
    for (int64_t i = 0; i < tokens * blocks; ++i) {
        float sum = 0;
#pragma omp simd reduction(+ : sum)
        for (int64_t k = 0; k < 32; ++k) sum += load(x[i * 32 + k]);
        sums[i] = sum;
    }
    const uint16_t *raw = reinterpret_cast<const uint16_t *>(x);
    for (int64_t m = 0; m < tokens;) {
        const uint16_t *rows = raw + m * ins;
        const float *own = sums.data() + m * blocks;
        bf16 *to = y + m * outs;
        int64_t left = tokens - m;
        if (left >= 8) {
            block_product<KIND, 8>(outs, blocks, rows, own, weight, to, threads), m += 8;
        } else if (left >= 4) {
            block_product<KIND, 4>(outs, blocks, rows, own, weight, to, threads), m += 4;
        } else if (left >= 2) {
            block_product<KIND, 2>(outs, blocks, rows, own, weight, to, threads), m += 2;
        } else {
            block_product<KIND, 1>(outs, blocks, rows, own, weight, to, threads), m += 1;
        }
    }
}

}  // namespace

extern "C" {

void skerry_block_linear(int kind, int64_t tokens, int64_t outs, int64_t ins, const void *x,
                         const void *weight, void *y, int threads) {
    const bf16 *from = (const bf16 *)x;
    const uint8_t *bytes = (const uint8_t *)weight;
    bf16 *to = (bf16 *)y;
    if (kind == Q8_0)
        block_linear<Q8_0>(tokens, outs, ins, from, bytes, to, threads);
    else if (kind == Q4_0)
        block_linear<Q4_0>(tokens, outs, ins, from, bytes, to, threads);
    else
        block_linear<Q4_1>(tokens, outs, ins, from, bytes, to, threads);
}

}  // extern "C"
