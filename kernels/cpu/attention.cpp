// Rotary embedding, writing of KV into its slots, and decode attention over paged KV.

#include "numbers.h"

namespace {

struct Shape {
    int64_t heads, kv_heads, dim;
    int64_t to_block, to_value, to_head;  // strides of the pool, in elements
    int64_t block_tokens;
};

template <typename T>
void rotate_half(T *x, const float *cos, const float *sin, int64_t half) {
#pragma omp simd
    for (int64_t i = 0; i < half; ++i) {
        float a = load(x[i]), b = load(x[i + half]);
        store(x[i], a * cos[i] - b * sin[i]);
        store(x[i + half], b * cos[i] + a * sin[i]);
    }
}

// Rotate q and k of each token in place, then copy k and v into the token's slot.
template <typename T>
void rotate_and_write(const Shape &s, int64_t tokens, T *qkv, const float *cos, const float *sin,
                      T *kv, const int64_t *slots, int threads) {
    int64_t width = (s.heads + 2 * s.kv_heads) * s.dim, half = s.dim / 2;
#pragma omp parallel for num_threads(threads) if (threads > 1 && tokens > 8)
    for (int64_t token = 0; token < tokens; ++token) {
        T *row = qkv + token * width;
        for (int64_t head = 0; head < s.heads + s.kv_heads; ++head)
            rotate_half(row + head * s.dim, cos + token * half, sin + token * half, half);
        int64_t block = slots[token] / s.block_tokens, offset = slots[token] % s.block_tokens;
        T *to = kv + block * s.to_block + offset * s.dim;
        const T *key = row + s.heads * s.dim, *value = key + s.kv_heads * s.dim;
        for (int64_t head = 0; head < s.kv_heads; ++head) {
            std::memcpy(to + head * s.to_head, key + head * s.dim, s.dim * sizeof(T));
            std::memcpy(to + s.to_value + head * s.to_head, value + head * s.dim,
                        s.dim * sizeof(T));
        }
    }
}

// Scores → shares of one query head, in place; beyond `context` nothing is read.
inline void soften(float *row, int64_t context, float scale) {
    float best = row[0], sum = 0;
#pragma omp simd reduction(max : best)
    for (int64_t t = 0; t < context; ++t) best = row[t] > best ? row[t] : best;
#pragma omp simd reduction(+ : sum)
    for (int64_t t = 0; t < context; ++t) {
        row[t] = exp_negative((row[t] - best) * scale);
        sum += row[t];
    }
    float share = 1.0f / sum;
#pragma omp simd
    for (int64_t t = 0; t < context; ++t) row[t] *= share;
}

// One token against its whole context, for the query heads of one KV head.
// Two passes: all scores, then softmax, then the weighted sum of values.
template <typename T>
void attend(const Shape &s, const T *queries, const T *kv, const int32_t *table, int64_t context,
            float scale, T *out, std::vector<float> &scratch) {
    const int64_t dim = s.dim, group = s.heads / s.kv_heads;
    scratch.resize(group * (context + 2 * dim) + dim);
    float *scores = scratch.data(), *query = scores + group * context;
    float *mixed = query + group * dim, *wide = mixed + group * dim;
    for (int64_t i = 0; i < group * dim; ++i) query[i] = load(queries[i]), mixed[i] = 0;
    for (int64_t t = 0; t < context; ++t) {
        const T *key = kv + table[t / s.block_tokens] * s.to_block + t % s.block_tokens * dim;
#pragma omp simd
        for (int64_t i = 0; i < dim; ++i) wide[i] = load(key[i]);
        for (int64_t g = 0; g < group; ++g) {
            float sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int64_t i = 0; i < dim; ++i) sum += query[g * dim + i] * wide[i];
            scores[g * context + t] = sum;
        }
    }
    for (int64_t g = 0; g < group; ++g) soften(scores + g * context, context, scale);
    for (int64_t t = 0; t < context; ++t) {
        const T *value = kv + table[t / s.block_tokens] * s.to_block + s.to_value +
                         t % s.block_tokens * dim;
#pragma omp simd
        for (int64_t i = 0; i < dim; ++i) wide[i] = load(value[i]);
        for (int64_t g = 0; g < group; ++g) {
            float share = scores[g * context + t];
            float *to = mixed + g * dim;
#pragma omp simd
            for (int64_t i = 0; i < dim; ++i) to[i] += share * wide[i];
        }
    }
    for (int64_t i = 0; i < group * dim; ++i) store(out[i], mixed[i]);
}

#ifdef SKERRY_WIDE

