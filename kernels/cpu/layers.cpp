// The C interface: all layers of a decoder in one call, and single operations beside it.
//
// kernels/cpu/native.py mirrors the structs. A call runs on `threads` threads, which go through the
// phases of every layer together: starting threads for each operation would cost as much as the
// operation, for one token.

#include "attention.h"
#include "elementwise.h"
#include "products.h"

namespace skerry {

struct Layer {
    const float *attention_norm, *mlp_norm;
    Product qkv, output, gate_up, down;
    Attention attention;
    void *kv;
    int64_t group;  // which of the rows' tables
};

struct Model {
    const Layer *layers;
    int64_t layer_count, hidden, width;
    const float *frequencies;
    float eps;
};

namespace {

// Memory of one call, cut up in order.
struct Cutter {
    uint8_t *at;
    template <typename T>
    T *take(int64_t count) {
        at += -uintptr_t(at) & 63;
        T *found = (T *)at;
        at += count * int64_t(sizeof(T));
        return found;
    }
};

int64_t thread_bytes(const Model &m) {
    int64_t most = attention_bytes(m.layers[0].attention);
    for (int64_t i = 0; i < m.layer_count; ++i) {
        const Layer &l = m.layers[i];
        for (const Product *p : {&l.qkv, &l.output, &l.gate_up, &l.down})
            most = std::max(most, panel_bytes(*p));
    }
    return (most + 4095) / 4096 * 4096;
}

int64_t joined(const Attention &a) { return (a.heads + 2 * a.kv_heads) * a.dim; }

// Tokens that go through an MLP at a time: what it makes of them stays in the last cache.
constexpr int64_t MLP_TOKENS = 384;

struct Memory {
    float *qkv, *gate_up, *cos, *sin;
    Operands narrow, mixed, wide;
    uint8_t *threads;
    int64_t total;

    Memory(const Model &m, int64_t tokens, int threads_count, uint8_t *base) {
        const Attention &a = m.layers[0].attention;  // heads and sizes are those of all layers
        Cutter cut{base};
        qkv = cut.take<float>(tokens * joined(a));
        gate_up = cut.take<float>(std::min(tokens, MLP_TOKENS) * 2 * m.width);
        cos = cut.take<float>(tokens * a.dim / 2);
        sin = cut.take<float>(tokens * a.dim / 2);
        auto operands = [&](int64_t count, int64_t ins) {
            return operands_at(cut.take<uint8_t>(operand_bytes(count, ins)), count, ins);
        };
        narrow = operands(tokens, m.hidden);
        mixed = operands(tokens, a.heads * a.dim);
        wide = operands(std::min(tokens, MLP_TOKENS), m.width);
        threads = cut.take<uint8_t>(thread_bytes(m) * threads_count);
        total = cut.at - base;
    }
};

// A thread makes whole groups of operands: the tokens of one group share their cache lines.
constexpr int64_t ROW_STEP = GROUP;

// One phase: make the operands of `product` token by token.
template <typename Fill>
void prepare(Board &board, const Product &product, const Operands &x, int64_t tokens, Fill fill) {
    for_rows(board, tokens, ROW_STEP, [&](int64_t first, int64_t last) {
        for (int64_t token = first; token < last; ++token) fill(token, x.values + token * x.ins);
        if (!product.exact) to_integers(x, first, last);
    });
}

void mlp(Board &board, const Model &m, const Layer &l, float *residual, int64_t tokens,
         const Memory &memory, uint8_t *own) {
    prepare(board, l.gate_up, memory.narrow, tokens, [&](int64_t token, float *to) {
        rms_norm(m.hidden, residual + token * m.hidden, l.mlp_norm, m.eps, to);
    });
    if (gates(l.gate_up)) {
        multiply(board, l.gate_up, memory.narrow, tokens,
                 {memory.wide.values, m.width, nullptr, false, true}, own);
        prepare(board, l.down, memory.wide, tokens, [](int64_t, float *) {});
    } else {
        multiply(board, l.gate_up, memory.narrow, tokens,
                 {memory.gate_up, l.gate_up.outs, l.gate_up.bias, false, false}, own);
        prepare(board, l.down, memory.wide, tokens, [&](int64_t token, float *to) {
            silu_mul(m.width, memory.gate_up + token * 2 * m.width, to);
        });
    }
    multiply(board, l.down, memory.wide, tokens, {residual, m.hidden, l.down.bias, true, false},
             own);
}

void run(Board &board, const Model &m, const Rows *groups, float *residual, const Memory &memory) {
    const int64_t tokens = groups[0].tokens, hidden = m.hidden;
    uint8_t *own = memory.threads + omp_get_thread_num() * thread_bytes(m);
    turn(board, groups[0], m.frequencies, m.layers[0].attention.dim / 2, memory.cos, memory.sin);
    for (int64_t i = 0; i < m.layer_count; ++i) {
        const Layer &l = m.layers[i];
        const Attention &attention = l.attention;
        const Rows &rows = groups[l.group];
        prepare(board, l.qkv, memory.narrow, tokens, [&](int64_t token, float *to) {
            rms_norm(hidden, residual + token * hidden, l.attention_norm, m.eps, to);
        });
        multiply(board, l.qkv, memory.narrow, tokens,
                 {memory.qkv, l.qkv.outs, l.qkv.bias, false, false}, own);
        rotate_and_write(board, attention, rows, memory.qkv, memory.cos, memory.sin, l.kv);
        attend(board, attention, rows, memory.qkv, l.kv, memory.mixed.values, own);
        if (!l.output.exact)
            prepare(board, l.output, memory.mixed, tokens, [](int64_t, float *) {});
        multiply(board, l.output, memory.mixed, tokens, {residual, hidden, l.output.bias, true, false},
                 own);
        for (int64_t first = 0; first < tokens; first += MLP_TOKENS)
            mlp(board, m, l, residual + first * hidden, std::min(tokens - first, MLP_TOKENS),
                memory, own);
    }
}

}  // namespace

}  // namespace skerry

