// Attention over KV in bf16 by AVX-512, for heads of 64 or 128 and blocks of 16 tokens; and what it
// shares with the plain version in attention.cpp.

#pragma once

#include "attention.h"

namespace skerry {

constexpr int64_t KEYS = 64;   // positions for each step of the softmax
constexpr int64_t TILE = 16;   // tokens of a row that share one unpacking of the keys

// A part of one row against one KV head.
struct Tile {
    int64_t token, count, position, kv_head;
    const int32_t *table;
};

// First and last + 1 of the 64 positions from `start` that the query at `position` may see.
inline void seen(const Attention &a, int64_t start, int64_t position, int64_t &first,
                 int64_t &last) {
    last = std::min(KEYS, position + 1 - start);
    first = a.window ? std::max<int64_t>(0, position - a.window + 1 - start) : 0;
}

// The first position that any query of the tile sees.
inline int64_t earliest(const Attention &a, const Tile &tile) {
    return a.window ? std::max<int64_t>(0, tile.position - a.window + 1) : 0;
}

template <typename T>
inline const T *token_at(const Attention &a, const Tile &tile, const T *kv, int64_t position) {
    return kv + tile.table[position / a.block_tokens] * a.to_block +
           position % a.block_tokens * a.dim;
}

#ifdef SKERRY_PAIRS

// Scores come from products of bf16 pairs: the query in two parts of bf16 each, which keep 16 bits
// of it. Values are widened to even and odd elements, 16 floats each, and mixed in float.
template <int DIM>
struct Wide {
    static constexpr int PAIRS = DIM / 2, PARTS = DIM / 16;
    struct Query {
        uint32_t high[PAIRS], low[PAIRS];
        __m512 sum, mixed[PARTS];
        float best;
    };
    __m512i keys[4][PAIRS];       // [16 keys each][pair]: one pair of 16 keys
    __m512 values[KEYS][PARTS];  // only for tiles of several tokens
    Query queries[1];

    template <int COUNT>
    static void widen(const bf16 *value, __m512 (&out)[COUNT]) {
        for (int i = 0; i < COUNT / 2; ++i) {
            const __m512i both = _mm512_loadu_si512(value + i * 32);
            out[2 * i] = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
            out[2 * i + 1] = _mm512_castsi512_ps(
                _mm512_and_si512(both, _mm512_set1_epi32(int(0xffff0000))));
        }
    }

    // For one token nearly all the time goes by waiting for memory: ask for the values of these
    // keys and for the keys after them while the scores are computed.
    static void ask(const Attention &a, const Tile &tile, const bf16 *kv, int64_t start,
                    int64_t end) {
        for (int64_t at = start; at < std::min(start + 2 * KEYS, end); at += 16) {
            const bf16 *from = token_at(a, tile, kv, at) + (at < start + KEYS ? a.to_value : 0);
            for (int64_t i = 0; i < 16 * DIM; i += 32) _mm_prefetch(from + i, _MM_HINT_T0);
        }
    }

    void gather(const Attention &a, const Tile &tile, const bf16 *kv, int64_t start, int64_t end) {
        if (tile.count == 1) ask(a, tile, kv, start, end);
        for (int64_t s = 0; s < 4 && start + s * 16 < end; ++s) {
            if (start + s * 16 + 16 <= earliest(a, tile)) continue;
            const bf16 *key = token_at(a, tile, kv, start + s * 16);
            for (int64_t i = 0; i < PAIRS / 16; ++i) {
                __m512i v[16];
                for (int t = 0; t < 16; ++t) v[t] = _mm512_loadu_si512(key + t * DIM + i * 32);
                transpose(v);
                for (int t = 0; t < 16; ++t) keys[s][i * 16 + t] = v[t];
            }
            if (tile.count > 1)
                for (int64_t t = 0; t < std::min<int64_t>(16, end - start - s * 16); ++t)
                    widen(key + a.to_value + t * DIM, values[s * 16 + t]);
        }
    }

