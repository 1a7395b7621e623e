// y[t][n] = Σ_k x[t][k] · w[n][k], sixteen n at a time.
//
// A panel of 16 stored rows is unpacked once for many tokens: integers as [k/4][16 rows][4 bytes],
// floats as [k][16 rows]. Each lane of a vector then belongs to one output, and goes through k in
// order, block by block. Integer sums are exact; what follows is the same for every token:
// total = float(Σ q·x) · x's scale, sum = fma(total, d, sum), sum = fma(zero, x's sum, sum).

#include "products.h"

#include "unpack.h"

namespace skerry {

namespace {

constexpr float LARGEST = 32512;  // its high part is 127, its low part fits a signed byte
constexpr int64_t FEW = 16;   // tokens below which panels are claimed several at a time:
constexpr int64_t RUNS = 4;   // so that each thread comes back this often
constexpr int64_t ROW_BYTES = 384 << 10;  // operands that are gone through for one panel: L2

#ifdef SKERRY_INTEGER

template <int KIND, int ROWS>
inline void integer_rows(const Unpacked *weight, const Operands &x, int64_t token, __m512 *sums) {
    const int64_t blocks = x.ins / BLOCK, group = token / GROUP, lane = token % GROUP;
    const int8_t *high = x.high + group * x.ins * GROUP + lane * 4;
    const int8_t *low = x.low + group * x.ins * GROUP + lane * 4;
    const int64_t own = group * blocks * GROUP + lane;
    const float *scales = x.scales + own, *own_sums = x.sums + own;
    const int32_t *offsets = x.offsets + own;
    __m512 total[ROWS];
    for (int r = 0; r < ROWS; ++r) total[r] = _mm512_setzero_ps();
    for (int64_t b = 0; b < blocks; ++b) {
        const Unpacked &w = weight[b];
        __m512i part[ROWS];
        for (int r = 0; r < ROWS; ++r) part[r] = _mm512_setzero_si512();
        for (int j = 0; j < 8; ++j)
            for (int r = 0; r < ROWS; ++r)
                part[r] = _mm512_dpbusd_epi32(part[r], w.quads[j],
                                              _mm512_set1_epi32(read<int>(high + j * 32 + r * 4)));
        for (int r = 0; r < ROWS; ++r) part[r] = _mm512_slli_epi32(part[r], 8);
        for (int j = 0; j < 8; ++j)
            for (int r = 0; r < ROWS; ++r)
                part[r] = _mm512_dpbusd_epi32(part[r], w.quads[j],
                                              _mm512_set1_epi32(read<int>(low + j * 32 + r * 4)));
        for (int r = 0; r < ROWS; ++r) {
            if (KIND == Q8_0) part[r] = _mm512_sub_epi32(part[r], _mm512_set1_epi32(offsets[r]));
            __m512 value = _mm512_mul_ps(_mm512_cvtepi32_ps(part[r]), _mm512_set1_ps(scales[r]));
            total[r] = _mm512_fmadd_ps(value, w.scales, total[r]);
            if (KIND != Q8_0)
                total[r] = _mm512_fmadd_ps(w.zeros, _mm512_set1_ps(own_sums[r]), total[r]);
        }
        high += 256, low += 256, scales += 8, own_sums += 8, offsets += 8;
    }
    for (int r = 0; r < ROWS; ++r) sums[r] = total[r];
}

#endif

// ------------------------------------------------------------------ floats

#ifdef SKERRY_WIDE

// Four sums of every fourth k each: one alone would wait for itself, and lose more to rounding.
template <int ROWS>
inline void float_rows(const float *weight, const Operands &x, int64_t token, __m512 *sums) {
    const float *values = x.values + token * x.ins;
    __m512 parts[ROWS][4];
    for (int r = 0; r < ROWS; ++r)
        for (int i = 0; i < 4; ++i) parts[r][i] = _mm512_setzero_ps();
    for (int64_t k = 0; k < x.ins; k += 4)
        for (int i = 0; i < 4; ++i) {
            const __m512 w = _mm512_loadu_ps(weight + (k + i) * 16);
            for (int r = 0; r < ROWS; ++r)
                parts[r][i] =
                    _mm512_fmadd_ps(w, _mm512_set1_ps(values[r * x.ins + k + i]), parts[r][i]);
        }
    for (int r = 0; r < ROWS; ++r)
        sums[r] = _mm512_add_ps(_mm512_add_ps(parts[r][0], parts[r][1]),
                                _mm512_add_ps(parts[r][2], parts[r][3]));
}

using Lanes = __m512;

#else

struct Lanes {
    float at[16];
};

template <int ROWS>
inline void float_rows(const float *weight, const Operands &x, int64_t token, Lanes *sums) {
    const float *values = x.values + token * x.ins;
    for (int r = 0; r < ROWS; ++r) {
        Lanes parts[4] = {};
        for (int64_t k = 0; k < x.ins; ++k)
            for (int i = 0; i < 16; ++i)
                parts[k % 4].at[i] += weight[k * 16 + i] * values[r * x.ins + k];
        for (int i = 0; i < 16; ++i)
            sums[r].at[i] = (parts[0].at[i] + parts[1].at[i]) + (parts[2].at[i] + parts[3].at[i]);
    }
}

#endif

// ------------------------------------------------------------------ one panel, many tokens

struct Target {
    float *y;
    int64_t stride;
    const float *bias;
    bool add;
};

#ifdef SKERRY_WIDE
inline void finish(const Target &to, const Panel &panel, int64_t token, __m512 sums) {
    const __mmask16 mask = __mmask16((1u << panel.count) - 1);
    float *y = to.y + token * to.stride + panel.first;
    if (to.bias != nullptr)
        sums = _mm512_add_ps(sums, _mm512_maskz_loadu_ps(mask, to.bias + panel.first));
    if (to.add) sums = _mm512_add_ps(_mm512_maskz_loadu_ps(mask, y), sums);
    _mm512_mask_storeu_ps(y, mask, sums);
}
#else
inline void finish(const Target &to, const Panel &panel, int64_t token, const Lanes &sums) {
    float *y = to.y + token * to.stride + panel.first;
    for (int64_t i = 0; i < panel.count; ++i) {
        float value = sums.at[i];
        if (to.bias != nullptr) value = value + to.bias[panel.first + i];
        y[i] = to.add ? y[i] + value : value;
    }
}
#endif

// Each computes that many tokens from the one given.
template <typename Eight, typename Four, typename Two, typename One>
void go_through(int64_t first, int64_t last, const Panel &panel, const Target &to, Eight eight,
                Four four, Two two, One one) {
    Lanes sums[8];
    for (int64_t token = first; token < last;) {
        int64_t left = last - token, count = left >= 8 ? 8 : left >= 4 ? 4 : left >= 2 ? 2 : 1;
        if (count == 8)
            eight(token, sums);
        else if (count == 4)
            four(token, sums);
        else if (count == 2)
            two(token, sums);
        else
            one(token, sums);
        for (int64_t r = 0; r < count; ++r) finish(to, panel, token + r, sums[r]);
        token += count;
    }
}

template <int KIND>
void panel_floats(const Panel &panel, const Operands &x, int64_t first, int64_t last,
                  const Target &to, uint8_t *scratch) {
    float *weight = (float *)scratch;
    unpack_floats<KIND>(panel, x.ins, weight);
    go_through(
        first, last, panel, to,
        [&](int64_t t, Lanes *s) { float_rows<4>(weight, x, t, s), float_rows<4>(weight, x, t + 4, s + 4); },
        [&](int64_t t, Lanes *s) { float_rows<4>(weight, x, t, s); },
        [&](int64_t t, Lanes *s) { float_rows<2>(weight, x, t, s); },
        [&](int64_t t, Lanes *s) { float_rows<1>(weight, x, t, s); });
}

#ifdef SKERRY_INTEGER
template <int KIND>
void panel_integers(const Panel &panel, const Operands &x, int64_t first, int64_t last,
                    const Target &to, uint8_t *scratch) {
    Unpacked *weight = (Unpacked *)scratch;
    const int64_t blocks = x.ins / BLOCK, row = blocks * block_bytes(KIND);
    if (panel.count == 16) {
        unpack<KIND>(panel, blocks, weight);
    } else {  // fill up with zeros, elsewhere
        uint8_t *copy = (uint8_t *)(weight + blocks);
        std::memset(copy, 0, size_t(16 * row));
        for (int64_t i = 0; i < panel.count; ++i)
            std::memcpy(copy + i * row, panel.base + i * panel.stride, size_t(row));
        unpack<KIND>(Panel{copy, row, KIND, panel.first, 16}, blocks, weight);
    }
    go_through(
        first, last, panel, to, [&](int64_t t, Lanes *s) { integer_rows<KIND, 8>(weight, x, t, s); },
        [&](int64_t t, Lanes *s) { integer_rows<KIND, 4>(weight, x, t, s); },
        [&](int64_t t, Lanes *s) { integer_rows<KIND, 2>(weight, x, t, s); },
        [&](int64_t t, Lanes *s) { integer_rows<KIND, 1>(weight, x, t, s); });
}
#endif

void panel_product([[maybe_unused]] const Product &product, const Panel &panel, const Operands &x, int64_t first,
                   int64_t last, const Target &to, uint8_t *scratch) {
#ifdef SKERRY_INTEGER
    if (!product.exact) {
        if (panel.kind == Q8_0) return panel_integers<Q8_0>(panel, x, first, last, to, scratch);
        if (panel.kind == Q4_0) return panel_integers<Q4_0>(panel, x, first, last, to, scratch);
        if (panel.kind == Q4_1) return panel_integers<Q4_1>(panel, x, first, last, to, scratch);
    }
#endif
    if (panel.kind == Q8_0) return panel_floats<Q8_0>(panel, x, first, last, to, scratch);
    if (panel.kind == Q4_0) return panel_floats<Q4_0>(panel, x, first, last, to, scratch);
    if (panel.kind == Q4_1) return panel_floats<Q4_1>(panel, x, first, last, to, scratch);
    if (panel.kind == F32) return panel_floats<F32>(panel, x, first, last, to, scratch);
    if (panel.kind == F16) return panel_floats<F16>(panel, x, first, last, to, scratch);
    panel_floats<BF16>(panel, x, first, last, to, scratch);
}

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
    return x;
}

#ifdef SKERRY_INTEGER
void to_integers(const Operands &x, int64_t token) {
    const int64_t blocks = x.ins / BLOCK;
    const __m512 limit = _mm512_set1_ps(LARGEST);
    const __m512i bias = _mm512_set1_epi32(128);
    for (int64_t b = 0; b < blocks; ++b) {
        const int64_t at = token * x.ins + b * BLOCK;
        const int64_t group = token / GROUP, lane = token % GROUP;
        const int64_t block = (group * blocks + b) * GROUP + lane;
        const int64_t quads = block * BLOCK - lane * (BLOCK - 4);
        const __m512 v[2] = {_mm512_loadu_ps(x.values + at), _mm512_loadu_ps(x.values + at + 16)};
        const __m512 sizes = _mm512_max_ps(_mm512_abs_ps(v[0]), _mm512_abs_ps(v[1]));
        const float largest = _mm512_reduce_max_ps(sizes);
        const __mmask16 poison = _mm512_fpclass_ps_mask(v[0], 0x99) |  // NaN or infinite
                                 _mm512_fpclass_ps_mask(v[1], 0x99);
        const float inverse = largest > 1e-30f && !poison ? LARGEST / largest : 0.0f;
        __m512i sum = _mm512_setzero_si512();
        for (int i = 0; i < 2; ++i) {
            __m512 scaled = _mm512_mul_ps(v[i], _mm512_set1_ps(inverse));
            scaled = _mm512_min_ps(limit, _mm512_max_ps(_mm512_sub_ps(_mm512_setzero_ps(), limit),
                                                        scaled));
            const __m512i value = _mm512_cvtps_epi32(scaled);
            const __m512i high = _mm512_srai_epi32(_mm512_add_epi32(value, bias), 8);
            const __m512i low = _mm512_sub_epi32(value, _mm512_slli_epi32(high, 8));
            int32_t bytes[2][4];
            _mm_storeu_si128((__m128i *)bytes[0], _mm512_cvtepi32_epi8(high));
            _mm_storeu_si128((__m128i *)bytes[1], _mm512_cvtepi32_epi8(low));
            for (int j = 0; j < 4; ++j) {
                std::memcpy(x.high + quads + (i * 4 + j) * 32, &bytes[0][j], 4);
                std::memcpy(x.low + quads + (i * 4 + j) * 32, &bytes[1][j], 4);
            }
            sum = _mm512_add_epi32(sum, value);
        }
        const int32_t total = _mm512_reduce_add_epi32(sum);
        x.scales[block] = poison ? NAN : largest / LARGEST;
        x.sums[block] = x.scales[block] * float(total);
        x.offsets[block] = total * 128;
    }
}
#else
void to_integers(const Operands &, int64_t) {}  // every product is one of floats
#endif

int64_t panel_bytes(const Product &product) { return product.ins * 64 + 64; }

void multiply(Board &board, const Product &product, const Operands &x, int64_t tokens, float *y,
              int64_t stride, bool add, uint8_t *scratch) {
    const Target to{y, stride, product.bias, add};
    scratch += -uintptr_t(scratch) & 63;
    const int64_t bytes = operand_bytes(1, product.ins);
    const int64_t rows = std::max<int64_t>(ROW_BYTES / bytes / 8 * 8, 8);
    const int64_t parts = (tokens + rows - 1) / rows;
    const int64_t pieces = parts * product.panel_count;
    // A panel for few tokens takes less time than two threads need to agree on who takes it.
    const int64_t run = tokens < FEW ? std::max<int64_t>(pieces / (board.threads() * RUNS), 1) : 1;
    for (int64_t first = board.claim(run); first < pieces; first = board.claim(run))
        for (int64_t at = first; at < std::min(first + run, pieces); ++at) {
            const int64_t part = at / product.panel_count;
            panel_product(product, product.panels[at % product.panel_count], x, part * rows,
                          std::min((part + 1) * rows, tokens), to, scratch);
        }
    board.wait();
}

void decode_row(int kind, const uint8_t *row, int64_t columns, float *out) {
    if (kind == Q8_0)
        decode_values<Q8_0>(row, columns, out);
    else if (kind == Q4_0)
        decode_values<Q4_0>(row, columns, out);
    else if (kind == Q4_1)
        decode_values<Q4_1>(row, columns, out);
    else if (kind == F32)
        decode_values<F32>(row, columns, out);
    else if (kind == F16)
        decode_values<F16>(row, columns, out);
    else
        decode_values<BF16>(row, columns, out);
}

}  // namespace skerry