// Sixteen vectors → one vector of their sums.
inline __m512 sums_of(const __m512 (&v)[16]) {
    __m512 pairs[8], fours[4];
    for (int i = 0; i < 8; ++i)
        pairs[i] = _mm512_add_ps(_mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]),
                                 _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]));
    for (int i = 0; i < 4; ++i) {
        __m512d a = _mm512_castps_pd(pairs[2 * i]), b = _mm512_castps_pd(pairs[2 * i + 1]);
        fours[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)),
                                 _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
    }
    for (int i = 0; i < 2; ++i)
        fours[i] = _mm512_add_ps(_mm512_shuffle_f32x4(fours[2 * i], fours[2 * i + 1], 0x88),
                                 _mm512_shuffle_f32x4(fours[2 * i], fours[2 * i + 1], 0xdd));
    return _mm512_add_ps(_mm512_shuffle_f32x4(fours[0], fours[1], 0x88),
                         _mm512_shuffle_f32x4(fours[0], fours[1], 0xdd));
}

// The same as `attend` for bf16, blocks of 16 tokens, DIM 64 or 128 and GROUP query heads.
// Scores by bf16 products summed in float; shares stay float.
template <int DIM, int GROUP>
void attend_wide(const Shape &s, const bf16 *queries, const bf16 *kv, const int32_t *table,
                 int64_t context, float scale, bf16 *out, std::vector<float> &scratch) {
    constexpr int PARTS = DIM / 32;
    const int64_t padded = (context + 15) / 16 * 16, blocks = padded / 16;
    scratch.resize(GROUP * padded);
    float *scores = scratch.data();
    __m512i query[GROUP][PARTS];
    for (int g = 0; g < GROUP; ++g)
        for (int i = 0; i < PARTS; ++i)
            query[g][i] = _mm512_loadu_si512(queries + g * DIM + i * 32);
    for (int64_t b = 0; b < blocks; ++b) {
        const bf16 *keys = kv + table[b] * s.to_block;
        const bf16 *next = b + 1 < blocks ? kv + table[b + 1] * s.to_block : keys;
        const int count = int(std::min<int64_t>(16, context - b * 16));
        __m512 sums[GROUP][16];
        for (int t = 0; t < 16; ++t) {
            if (t >= count) {  // what lies there may be anything
                for (int g = 0; g < GROUP; ++g) sums[g][t] = _mm512_setzero_ps();
                continue;
            }
            for (int i = 0; i < PARTS; ++i) _mm_prefetch(next + t * DIM + i * 32, _MM_HINT_T0);
            for (int g = 0; g < GROUP; ++g) sums[g][t] = _mm512_setzero_ps();
            for (int i = 0; i < PARTS; ++i) {
                __m512i key = _mm512_loadu_si512(keys + t * DIM + i * 32);
                for (int g = 0; g < GROUP; ++g)
                    sums[g][t] =
                        _mm512_dpbf16_ps(sums[g][t], (__m512bh)key, (__m512bh)query[g][i]);
            }
        }
        for (int g = 0; g < GROUP; ++g)
            _mm512_storeu_ps(scores + g * padded + b * 16, sums_of(sums[g]));
    }
    for (int g = 0; g < GROUP; ++g)
        soften(scores + g * padded, context, scale);
    for (int at = 0; at < DIM; at += 64) {
        __m512 mixed[GROUP][4];
        for (int g = 0; g < GROUP; ++g)
            for (int i = 0; i < 4; ++i) mixed[g][i] = _mm512_setzero_ps();
        for (int64_t b = 0; b < blocks; ++b) {
            const bf16 *values = kv + table[b] * s.to_block + s.to_value + at;
            const bf16 *next =
                b + 1 < blocks ? kv + table[b + 1] * s.to_block + s.to_value + at : values;
            const int count = int(std::min<int64_t>(16, context - b * 16));
            for (int t = 0; t < count; ++t) {
                _mm_prefetch(next + t * DIM, _MM_HINT_T0);
                _mm_prefetch(next + t * DIM + 32, _MM_HINT_T0);
                __m512 wide[4];
                for (int i = 0; i < 2; ++i) {  // even elements, then odd ones
                    __m512i value = _mm512_loadu_si512(values + t * DIM + i * 32);
                    wide[2 * i] = _mm512_castsi512_ps(_mm512_slli_epi32(value, 16));
                    wide[2 * i + 1] = _mm512_castsi512_ps(
                        _mm512_and_si512(value, _mm512_set1_epi32(int(0xffff0000))));
                }
                for (int g = 0; g < GROUP; ++g) {
                    __m512 share = _mm512_set1_ps(scores[g * padded + b * 16 + t]);
                    for (int i = 0; i < 4; ++i)
                        mixed[g][i] = _mm512_fmadd_ps(share, wide[i], mixed[g][i]);
                }
            }
        }
        for (int g = 0; g < GROUP; ++g)
            for (int i = 0; i < 2; ++i) {
                float even[16], odd[16];
                _mm512_storeu_ps(even, mixed[g][2 * i]);
                _mm512_storeu_ps(odd, mixed[g][2 * i + 1]);
                for (int lane = 0; lane < 16; ++lane) {
                    store(out[g * DIM + at + i * 32 + 2 * lane], even[lane]);
                    store(out[g * DIM + at + i * 32 + 2 * lane + 1], odd[lane]);
                }
            }
    }
}