    // Bits first … last − 1, where those of 16 exist.
    static __mmask16 visible(int64_t first, int64_t last) {
        const uint32_t below = last >= 16 ? 0xffffu : last <= 0 ? 0 : (1u << last) - 1;
        const uint32_t above = first <= 0 ? 0xffffu : first >= 16 ? 0 : 0xffffu << first;
        return __mmask16(below & above);
    }

    template <int GROUP>
    void step(const Attention &a, const Tile &tile, const bf16 *kv, int64_t start, int64_t first,
              int64_t last, Query *query) {
        __m512 scores[GROUP][4];
        for (int64_t s = 0; s < 4; s += 2) {  // two sets at a time: enough independent sums
            for (int g = 0; g < GROUP; ++g)
                scores[g][s] = scores[g][s + 1] = _mm512_set1_ps(-INFINITY);
            if (s * 16 >= last || s * 16 + 32 <= first) continue;
            __m512 high[GROUP][2], low[GROUP][2];
            for (int g = 0; g < GROUP; ++g)
                high[g][0] = high[g][1] = low[g][0] = low[g][1] = _mm512_setzero_ps();
            for (int p = 0; p < PAIRS; ++p)
                for (int g = 0; g < GROUP; ++g) {
                    const __m512bh a = (__m512bh)_mm512_set1_epi32(int(query[g].high[p]));
                    const __m512bh b = (__m512bh)_mm512_set1_epi32(int(query[g].low[p]));
                    for (int i = 0; i < 2; ++i) {
                        const __m512bh pairs = (__m512bh)keys[s + i][p];
                        high[g][i] = _mm512_dpbf16_ps(high[g][i], pairs, a);
                        low[g][i] = _mm512_dpbf16_ps(low[g][i], pairs, b);
                    }
                }
            for (int i = 0; i < 2; ++i) {
                const __mmask16 lanes = visible(first - (s + i) * 16, last - (s + i) * 16);
                for (int g = 0; g < GROUP; ++g)
                    scores[g][s + i] =
                        _mm512_mask_add_ps(scores[g][s + i], lanes, high[g][i], low[g][i]);
            }
        }
        alignas(64) float shares[GROUP][KEYS];
        for (int g = 0; g < GROUP; ++g) {
            Query &q = query[g];
            const __m512 top = _mm512_max_ps(_mm512_max_ps(scores[g][0], scores[g][1]),
                                             _mm512_max_ps(scores[g][2], scores[g][3]));
            const float best = std::max(q.best, _mm512_reduce_max_ps(top));
            const __m512 kept = exp2_negative(_mm512_set1_ps(q.best - best));
            q.best = best;
            __m512 part[4];
            for (int s = 0; s < 4; ++s) {
                part[s] = exp2_negative(_mm512_sub_ps(scores[g][s], _mm512_set1_ps(best)));
                _mm512_store_ps(shares[g] + s * 16, part[s]);
            }
            q.sum = _mm512_fmadd_ps(q.sum, kept,
                                    _mm512_add_ps(_mm512_add_ps(part[0], part[1]),
                                                  _mm512_add_ps(part[2], part[3])));
            for (int i = 0; i < PARTS; ++i) q.mixed[i] = _mm512_mul_ps(q.mixed[i], kept);
        }
        constexpr int AT_ONCE = 4;  // vectors of values: the sums stay in registers
        for (int from = 0; from < PARTS; from += AT_ONCE) {
            __m512 mixed[GROUP][AT_ONCE];
            for (int g = 0; g < GROUP; ++g)
                for (int i = 0; i < AT_ONCE; ++i) mixed[g][i] = query[g].mixed[from + i];
            const bf16 *own = nullptr;
            for (int64_t j = first; j < last; ++j) {
                __m512 value[AT_ONCE];
                if (tile.count > 1) {
                    for (int i = 0; i < AT_ONCE; ++i) value[i] = values[j][from + i];
                } else {
                    if (own == nullptr || j % 16 == 0)
                        own = token_at(a, tile, kv, start + j) + a.to_value;
                    widen(own + from * 16, value);
                    own += DIM;
                }
                for (int g = 0; g < GROUP; ++g) {
                    const __m512 share = _mm512_set1_ps(shares[g][j]);
                    for (int i = 0; i < AT_ONCE; ++i)
                        mixed[g][i] = _mm512_fmadd_ps(share, value[i], mixed[g][i]);
                }
            }
            for (int g = 0; g < GROUP; ++g)
                for (int i = 0; i < AT_ONCE; ++i) query[g].mixed[from + i] = mixed[g][i];
        }
    }

