// Attention over KV in bf16 by AVX-512, for heads of 64 or 128 and blocks of 16 tokens; and what it
// shares with the plain version in attention.cpp.

#pragma once

#include "attention.h"

namespace skerry {

constexpr int64_t KEYS = 64;   // positions for each step of the softmax
constexpr int64_t TILE = 16;   // tokens of a row that share one unpacking of the keys

// A part of one row against `heads` KV heads from `kv_head` on; more than one only for one token, for
// which nearly all the time goes by waiting for memory: the heads of a block lie together there.
struct Tile {
    int64_t token, count, position, kv_head, heads;
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

// Scores are products of pairs of bf16 along the head, the mix of values one of pairs of keys: the
// query and the shares are rounded to bf16 as keys and values are, sums are floats.
template <int DIM>
struct Wide {
    static constexpr int PAIRS = DIM / 2, PARTS = DIM / 16;
    struct Query {
        uint32_t pairs[PAIRS];
        __m512 sum, mixed[PARTS];  // in the order of `interleave`
        float best;
    };
    __m512i keys[4][PAIRS];             // [16 keys each][pair]: one pair of 16 keys
    __m512i values[KEYS / 2][PARTS];    // [two keys]; only for tiles of several tokens
    Query queries[1];

    // Two keys' values of 32 elements each → pairs of the two: of each 8 elements the first 4, the
    // others.
    static void interleave(__m512i one, __m512i two, __m512i *out) {
        out[0] = _mm512_unpacklo_epi16(one, two);
        out[1] = _mm512_unpackhi_epi16(one, two);
    }

    // 32 elements, or zeros where nobody has written or may look.
    static __m512i values_at(const bf16 *value, bool there) {
        return _mm512_maskz_loadu_epi16(there ? ~__mmask32(0) : 0, value);
    }

    // Where 64 positions of one head lie that are wanted next. They are asked for line by line while
    // others are computed: all at once would fill the queue of the memory, and wait there.
    struct Ahead {
        const bf16 *blocks[4];
        int64_t to_value;
        void ask_keys(int64_t line) const {
            for (const bf16 *block : blocks) _mm_prefetch(block + line * 32, _MM_HINT_T0);
        }
        void ask_values(int64_t line) const {
            for (const bf16 *block : blocks) _mm_prefetch(block + to_value + line * 32, _MM_HINT_T0);
        }
    };

    // `kv`: of the head.
    static Ahead ahead_of(const Attention &a, const Tile &tile, const bf16 *kv, int64_t start) {
        Ahead ahead{{}, a.to_value};
        const int64_t first = earliest(a, tile), last = tile.position + tile.count - 1;
        for (int64_t s = 0; s < 4; ++s)
            ahead.blocks[s] =
                token_at(a, tile, kv, std::clamp(start + s * 16, first, last) / 16 * 16);
        return ahead;
    }

    // The 64 positions at which a tile begins.
    static int64_t begin(const Attention &a, const Tile &tile) {
        return earliest(a, tile) / KEYS * KEYS;
    }

    void gather(const Attention &a, const Tile &tile, const bf16 *kv, int64_t start, int64_t end) {
        for (int64_t s = 0; s < 4 && start + s * 16 < end; ++s) {
            if (start + s * 16 + 16 <= earliest(a, tile)) continue;
            const bf16 *key = token_at(a, tile, kv, start + s * 16);
            for (int64_t i = 0; i < PAIRS / 16; ++i) {
                __m512i v[16];
                for (int t = 0; t < 16; ++t) v[t] = _mm512_loadu_si512(key + t * DIM + i * 32);
                transpose(v);
                for (int t = 0; t < 16; ++t) keys[s][i * 16 + t] = v[t];
            }
            if (tile.count == 1) continue;
            const int64_t from = earliest(a, tile) - start - s * 16, to = end - start - s * 16;
            for (int64_t t = 0; t < 16; t += 2)
                pair_of(key + a.to_value + t * DIM, t >= from && t < to, t + 1 >= from && t + 1 < to,
                        values[s * 8 + t / 2]);
        }
    }

    // The values of two keys that lie one after the other.
    static void pair_of(const bf16 *value, bool one, bool two, __m512i (&out)[PARTS]) {
        for (int i = 0; i < PARTS / 2; ++i)
            interleave(values_at(value + i * 32, one), values_at(value + DIM + i * 32, two),
                       out + 2 * i);
    }

