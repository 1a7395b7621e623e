// Rotary embedding, writing of KV into its slots, and attention over paged KV.

#pragma once

#include "team.h"

namespace skerry {

// One layer's KV [block, k/v, kv_head, token, dim]; distances in elements. Query heads are
// `heads / kv_heads` for each KV head. A token sees the last `window` positions, its own included;
// 0: all.
struct Attention {
    int64_t heads, kv_heads, dim;
    int64_t to_block, to_value, to_head, block_tokens;
    int64_t kv_bf16, window;
    float scale;
};

// How tokens belong to sequences. spans[row] = (first token, tokens, position of the first).
// tables[row][i]: the block of positions i·block_tokens …; slots[token]: where its own KV goes.
struct Rows {
    int64_t count, tokens;
    const int32_t *spans, *tables;
    int64_t table_width;
    const int64_t *slots;
    const int64_t *positions;
};

// cos and sin [tokens, dim/2] of position · frequency. One phase.
void turn(Board &board, const Rows &rows, const float *frequencies, int64_t half, float *cos,
          float *sin);

// Rotate q and k of each token of qkv [tokens, heads + 2·kv_heads, dim] in place, then put k and v
// into the token's slot. One phase.
void rotate_and_write(Board &board, const Attention &a, const Rows &rows, float *qkv,
                      const float *cos, const float *sin, void *kv);

// out [tokens, heads·dim]. One phase; `scratch` of `attention_bytes` belongs to the thread alone.
void attend(Board &board, const Attention &a, const Rows &rows, const float *qkv, const void *kv,
            float *out, uint8_t *scratch);
int64_t attention_bytes(const Attention &a);

}  // namespace skerry