// Query heads in parts of at most four: their sums stay in registers.
template <int DIM>
void attend_heads(const Shape &s, const bf16 *queries, const bf16 *kv, const int32_t *table,
                  int64_t context, float scale, bf16 *out, std::vector<float> &scratch) {
    int64_t left = s.heads / s.kv_heads;
    while (left > 0) {
        int64_t part = left >= 4 ? 4 : left;
        if (part == 4)
            attend_wide<DIM, 4>(s, queries, kv, table, context, scale, out, scratch);
        else if (part == 3)
            attend_wide<DIM, 3>(s, queries, kv, table, context, scale, out, scratch);
        else if (part == 2)
            attend_wide<DIM, 2>(s, queries, kv, table, context, scale, out, scratch);
        else
            attend_wide<DIM, 1>(s, queries, kv, table, context, scale, out, scratch);
        queries += part * DIM, out += part * DIM, left -= part;
    }
}

#endif

void attend_row(const Shape &s, const float *queries, const float *kv, const int32_t *table,
                int64_t context, float scale, float *out, std::vector<float> &scratch) {
    attend(s, queries, kv, table, context, scale, out, scratch);
}

void attend_row(const Shape &s, const bf16 *queries, const bf16 *kv, const int32_t *table,
                int64_t context, float scale, bf16 *out, std::vector<float> &scratch) {
#ifdef SKERRY_WIDE
    if (s.block_tokens == 16 && s.dim == 64)
        return attend_heads<64>(s, queries, kv, table, context, scale, out, scratch);
    if (s.block_tokens == 16 && s.dim == 128)
        return attend_heads<128>(s, queries, kv, table, context, scale, out, scratch);
#endif
    attend(s, queries, kv, table, context, scale, out, scratch);
}

template <typename T>
void decode(const Shape &s, int64_t rows, const T *qkv, const T *kv, const int32_t *tables,
            int64_t table_width, const int32_t *spans, float scale, T *out, int threads) {
    int64_t width = (s.heads + 2 * s.kv_heads) * s.dim, group = s.heads / s.kv_heads;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
        std::vector<float> scratch;
#pragma omp for schedule(dynamic) collapse(2)
        for (int64_t row = 0; row < rows; ++row)
            for (int64_t head = 0; head < s.kv_heads; ++head) {
                const T *queries = qkv + row * width + head * group * s.dim;
                T *to = out + (row * s.heads + head * group) * s.dim;
                const T *from = kv + head * s.to_head;
                const int32_t *table = tables + row * table_width;
                int64_t context = spans[row * 3 + 2] + 1;
                attend_row(s, queries, from, table, context, scale, to, scratch);
            }
    }
}

}  // namespace

extern "C" {

// `shape`: heads, kv_heads, dim, strides of block, k/v and head, tokens of a block.
void skerry_rotate_and_write(int dtype, const int64_t *shape, int64_t tokens, void *qkv,
                             const float *cos, const float *sin, void *kv, const int64_t *slots,
                             int threads) {
    const Shape &s = *reinterpret_cast<const Shape *>(shape);
    if (dtype)
        rotate_and_write(s, tokens, (bf16 *)qkv, cos, sin, (bf16 *)kv, slots, threads);
    else
        rotate_and_write(s, tokens, (float *)qkv, cos, sin, (float *)kv, slots, threads);
}

void skerry_decode(int dtype, const int64_t *shape, int64_t rows, const void *qkv, const void *kv,
                   const int32_t *tables, int64_t table_width, const int32_t *spans, float scale,
                   void *out, int threads) {
    const Shape &s = *reinterpret_cast<const Shape *>(shape);
    if (dtype)
        decode(s, rows, (const bf16 *)qkv, (const bf16 *)kv, tables, table_width, spans, scale,
               (bf16 *)out, threads);
    else
        decode(s, rows, (const float *)qkv, (const float *)kv, tables, table_width, spans, scale,
               (float *)out, threads);
}

}  // extern "C"