    // Bits first … last − 1, where those of 16 exist.
    static __mmask16 visible(int64_t first, int64_t last) {
        const uint32_t below = last >= 16 ? 0xffffu : last <= 0 ? 0 : (1u << last) - 1;
        const uint32_t above = first <= 0 ? 0xffffu : first >= 16 ? 0 : 0xffffu << first;
        return __mmask16(below & above);
    }

    // Scores of SETS · 16 keys from set `from` on; −∞ for keys that are not seen.
    template <int GROUP, int SETS>
    void score(int from, int64_t first, int64_t last, const Query *query, const Ahead *ahead,
               __m512 (&scores)[GROUP][4]) const {
        __m512 sums[GROUP][SETS];
        for (auto &row : sums)
            for (__m512 &one : row) one = _mm512_setzero_ps();
        for (int p = 0; p < PAIRS; ++p) {
            if (ahead != nullptr) ahead->ask_keys(p);
            for (int g = 0; g < GROUP; ++g) {
                const __m512bh pair = (__m512bh)_mm512_set1_epi32(int(query[g].pairs[p]));
                for (int s = 0; s < SETS; ++s)
                    sums[g][s] = _mm512_dpbf16_ps(sums[g][s], (__m512bh)keys[from + s][p], pair);
            }
        }
        for (int s = 0; s < SETS; ++s) {
            const __mmask16 lanes = visible(first - (from + s) * 16, last - (from + s) * 16);
            for (int g = 0; g < GROUP; ++g)
                scores[g][from + s] =
                    _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), lanes, sums[g][s]);
        }
    }

    template <int GROUP>
    void step(const Attention &a, const Tile &tile, const bf16 *kv, int64_t start, int64_t first,
              int64_t last, const Ahead *ahead, Query *query) {
        __m512 scores[GROUP][4];
        for (auto &row : scores)
            for (__m512 &one : row) one = _mm512_set1_ps(-INFINITY);
        if (last <= 32)
            score<GROUP, 2>(0, first, last, query, ahead, scores);
        else if (first >= 32)
            score<GROUP, 2>(2, first, last, query, ahead, scores);
        else
            score<GROUP, 4>(0, first, last, query, ahead, scores);
        alignas(64) uint32_t shares[GROUP][KEYS / 2];  // bf16, of two keys each
        for (int g = 0; g < GROUP; ++g) {
            Query &q = query[g];
            const __m512 top = _mm512_max_ps(_mm512_max_ps(scores[g][0], scores[g][1]),
                                             _mm512_max_ps(scores[g][2], scores[g][3]));
            const float best = std::max(q.best, _mm512_reduce_max_ps(top));
            const __m512 kept = exp2_negative(_mm512_set1_ps(q.best - best));
            q.best = best;
            __m512 part[4];
            for (int s = 0; s < 4; ++s)
                part[s] = exp2_negative(_mm512_sub_ps(scores[g][s], _mm512_set1_ps(best)));
            for (int s = 0; s < 4; s += 2)
                _mm512_store_si512(shares[g] + s * 8,
                                   (__m512i)_mm512_cvtne2ps_pbh(part[s + 1], part[s]));
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
            for (int64_t j = first / 2; j < (last + 1) / 2; ++j) {
                if (ahead != nullptr && from == 0)
                    for (int i = 0; i < DIM / 64; ++i) ahead->ask_values(j * (DIM / 64) + i);
                __m512i value[AT_ONCE];
                if (tile.count > 1) {
                    for (int i = 0; i < AT_ONCE; ++i) value[i] = values[j][from + i];
                } else {
                    if (own == nullptr || j % 8 == 0)
                        own = token_at(a, tile, kv, start + 2 * j) + a.to_value + from * 16;
                    for (int i = 0; i < AT_ONCE; i += 2)
                        interleave(values_at(own + i * 16, 2 * j >= first),
                                   values_at(own + DIM + i * 16, 2 * j + 1 < last), value + i);
                    own += 2 * DIM;
                }
                for (int g = 0; g < GROUP; ++g) {
                    const __m512bh share = (__m512bh)_mm512_set1_epi32(int(shares[g][j]));
                    for (int i = 0; i < AT_ONCE; ++i)
                        mixed[g][i] = _mm512_dpbf16_ps(mixed[g][i], (__m512bh)value[i], share);
                }
            }
            for (int g = 0; g < GROUP; ++g)
                for (int i = 0; i < AT_ONCE; ++i) query[g].mixed[from + i] = mixed[g][i];
        }
    }

