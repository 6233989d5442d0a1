// A matrix times a few vectors: y[b] = W x[b], sixteen rows of W at a time.
//
// W [rows, columns] is kept in panels of sixteen rows; lane i of every vector belongs to row i of
// its panel, so no sum ever runs across lanes, and a thread reads memory from front to back. What
// a panel holds for its columns k = 0, 1, …:
//
//   float32   [k][16]
//   bfloat16  [k/2][16][2]       two columns side by side, as the bfloat16 product wants them
//   4 bits    [k/32] × { 4 × uint32[16] codes, float16[16] scales, float16[16] zeros }
//   8 bits    [k/32] × { int8[32][16] codes, float16[16] scales }
//
// Of the 4 bits word w of a group holds columns 8w … 8w + 7: nibbles 0 … 3 are the even columns,
// 4 … 7 the odd ones. A weight is code · scale + zero (8 bits: code · scale).

#pragma once

#include "lanes.h"

namespace minifer {

enum Kind : int32_t { F32 = 0, BF16 = 1, Q4 = 2, Q8 = 3 };

constexpr int GROUP = 32;                       // columns that share a scale
constexpr int Q4_BYTES = 4 * 64 + 2 * 32;       // of a group of a panel
constexpr int Q8_BYTES = GROUP * LANES + 32;

inline int64_t panel_bytes(int kind, int64_t columns) {
    switch (kind) {
        case F32: return columns * LANES * 4;
        case BF16: return columns * LANES * 2;
        case Q4: return columns / GROUP * Q4_BYTES;
        default: return columns / GROUP * Q8_BYTES;
    }
}

// IEEE float16 → float32.
inline f32x16 load_half(const uint16_t* from) {
#ifdef MINIFER_AVX512
    return same_bits<f32x16>(_mm512_cvtph_ps(load_as<__m256i>(from)));
#else
    u32x16 h = __builtin_convertvector(load_as<u16x16>(from), u32x16);
    u32x16 sign = (h & 0x8000u) << 16, magnitude = (h & 0x7fffu) << 13;
    f32x16 value = same_bits<f32x16>(magnitude) * same_bits<float>(0x77800000u);  // · 2^112
    i32x16 special = same_bits<i32x16>((h & 0x7c00u) == 0x7c00u);  // infinity or NaN
    value = choose(special, same_bits<f32x16>(magnitude | 0x7f800000u), value);
    return same_bits<f32x16>(same_bits<u32x16>(value) | sign);
#endif
}

// A few vectors are done with a line of W before memory brings the next: ask for it this far ahead.
// Panels follow one another, so the end of one asks for the beginning of the next.
constexpr int AHEAD = 4096;

inline void fetch(const char* from, int bytes) {
    for (int i = 0; i < bytes; i += 64) __builtin_prefetch(from + AHEAD + i, 0, 0);  // used once: leave the caches to others
}

// -- one group or pair of columns as float32 lanes

inline f32x16 code4(u32x16 word, int column) {  // column 0 … 7 of the word
    int nibble = column / 2 + (column % 2) * 4;
    return __builtin_convertvector(same_bits<i32x16>((word >> (4 * nibble)) & 15u), f32x16);
}

inline f32x16 code8(const char* codes, int column) {
#ifdef MINIFER_AVX512  // GCC 12 would convert the sixteen one by one
    __m512i wide = _mm512_cvtepi8_epi32(load_as<__m128i>(codes + LANES * column));
    return same_bits<f32x16>(_mm512_cvtepi32_ps(wide));
#endif
    return __builtin_convertvector(load_as<i8x16>(codes + LANES * column), f32x16);
}

// x[b], and where W has zeros the sum of each group of 32 of its entries.
template <class T>
struct Vector {
    const T* values;
    const float* sums;
};

// -- W in float32 arithmetic: any kind, any CPU. acc[b] += panel · x[b].

template <int B>
inline void dot(int kind, const char* panel, int columns, const Vector<float>* in, f32x16* acc) {
    const float* x[B];
    for (int b = 0; b < B; b++) x[b] = in[b].values;
    if (kind == F32) {
        const float* w = (const float*)panel;
        for (int k = 0; k < columns; k++) {
            f32x16 v = load(w + LANES * k);
            for (int b = 0; b < B; b++) acc[b] += v * x[b][k];
        }
    } else if (kind == BF16) {
        for (int k = 0; k < columns; k += 2) {
            u32x16 pair = load_as<u32x16>(panel + 32 * k);
            f32x16 even = same_bits<f32x16>(pair << 16), odd = same_bits<f32x16>(pair & 0xffff0000u);
            for (int b = 0; b < B; b++) acc[b] += even * x[b][k] + odd * x[b][k + 1];
        }
    } else if (kind == Q4) {
        for (int k = 0; k < columns; k += GROUP, panel += Q4_BYTES) {
            const uint16_t* tail = (const uint16_t*)(panel + 256);
            f32x16 scale = load_half(tail), zero = load_half(tail + LANES);
            f32x16 part[B] = {};
            for (int w = 0; w < 4; w++) {
                u32x16 word = load_as<u32x16>(panel + 64 * w);
                for (int i = 0; i < 8; i++) {
                    f32x16 code = code4(word, i);
                    for (int b = 0; b < B; b++) part[b] += code * x[b][k + 8 * w + i];
                }
            }
            for (int b = 0; b < B; b++) acc[b] += part[b] * scale + zero * in[b].sums[k / GROUP];
        }
    } else {
        for (int k = 0; k < columns; k += GROUP, panel += Q8_BYTES) {
            f32x16 part[B] = {};
            for (int i = 0; i < GROUP; i++) {
                f32x16 code = code8(panel, i);
                for (int b = 0; b < B; b++) part[b] += code * x[b][k + i];
            }
            f32x16 scale = load_half((const uint16_t*)(panel + GROUP * LANES));
            for (int b = 0; b < B; b++) acc[b] += part[b] * scale;
        }
    }
}

// A quantised panel as float32, for when it is used by many vectors.
inline void unpack(int kind, const char* panel, int columns, float* to) {
    for (int k = 0; k < columns; k += GROUP) {
        if (kind == Q4) {
            const uint16_t* tail = (const uint16_t*)(panel + 256);
            f32x16 scale = load_half(tail), zero = load_half(tail + LANES);
            for (int i = 0; i < GROUP; i++) {
                u32x16 word = load_as<u32x16>(panel + i / 8 * 64);
                store(to + LANES * (k + i), code4(word, i % 8) * scale + zero);
            }
            panel += Q4_BYTES;
        } else {
            f32x16 scale = load_half((const uint16_t*)(panel + GROUP * LANES));
            for (int i = 0; i < GROUP; i++) store(to + LANES * (k + i), code8(panel, i) * scale);
            panel += Q8_BYTES;
        }
    }
}

#ifdef MINIFER_BF16_DOT

// -- W in bfloat16 arithmetic: 32 products an instruction, summed in float32.

inline f32x16 dot_pairs(f32x16 acc, __m512i weights, const bf16* x) {
    __m512i pair = _mm512_set1_epi32(load_as<int32_t>(x));  // columns k, k + 1 for every row
    return same_bits<f32x16>(
        _mm512_dpbf16_ps(same_bits<__m512>(acc), (__m512bh)weights, (__m512bh)pair));
}

// A code 0 … 15 written into the mantissa of 128 is the bfloat16 of 128 + code. The 128 is taken
// off at the end of a group, from the sum of x: acc += Σ (128 + code) x · scale + (zero − 128 scale) Σ x.
constexpr float OFFSET = 128;

inline __m512i codes4(__m512i word, int pair) {  // columns 2·pair, 2·pair + 1
    const __m512i nibble = _mm512_set1_epi16(15), offset = _mm512_set1_epi16(0x4300);
    return _mm512_ternarylogic_epi32(_mm512_srli_epi16(word, 4 * pair), nibble, offset, 0xEA);  // a & b | c
}

// Two columns of int8 codes as pairs of bfloat16; both are exact.
inline __m512i codes8(const char* codes, int pair) {
    u32x16 even = same_bits<u32x16>(code8(codes, 2 * pair)), odd = same_bits<u32x16>(code8(codes, 2 * pair + 1));
    return same_bits<__m512i>((even >> 16) | odd);
}

// Chains of dependent sums are kept apart, so that one need not wait for the other.
template <int B>
constexpr int CHAINS = B == 1 ? 4 : B == 2 ? 2 : 1;

template <int B>
inline void dot(int kind, const char* panel, int columns, const Vector<bf16>* in, f32x16* acc) {
    constexpr int U = CHAINS<B>;
    const bf16* x[B];
    for (int b = 0; b < B; b++) x[b] = in[b].values;
    if (kind == BF16) {
        f32x16 part[U][B] = {};
        for (int k = 0; k < columns; k += 2 * U)
            for (int u = 0; u < U; u++) {
                if (B <= 4) fetch(panel + 32 * (k + 2 * u), 64);
                __m512i w = load_as<__m512i>(panel + 32 * (k + 2 * u));
                for (int b = 0; b < B; b++) part[u][b] = dot_pairs(part[u][b], w, x[b] + k + 2 * u);
            }
        for (int u = 0; u < U; u++)
            for (int b = 0; b < B; b++) acc[b] += part[u][b];
    } else if (kind == Q4) {
        for (int k = 0; k < columns; k += GROUP, panel += Q4_BYTES) {
            f32x16 part[U][B] = {};
            fetch(panel, Q4_BYTES);
            for (int w = 0; w < 4; w++) {
                __m512i word = load_as<__m512i>(panel + 64 * w);
                for (int i = 0; i < 4; i++) {
                    __m512i codes = codes4(word, i);
                    for (int b = 0; b < B; b++)
                        part[i % U][b] = dot_pairs(part[i % U][b], codes, x[b] + k + 8 * w + 2 * i);
                }
            }
            const uint16_t* tail = (const uint16_t*)(panel + 256);
            f32x16 scale = load_half(tail), zero = load_half(tail + LANES) - OFFSET * scale;
            for (int b = 0; b < B; b++) {
                for (int u = 1; u < U; u++) part[0][b] += part[u][b];
                acc[b] += part[0][b] * scale + zero * in[b].sums[k / GROUP];
            }
        }
    } else {
        for (int k = 0; k < columns; k += GROUP, panel += Q8_BYTES) {
            f32x16 part[U][B] = {};
            fetch(panel, Q8_BYTES);
            for (int i = 0; i < GROUP / 2; i++) {
                __m512i codes = codes8(panel, i);
                for (int b = 0; b < B; b++)
                    part[i % U][b] = dot_pairs(part[i % U][b], codes, x[b] + k + 2 * i);
            }
            f32x16 scale = load_half((const uint16_t*)(panel + GROUP * LANES));
            for (int b = 0; b < B; b++) {
                for (int u = 1; u < U; u++) part[0][b] += part[u][b];
                acc[b] += part[0][b] * scale;
            }
        }
    }
}

// A quantised panel in the layout of bfloat16.
inline void unpack(int kind, const char* panel, int columns, bf16* to) {
    for (int k = 0; k < columns; k += GROUP) {
        const uint16_t* tail = (const uint16_t*)(panel + (kind == Q4 ? 256 : GROUP * LANES));
        f32x16 scale = load_half(tail), zero = kind == Q4 ? load_half(tail + LANES) - OFFSET * scale : f32x16{};
        for (int i = 0; i < GROUP / 2; i++) {
            __m512i codes = kind == Q4 ? codes4(load_as<__m512i>(panel + i / 4 * 64), i % 4)
                                       : codes8(panel, i);
            u32x16 bits = same_bits<u32x16>(codes);
            f32x16 even = same_bits<f32x16>(bits << 16) * scale + zero;
            f32x16 odd = same_bits<f32x16>(bits & 0xffff0000u) * scale + zero;
            bf16 halves[2 * LANES];
            store(halves, even);
            store(halves + LANES, odd);
            u32x16 low = __builtin_convertvector(load_as<u16x16>(halves), u32x16);
            u32x16 high = __builtin_convertvector(load_as<u16x16>(halves + LANES), u32x16);
            u32x16 pair = low | (high << 16);
            std::memcpy(to + LANES * (k + 2 * i), &pair, sizeof pair);
        }
        panel += kind == Q4 ? Q4_BYTES : Q8_BYTES;
    }
}

#endif

}  // namespace minifer