using namespace skerry;

extern "C" {

// Bytes of `memory` for the call below.
int64_t skerry_layers_bytes(const Model *model, int64_t tokens, int threads) {
    return Memory(*model, tokens, threads, nullptr).total + 64;
}

// What runs on several threads returns the nanoseconds they lost to other processes (Board::lost).

// residual [tokens, hidden] is changed in place; `groups`: rows and tables of each KV group.
int64_t skerry_layers(const Model *model, const Rows *groups, float *residual, uint8_t *memory,
                   int threads) {
    const Memory cut(*model, groups[0].tokens, threads, memory);
    return together(threads, [&](Board &board) { run(board, *model, groups, residual, cut); });
}

int64_t skerry_linear_bytes(const Product *product, int64_t tokens, int threads) {
    return operand_bytes(tokens, product->ins) + (panel_bytes(*product) + 64) * threads + 128;
}

int64_t skerry_linear(const Product *product, int64_t tokens, const float *x, float *y,
                   uint8_t *memory, int threads) {
    Cutter cut{memory};
    const Operands operands = operands_at(
        cut.take<uint8_t>(operand_bytes(tokens, product->ins)), tokens, product->ins);
    uint8_t *own = cut.take<uint8_t>(0);
    return together(threads, [&](Board &board) {
        prepare(board, *product, operands, tokens, [&](int64_t token, float *to) {
            std::memcpy(to, x + token * product->ins, size_t(product->ins) * sizeof(float));
        });
        multiply(board, *product, operands, tokens, {y, product->outs, product->bias, false, false},
                 own + omp_get_thread_num() * (panel_bytes(*product) + 64));
    });
}

void skerry_rows(int64_t kind, const uint8_t *base, int64_t stride, int64_t columns, int64_t count,
                 const int64_t *ids, float *out) {
    for (int64_t i = 0; i < count; ++i)
        decode_row(int(kind), base + ids[i] * stride, columns, out + i * columns);
}

void skerry_rms_norm(int64_t tokens, int64_t hidden, const float *x, const float *weight, float eps,
                     float *out) {
    for (int64_t token = 0; token < tokens; ++token)
        rms_norm(hidden, x + token * hidden, weight, eps, out + token * hidden);
}

void skerry_silu_mul(int64_t tokens, int64_t width, const float *gate_up, float *out) {
    for (int64_t token = 0; token < tokens; ++token)
        silu_mul(width, gate_up + token * 2 * width, out + token * width);
}

int64_t skerry_attention_bytes(const Attention *attention, int64_t tokens, int threads) {
    return tokens * attention->dim * 4 + (attention_bytes(*attention) + 64) * threads + 256;
}

// Rotate and write, then attend: qkv is changed in place.
int64_t skerry_attention(const Attention *attention, const Rows *rows, const float *frequencies,
                      float *qkv, void *kv, float *out, uint8_t *memory, int threads) {
    Cutter cut{memory};
    const int64_t half = attention->dim / 2;
    float *cos = cut.take<float>(rows->tokens * half), *sin = cut.take<float>(rows->tokens * half);
    uint8_t *own = cut.take<uint8_t>(0);
    return together(threads, [&](Board &board) {
        turn(board, *rows, frequencies, half, cos, sin);
        rotate_and_write(board, *attention, *rows, qkv, cos, sin, kv);
        attend(board, *attention, *rows, qkv, kv, out,
               own + omp_get_thread_num() * (attention_bytes(*attention) + 64));
    });
}

}  // extern "C"
