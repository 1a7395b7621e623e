// Activations as integers: what products of 4- and 8-bit blocks take in.

#include "products.h"

namespace skerry {

namespace {

constexpr float LARGEST = 32512;  // its high part is 127, its low part fits a signed byte
// Outliers are what rounding to 8 bits suffers from: a block's step follows its largest. At 5 a tenth
// of the blocks are fine, and the logits of a small model nearer to those in floats than bf16 gives.
constexpr float OUTLIER = 5;

}  // namespace

Operands operands_at(uint8_t *memory, int64_t tokens, int64_t ins) {
    Operands x;
    tokens = (tokens + GROUP - 1) / GROUP * GROUP;
    const int64_t blocks = tokens * (ins / BLOCK);
    x.ins = ins;
    x.values = (float *)memory;
    x.scales = x.values + tokens * ins;
    x.sums = x.scales + blocks;
    x.offsets = (int32_t *)(x.sums + blocks);
    x.high = (int8_t *)(x.offsets + blocks);
    x.low = x.high + tokens * ins;
    x.fine = (uint8_t *)(x.low + tokens * ins);
    return x;
}

#ifdef SKERRY_INTEGER

namespace {

// 32 integers: 256·high + low.
struct Bytes {
    __m256i high, low;
    bool fine;
};

// A block of a row whose mean square is `square`; its place among the scales is `own`.
inline Bytes integers_of(const Operands &x, const float *values, float square, int64_t own) {
    const __m512 limit = _mm512_set1_ps(LARGEST);
    const __m512 v[2] = {_mm512_loadu_ps(values), _mm512_loadu_ps(values + 16)};
    const __m512 sizes = _mm512_max_ps(_mm512_abs_ps(v[0]), _mm512_abs_ps(v[1]));
    const float largest = _mm512_reduce_max_ps(sizes);
    const __mmask16 poison = _mm512_fpclass_ps_mask(v[0], 0x99) |  // NaN or infinite
                             _mm512_fpclass_ps_mask(v[1], 0x99);
    const bool fine = largest * largest > OUTLIER * OUTLIER * square;
    const float inverse = largest > 1e-30f && !poison ? LARGEST / largest : 0.0f;
    __m256i half[2];
    for (int i = 0; i < 2; ++i) {
        __m512 scaled = _mm512_mul_ps(v[i], _mm512_set1_ps(inverse));
        scaled = _mm512_min_ps(limit, _mm512_max_ps(_mm512_sub_ps(_mm512_setzero_ps(), limit),
                                                    scaled));
        if (!fine) scaled = _mm512_mul_ps(scaled, _mm512_set1_ps(1.0f / 256));
        half[i] = _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(scaled));
    }
    __m512i words = _mm512_inserti64x4(_mm512_castsi256_si512(half[0]), half[1], 1);
    if (!fine) words = _mm512_slli_epi16(words, 8);
    const int32_t sum = _mm512_reduce_add_epi32(_mm512_madd_epi16(words, _mm512_set1_epi16(1)));
    const float scale = poison ? NAN : largest / LARGEST;
    x.scales[own] = scale;
    x.sums[own] = scale * float(sum);
    x.offsets[own] = sum * 128;
    const __m512i high = _mm512_srai_epi16(_mm512_add_epi16(words, _mm512_set1_epi16(128)), 8);
    const __m512i low = _mm512_sub_epi16(words, _mm512_slli_epi16(high, 8));
    return {_mm512_cvtepi16_epi8(high), _mm512_cvtepi16_epi8(low), fine};
}

float mean_square(const float *values, int64_t count) {
    __m512 sum = _mm512_setzero_ps();
    for (int64_t k = 0; k < count; k += 16) {
        const __m512 v = _mm512_loadu_ps(values + k);
        sum = _mm512_fmadd_ps(v, v, sum);
    }
    return _mm512_reduce_add_ps(sum) / float(count);
}

// Eight tokens' bytes → the first four of each, the next four of each, …
inline void put_group(const __m256i (&rows)[GROUP], int8_t *to) {
    __m256i a[8], b[8];
    for (int i = 0; i < 8; i += 2) {
        a[i] = _mm256_unpacklo_epi32(rows[i], rows[i + 1]);
        a[i + 1] = _mm256_unpackhi_epi32(rows[i], rows[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        b[i] = _mm256_unpacklo_epi64(a[i], a[i + 2]);
        b[i + 1] = _mm256_unpackhi_epi64(a[i], a[i + 2]);
        b[i + 2] = _mm256_unpacklo_epi64(a[i + 1], a[i + 3]);
        b[i + 3] = _mm256_unpackhi_epi64(a[i + 1], a[i + 3]);
    }
    for (int i = 0; i < 4; ++i) {
        _mm256_storeu_si256((__m256i *)(to + i * 32),
                            _mm256_permute2x128_si256(b[i], b[i + 4], 0x20));
        _mm256_storeu_si256((__m256i *)(to + (i + 4) * 32),
                            _mm256_permute2x128_si256(b[i], b[i + 4], 0x31));
    }
}

inline void put_alone(__m256i row, int8_t *to) {
    alignas(32) int32_t fours[8];
    _mm256_store_si256((__m256i *)fours, row);
    for (int j = 0; j < 8; ++j) std::memcpy(to + j * 32, fours + j, 4);
}

}  // namespace

void to_integers(const Operands &x, int64_t first, int64_t last) {
    const int64_t blocks = x.ins / BLOCK, group = first / GROUP, count = last - first;
    float squares[GROUP];
    for (int64_t lane = 0; lane < count; ++lane)
        squares[lane] = mean_square(x.values + (first + lane) * x.ins, x.ins);
    for (int64_t b = 0; b < blocks; ++b) {
        const int64_t own = (group * blocks + b) * GROUP, at = own * BLOCK;
        const float *values = x.values + first * x.ins + b * BLOCK;
        __m256i high[GROUP] = {}, low[GROUP] = {};
        bool fine = false;
        for (int64_t lane = 0; lane < count; ++lane) {
            const Bytes bytes = integers_of(x, values + lane * x.ins, squares[lane], own + lane);
            high[lane] = bytes.high, low[lane] = bytes.low, fine |= bytes.fine;
        }
        x.fine[group * blocks + b] = fine;
        if (!fine)
            for (int64_t lane = 0; lane < count; ++lane)
                x.scales[own + lane] *= 256, x.offsets[own + lane] >>= 8;
        if (count < 4) {
            for (int64_t lane = 0; lane < count; ++lane) {
                put_alone(high[lane], x.high + at + lane * 4);
                if (fine) put_alone(low[lane], x.low + at + lane * 4);
            }
        } else {
            put_group(high, x.high + at);
            if (fine) put_group(low, x.low + at);
        }
    }
}

#else

void to_integers(const Operands &, int64_t, int64_t) {}  // every product is one of floats

#endif

}  // namespace skerry