    static void set(Query &query, const float *from, float scale) {
        for (int i = 0; i < PARTS; ++i)
            _mm256_storeu_si256(
                (__m256i *)(query.pairs + i * 8),
                (__m256i)_mm512_cvtneps_pbh(
                    _mm512_mul_ps(_mm512_loadu_ps(from + i * 16), _mm512_set1_ps(scale))));
        query.sum = _mm512_setzero_ps();
        for (int i = 0; i < PARTS; ++i) query.mixed[i] = _mm512_setzero_ps();
        query.best = -INFINITY;
    }

    static void get(const Query &query, float *to) {
        const __m512 share = _mm512_set1_ps(1.0f / _mm512_reduce_add_ps(query.sum));
        alignas(64) float four[16];
        for (int i = 0; i < PARTS; ++i) {
            _mm512_store_ps(four, _mm512_mul_ps(query.mixed[i], share));
            for (int lane = 0; lane < 4; ++lane)
                std::memcpy(to + i / 2 * 32 + lane * 8 + i % 2 * 4, four + lane * 4, 16);
        }
    }

    // `kv` is that of head 0. `next`: what this thread computes then, or null.
    void run(const Attention &a, const Tile &tile, const Tile *next, const float *qkv,
             const bf16 *kv, float *out) {
        const int64_t group = a.heads / a.kv_heads, width = (a.heads + 2 * a.kv_heads) * DIM;
        const int64_t each = tile.heads * group, first_head = tile.kv_head * group;
        for (int64_t n = 0; n < tile.count * each; ++n)
            set(queries[n],
                qkv + (tile.token + n / each) * width + (first_head + n % each) * DIM,
                a.scale * LOG2_E);
        const int64_t end = tile.position + tile.count;
        for (int64_t start = begin(a, tile); start < end; start += KEYS)
            for (int64_t h = 0; h < tile.heads; ++h) {
                Ahead ahead;
                const Ahead *wanted = tile.count == 1 ? &ahead : nullptr;
                const bf16 *own = kv + (tile.kv_head + h) * a.to_head;
                if (h + 1 < tile.heads)
                    ahead = ahead_of(a, tile, own + a.to_head, start);
                else if (start + KEYS < end)
                    ahead = ahead_of(a, tile, kv + tile.kv_head * a.to_head, start + KEYS);
                else if (next != nullptr)
                    ahead = ahead_of(a, *next, kv + next->kv_head * a.to_head, begin(a, *next));
                else
                    wanted = nullptr;
                read_keys(a, tile, own, start, end, wanted, queries + h * group);
            }
        for (int64_t n = 0; n < tile.count * each; ++n)
            get(queries[n], out + ((tile.token + n / each) * a.heads + first_head + n % each) * DIM);
    }

    // 64 positions of one KV head, by all queries of it; those of a token lie together.
    void read_keys(const Attention &a, const Tile &tile, const bf16 *kv, int64_t start, int64_t end,
                   const Ahead *ahead, Query *own) {
        const int64_t group = a.heads / a.kv_heads;
        gather(a, tile, kv, start, end);
        for (int64_t t = 0; t < tile.count; ++t) {
            int64_t first, last;
            seen(a, start, tile.position + t, first, last);
            if (first >= last) continue;
            for (int64_t g = 0; g < group;) {
                Query *query = own + t * group + g;
                const int64_t left = group - g;
                if (left >= 3)
                    step<3>(a, tile, kv, start, first, last, g ? nullptr : ahead, query), g += 3;
                else if (left == 2)
                    step<2>(a, tile, kv, start, first, last, g ? nullptr : ahead, query), g += 2;
                else
                    step<1>(a, tile, kv, start, first, last, g ? nullptr : ahead, query), g += 1;
            }
        }
    }
};

inline bool wide_fits(const Attention &a) {
    return a.kv_bf16 && a.block_tokens == 16 && (a.dim == 64 || a.dim == 128);
}

#endif

}  // namespace skerry