    static void set(Query &query, const float *from, float scale) {
        for (int p = 0; p < PAIRS; ++p) {
            uint32_t parts[2] = {0, 0};
            for (int i = 0; i < 2; ++i) {
                const float value = from[2 * p + i] * scale;
                bf16 high, low;
                store(high, value);
                store(low, value - load(high));
                parts[0] |= uint32_t(high.bits) << (16 * i);
                parts[1] |= uint32_t(low.bits) << (16 * i);
            }
            query.high[p] = parts[0], query.low[p] = parts[1];
        }
        query.sum = _mm512_setzero_ps();
        for (int i = 0; i < PARTS; ++i) query.mixed[i] = _mm512_setzero_ps();
        query.best = -INFINITY;
    }

    static void get(const Query &query, float *to) {
        const __m512 share = _mm512_set1_ps(1.0f / _mm512_reduce_add_ps(query.sum));
        alignas(64) float even[16], odd[16];
        for (int i = 0; i < PARTS / 2; ++i) {
            _mm512_store_ps(even, _mm512_mul_ps(query.mixed[2 * i], share));
            _mm512_store_ps(odd, _mm512_mul_ps(query.mixed[2 * i + 1], share));
            for (int lane = 0; lane < 16; ++lane) {
                to[i * 32 + 2 * lane] = even[lane];
                to[i * 32 + 2 * lane + 1] = odd[lane];
            }
        }
    }

    void run(const Attention &a, const Tile &tile, const float *qkv, const bf16 *kv, float *out) {
        const int64_t group = a.heads / a.kv_heads, width = (a.heads + 2 * a.kv_heads) * DIM;
        for (int64_t n = 0; n < tile.count * group; ++n)
            set(queries[n],
                qkv + (tile.token + n / group) * width + (tile.kv_head * group + n % group) * DIM,
                a.scale * LOG2_E);
        const int64_t end = tile.position + tile.count;
        int64_t start = earliest(a, tile);
        for (start -= start % KEYS; start < end; start += KEYS) {
            gather(a, tile, kv, start, end);
            for (int64_t t = 0; t < tile.count; ++t) {
                int64_t first, last;
                seen(a, start, tile.position + t, first, last);
                if (first >= last) continue;
                for (int64_t g = 0; g < group;) {
                    Query *query = queries + t * group + g;
                    const int64_t left = group - g;
                    if (left >= 3)
                        step<3>(a, tile, kv, start, first, last, query), g += 3;
                    else if (left == 2)
                        step<2>(a, tile, kv, start, first, last, query), g += 2;
                    else
                        step<1>(a, tile, kv, start, first, last, query), g += 1;
                }
            }
        }
        for (int64_t n = 0; n < tile.count * group; ++n)
            get(queries[n], out + ((tile.token + n / group) * a.heads + tile.kv_head * group +
                                   n % group) * DIM);
    }
};

inline bool wide_fits(const Attention &a) {
    return a.kv_bf16 && a.block_tokens == 16 && (a.dim == 64 || a.dim == 128);
}

#endif

}  // namespace skerry
