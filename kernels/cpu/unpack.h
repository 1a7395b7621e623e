// Stored rows → numbers: sixteen rows at a time for products, one for embeddings.
//
// Layouts (little endian, d and m fp16): Q8_0 d, 32 × int8: d·q. Q4_0 d, 16 bytes: d·(q−8).
// Q4_1 d, m, 16 bytes: d·q + m. Low nibbles are the first half of a block.

#pragma once

#include "products.h"

namespace skerry {

inline const uint8_t *row_of(const Panel &panel, int64_t row) {  // the last one fills up
    return panel.base + std::min(row, panel.count - 1) * panel.stride;
}

#ifdef SKERRY_WIDE

inline __m512 halves(__m512i dwords) { return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(dwords)); }

// Sixteen rows at equal distances, of which one place is looked at.
struct Place {
    const uint8_t *fours[4];  // in rows 0, 4, 8, 12
    int64_t stride;
    const uint8_t *row(int i) const { return fours[i / 4] + i % 4 * stride; }
    void move(int64_t bytes) {
        for (const uint8_t *&four : fours) four += bytes;
    }
};

template <typename T>
inline __m512i heads_of(const Place &place) {
    auto one = [&](int i) { return int(read<T>(place.row(i))); };
    return _mm512_set_epi32(one(15), one(14), one(13), one(12), one(11), one(10), one(9), one(8),
                            one(7), one(6), one(5), one(4), one(3), one(2), one(1), one(0));
}

// 16 bytes of each of 16 rows → four vectors, each with four bytes of every row.
inline void quads(const Place &place, int64_t at, __m512i (&out)[4]) {
    __m512i z[4];
    for (int i = 0; i < 4; ++i) {
        auto lane = [&](int l) {
            return _mm_loadu_si128((const __m128i *)(place.row(4 * l + i) + at));
        };
        __m512i v = _mm512_castsi128_si512(lane(0));
        v = _mm512_inserti32x4(v, lane(1), 1);
        v = _mm512_inserti32x4(v, lane(2), 2);
        z[i] = _mm512_inserti32x4(v, lane(3), 3);
    }
    __m512i a = _mm512_unpacklo_epi32(z[0], z[1]), b = _mm512_unpacklo_epi32(z[2], z[3]);
    __m512i c = _mm512_unpackhi_epi32(z[0], z[1]), d = _mm512_unpackhi_epi32(z[2], z[3]);
    out[0] = _mm512_unpacklo_epi64(a, b);
    out[1] = _mm512_unpackhi_epi64(a, b);
    out[2] = _mm512_unpacklo_epi64(c, d);
    out[3] = _mm512_unpackhi_epi64(c, d);
}

#endif

#ifdef SKERRY_INTEGER

// Scales and zeros of a 4-bit block of 16 rows.
template <int KIND>
inline void heads(const Place &place, __m512 &scales, __m512 &zeros) {
    if (KIND == Q4_1) {
        const __m512i both = heads_of<uint32_t>(place);
        scales = halves(both);
        zeros = halves(_mm512_srli_epi32(both, 16));
    } else {
        scales = halves(heads_of<uint16_t>(place));
        zeros = _mm512_mul_ps(scales, _mm512_set1_ps(-8));
    }
}

struct Unpacked {  // one block of 16 rows, in bytes
    __m512i quads[8];
    __m512 scales, zeros;
};

template <int KIND>
inline void unpack_block(const Place &place, Unpacked &out) {
    const __m512i low = _mm512_set1_epi8(15), flip = _mm512_set1_epi8(int8_t(0x80));
    __m512i four[4];
    if (KIND == Q8_0) {
        quads(place, 2, four);
        for (int i = 0; i < 4; ++i) out.quads[i] = _mm512_xor_si512(four[i], flip);
        quads(place, 18, four);
        for (int i = 0; i < 4; ++i) out.quads[4 + i] = _mm512_xor_si512(four[i], flip);
        out.scales = halves(heads_of<uint16_t>(place));
        return;
    }
    quads(place, block_bytes(KIND) - 16, four);
    for (int i = 0; i < 4; ++i) {
        out.quads[i] = _mm512_and_si512(four[i], low);
        out.quads[4 + i] = _mm512_and_si512(_mm512_srli_epi16(four[i], 4), low);
    }
    heads<KIND>(place, out.scales, out.zeros);
}

// Goes through the blocks of a panel, and asks for the memory of the panel `ahead` rows further on.
template <int KIND>
struct Unpacker {
    Place place;
    const uint8_t *next;
    Unpacker() = default;
    Unpacker(const Panel &panel, int64_t ahead)
        : place{{}, panel.stride}, next(panel.base + ahead * panel.stride) {
        for (int i = 0; i < 4; ++i) place.fours[i] = panel.base + i * 4 * panel.stride;
    }
    void block(Unpacked &out) {
        constexpr int64_t size = block_bytes(KIND);
        for (int64_t i = 0; i < 16 * size; i += 64) _mm_prefetch(next + i, _MM_HINT_T0);
        next += 16 * size;
        unpack_block<KIND>(place, out);
        place.move(size);
    }
};

