// Softmax over keys as they come, 64 positions at a time counted from position 0: for each query
//   best' = max(best, scores); shares = 2^(scores − best'); mixed = mixed · 2^(best − best') + Σ
// Which of a sequence's tokens are computed together changes none of these steps.

#include "attention.h"

#include "attention_wide.h"

namespace skerry {

namespace {

constexpr int64_t ROW_STEP = 8;

// ------------------------------------------------------------------ any shape

// keys [dim][64] and values [64][dim] of the positions from `start` that somebody sees.
template <typename T>
void gather(const Attention &a, const Tile &tile, const T *kv, int64_t start, int64_t count,
            float *keys, float *values) {
    for (int64_t j = std::max<int64_t>(0, earliest(a, tile) - start); j < count; ++j) {
        const T *key = token_at(a, tile, kv, start + j), *value = key + a.to_value;
        for (int64_t i = 0; i < a.dim; ++i) keys[i * KEYS + j] = load(key[i]);
        for (int64_t i = 0; i < a.dim; ++i) values[j * a.dim + i] = load(value[i]);
    }
}

void step(const Attention &a, const float *query, const float *keys, const float *values,
          int64_t first, int64_t last, float *best, float *sums, float *mixed) {
    float scores[KEYS] = {0};
    for (int64_t i = 0; i < a.dim; ++i)
        for (int64_t j = 0; j < KEYS; ++j) scores[j] += query[i] * keys[i * KEYS + j];
    float top = *best;
    for (int64_t j = first; j < last; ++j) top = scores[j] > top || scores[j] != scores[j] ? scores[j] : top;
    const float kept = exp2_negative(*best - top);
    *best = top;
    for (int64_t i = 0; i < 16; ++i) sums[i] *= kept;
    for (int64_t i = 0; i < a.dim; ++i) mixed[i] *= kept;
    for (int64_t j = first; j < last; ++j) {
        const float share = exp2_negative(scores[j] - top);
        sums[j % 16] += share;
        for (int64_t i = 0; i < a.dim; ++i) mixed[i] += share * values[j * a.dim + i];
    }
}

template <typename T>
void attend_plain(const Attention &a, const Tile &tile, const float *qkv, const T *kv, float *out,
                  uint8_t *scratch) {
    const int64_t group = a.heads / a.kv_heads, width = (a.heads + 2 * a.kv_heads) * a.dim;
    const int64_t queries = tile.count * group;
    float *keys = (float *)scratch, *values = keys + KEYS * a.dim, *query = values + KEYS * a.dim;
    float *mixed = query + queries * a.dim, *sums = mixed + queries * a.dim;
    float *best = sums + queries * 16;
    for (int64_t n = 0; n < queries; ++n) {
        const float *from = qkv + (tile.token + n / group) * width +
                            (tile.kv_head * group + n % group) * a.dim;
        for (int64_t i = 0; i < a.dim; ++i) {
            query[n * a.dim + i] = from[i] * (a.scale * LOG2_E);
            mixed[n * a.dim + i] = 0;
        }
        for (int64_t i = 0; i < 16; ++i) sums[n * 16 + i] = 0;
        best[n] = -INFINITY;
    }
    std::memset(keys, 0, size_t(KEYS * a.dim) * sizeof(float));
    const int64_t end = tile.position + tile.count;
    int64_t start = earliest(a, tile);
    for (start -= start % KEYS; start < end; start += KEYS) {
        gather(a, tile, kv, start, std::min(KEYS, end - start), keys, values);
        for (int64_t n = 0; n < queries; ++n) {
            int64_t first, last;
            seen(a, start, tile.position + n / group, first, last);
            if (first < last)
                step(a, query + n * a.dim, keys, values, first, last, best + n, sums + n * 16,
                     mixed + n * a.dim);
        }
    }
    for (int64_t n = 0; n < queries; ++n) {
        float total = 0;
        for (int64_t i = 0; i < 16; ++i) total += sums[n * 16 + i];
        float *to = out + ((tile.token + n / group) * a.heads + tile.kv_head * group + n % group) *
                              a.dim;
        for (int64_t i = 0; i < a.dim; ++i) to[i] = mixed[n * a.dim + i] / total;
    }
}

void attend_tile(const Attention &a, const Tile &tile, [[maybe_unused]] const Tile *next,
                 const float *qkv, const void *kv, float *out, uint8_t *scratch) {
#ifdef SKERRY_PAIRS
    if (wide_fits(a)) {
        const bf16 *data = (const bf16 *)kv;
        if (a.dim == 64)
            ((Wide<64> *)scratch)->run(a, tile, next, qkv, data, out);
        else
            ((Wide<128> *)scratch)->run(a, tile, next, qkv, data, out);
        return;
    }
#endif
    Tile one = tile;
    one.heads = 1;
    for (; one.kv_head < tile.kv_head + tile.heads; ++one.kv_head) {
        const int64_t head = one.kv_head * a.to_head;
        if (a.kv_bf16)
            attend_plain(a, one, qkv, (const bf16 *)kv + head, out, scratch);
        else
            attend_plain(a, one, qkv, (const float *)kv + head, out, scratch);
    }
}

// Gives the tiles of all rows by number; numbers only grow, so rows are passed once.
class Tiles {
  public:
    // Heads of one token are taken together where there are rows enough for all threads.
    Tiles(const Attention &a, const Rows &rows, int threads)
        : a_(a), rows_(rows),
          together_(rows.count >= 2 * threads && a.kv_heads <= TILE ? a.kv_heads : 1) {}