// `panel` itself, or where it has fewer than 16 rows, a copy that is filled up with zeros.
template <int KIND>
Panel whole(const Panel &panel, int64_t blocks, uint8_t *copy) {
    if (panel.count == 16) return panel;
    const int64_t row = blocks * block_bytes(KIND);
    std::memset(copy, 0, size_t(16 * row));
    for (int64_t i = 0; i < panel.count; ++i)
        std::memcpy(copy + i * row, panel.base + i * panel.stride, size_t(row));
    return Panel{copy, row, KIND, panel.first, 16};
}

#endif

#ifdef SKERRY_WIDE

// Values k … k+15 of a row; k is a multiple of 16.
template <int KIND>
inline __m512 values_at(const uint8_t *row, int64_t k) {
    if (KIND == F32) return _mm512_loadu_ps((const float *)row + k);
    if (KIND == F16) return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(row + 2 * k)));
    if (KIND == BF16)
        return _mm512_castsi512_ps(_mm512_slli_epi32(
            _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(row + 2 * k))), 16));
    const uint8_t *block = row + k / BLOCK * block_bytes(KIND);
    const __m512 scale = _mm512_set1_ps(half_to_float(read<uint16_t>(block)));
    if (KIND == Q8_0) {
        __m128i bytes = _mm_loadu_si128((const __m128i *)(block + 2 + k % BLOCK));
        return _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)), scale);
    }
    __m128i packed = _mm_loadu_si128((const __m128i *)(block + block_bytes(KIND) - 16));
    if (k % BLOCK) packed = _mm_srli_epi16(packed, 4);
    __m512i nibbles = _mm512_cvtepu8_epi32(_mm_and_si128(packed, _mm_set1_epi8(15)));
    if (KIND == Q4_0) {
        nibbles = _mm512_sub_epi32(nibbles, _mm512_set1_epi32(8));
        return _mm512_mul_ps(_mm512_cvtepi32_ps(nibbles), scale);
    }
    const __m512 zero = _mm512_set1_ps(half_to_float(read<uint16_t>(block + 2)));
    return _mm512_add_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(nibbles), scale), zero);
}

template <int KIND>
void unpack_floats(const Panel &panel, int64_t columns, float *out) {
    const uint8_t *rows[16];
    for (int i = 0; i < 16; ++i) rows[i] = row_of(panel, i);
    for (int64_t k = 0; k < columns; k += 16) {
        __m512i v[16];
        for (int i = 0; i < 16; ++i) v[i] = _mm512_castps_si512(values_at<KIND>(rows[i], k));
        transpose(v);
        for (int i = 0; i < 16; ++i) _mm512_storeu_si512(out + (k + i) * 16, v[i]);
    }
}

template <int KIND>
void decode_values(const uint8_t *row, int64_t columns, float *out) {
    for (int64_t k = 0; k < columns; k += 16) _mm512_storeu_ps(out + k, values_at<KIND>(row, k));
}

#else

template <int KIND>
void decode_values(const uint8_t *row, int64_t columns, float *out) {
    for (int64_t k = 0; k < columns; ++k) {
        if (KIND == F32) {
            out[k] = read<float>(row + 4 * k);
        } else if (KIND == F16) {
            out[k] = half_to_float(read<uint16_t>(row + 2 * k));
        } else if (KIND == BF16) {
            out[k] = load(read<bf16>(row + 2 * k));
        } else {
            const uint8_t *block = row + k / BLOCK * block_bytes(KIND);
            float scale = half_to_float(read<uint16_t>(block));
            int i = int(k % BLOCK);
            if (KIND == Q8_0) {
                out[k] = float(int8_t(block[2 + i])) * scale;
                continue;
            }
            int byte = block[block_bytes(KIND) - 16 + i % 16], nibble = i < 16 ? byte & 15 : byte >> 4;
            if (KIND == Q4_0)
                out[k] = float(nibble - 8) * scale;
            else
                out[k] = float(nibble) * scale + half_to_float(read<uint16_t>(block + 2));
        }
    }
}

template <int KIND>
void unpack_floats(const Panel &panel, int64_t columns, float *out) {
    float values[BLOCK];
    for (int i = 0; i < 16; ++i) {
        const uint8_t *row = row_of(panel, i);
        for (int64_t k = 0; k < columns; k += BLOCK, row += block_bytes(KIND)) {
            decode_values<KIND>(row, BLOCK, values);
            for (int64_t j = 0; j < BLOCK; ++j) out[(k + j) * 16 + i] = values[j];
        }
    }
}

#endif

}  // namespace skerry