    bool find(int64_t number, Tile &tile) {
        int64_t count = 0, heads = 1;
        for (; row_ < rows_.count; before_ += count, ++row_) {
            const int64_t length = rows_.spans[row_ * 3 + 1];
            heads = length == 1 ? together_ : 1;
            count = (length + TILE - 1) / TILE * (a_.kv_heads / heads);
            if (number < before_ + count) break;
        }
        if (row_ == rows_.count) return false;
        const int32_t *span = rows_.spans + row_ * 3;
        const int64_t piece = number - before_, each = a_.kv_heads / heads;
        const int64_t from = (count / each - 1 - piece / each) * TILE;  // longest context first
        tile.token = span[0] + from;
        tile.count = std::min<int64_t>(TILE, span[1] - from);
        tile.position = span[2] + from;
        tile.kv_head = piece % each * heads;
        tile.heads = heads;
        tile.table = rows_.tables + row_ * rows_.table_width;
        return true;
    }

  private:
    const Attention &a_;
    const Rows &rows_;
    const int64_t together_;
    int64_t row_ = 0, before_ = 0;
};

template <typename T>
void write_token(const Attention &a, const float *row, int64_t slot, T *kv) {
    T *to = kv + slot / a.block_tokens * a.to_block + slot % a.block_tokens * a.dim;
    const float *key = row + a.heads * a.dim, *value = key + a.kv_heads * a.dim;
    for (int64_t head = 0; head < a.kv_heads; ++head)
        for (int64_t i = 0; i < a.dim; ++i) {
            store(to[head * a.to_head + i], key[head * a.dim + i]);
            store(to[a.to_value + head * a.to_head + i], value[head * a.dim + i]);
        }
}

}  // namespace

void turn(Board &board, const Rows &rows, const float *frequencies, int64_t half, float *cos,
          float *sin) {
    for_rows(board, rows.tokens, ROW_STEP, [&](int64_t first, int64_t last) {
        for (int64_t token = first; token < last; ++token)
            for (int64_t i = 0; i < half; ++i) {
                const double angle = float(rows.positions[token]) * frequencies[i];
                cos[token * half + i] = float(std::cos(angle));
                sin[token * half + i] = float(std::sin(angle));
            }
    });
}

void rotate_and_write(Board &board, const Attention &a, const Rows &rows, float *qkv,
                      const float *cos, const float *sin, void *kv) {
    const int64_t width = (a.heads + 2 * a.kv_heads) * a.dim, half = a.dim / 2;
    for_rows(board, rows.tokens, ROW_STEP, [&](int64_t from, int64_t last) {
        for (int64_t token = from; token < last; ++token) {
            float *row = qkv + token * width;
            const float *c = cos + token * half, *s = sin + token * half;
            for (int64_t head = 0; head < a.heads + a.kv_heads; ++head) {
                float *one = row + head * a.dim, *two = one + half;
                for (int64_t i = 0; i < half; ++i) {
                    const float x = one[i], y = two[i];
                    one[i] = x * c[i] - y * s[i];
                    two[i] = y * c[i] + x * s[i];
                }
            }
            if (a.kv_bf16)
                write_token(a, row, rows.slots[token], (bf16 *)kv);
            else
                write_token(a, row, rows.slots[token], (float *)kv);
        }
    });
}

void attend(Board &board, const Attention &a, const Rows &rows, const float *qkv, const void *kv,
            float *out, uint8_t *scratch) {
    scratch += -uintptr_t(scratch) & 63;
    Tiles tiles(a, rows, board.threads());
    Tile own, next;
    for (bool more = tiles.find(board.claim(), own); more;) {
        more = tiles.find(board.claim(), next);
        attend_tile(a, own, more ? &next : nullptr, qkv, kv, out, scratch);
        own = next;
    }
    board.wait();
}

int64_t attention_bytes(const Attention &a) {
    const int64_t queries = TILE * (a.heads / a.kv_heads);
    const int64_t plain = (2 * KEYS * a.dim + queries * (2 * a.dim + 17)) * 4;
    const int64_t wide = KEYS * a.dim * 4 + queries * (a.dim * 6 + 128);
    return std::max(plain, wide) + 256;
}

}  // namespace skerry
