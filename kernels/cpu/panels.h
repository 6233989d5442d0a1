// A matrix times a few vectors: y[b] = W x[b], sixteen rows of W at a time.
//
// W [rows, columns] is kept in panels of sixteen rows; lane i of every vector belongs to row i of
// its panel, so no sum ever runs across lanes, and a thread reads memory from front to back. What
// a panel holds for its columns k = 0, 1, …:
//
//   float32   [k][16]
//   bfloat16  [k/2][16][2]       two columns side by side, as the bfloat16 product wants them
//   4 bits    [k/32] × { 4 × uint32[16] codes, float16[16] scales, float16[16] zeros }
//   8 bits    [k/32] × { 8 × uint32[16] codes, float16[16] scales }
//
// Word w of a group holds four columns of 8 bits, a byte each, or eight of 4 bits: 8w … 8w + 3 are
// the low halves of its bytes, 8w + 4 … 8w + 7 the high ones. A weight is code · scale + zero; codes
// of 8 bits are 128 above the checkpoint's, so their zero is −128 · scale.

#pragma once

#include <algorithm>
#include <vector>

#include "lanes.h"

namespace minifer {

constexpr int FEW = 4;    // vectors up to which a panel is soon done with, and memory is what counts
constexpr int SOME = 32;  // vectors up to which codes are used as they are; more of them unpack a panel

enum Kind : int32_t { F32 = 0, BF16 = 1, Q4 = 2, Q8 = 3 };

constexpr int GROUP = 32;                       // columns that share a scale

inline int64_t panel_bytes(int kind, int64_t columns) {
    switch (kind) {
        case F32: return columns * LANES * 4;
        case BF16: return columns * LANES * 2;
        case Q4: return columns / GROUP * (4 * 64 + 2 * 32);
        default: return columns / GROUP * (8 * 64 + 32);
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

// Vectors are done with a line of W before memory brings the next: ask for it this far ahead. Panels
// follow one another, so the end of one asks for the beginning of the next.
constexpr int AHEAD = 8192;

// `once`: the panel is not read again in this step, so the caches are left to others.
template <bool once>
inline void fetch(const char* from, int bytes) {
    for (int i = 0; i < bytes; i += 64) __builtin_prefetch(from + AHEAD + i, 0, once ? 0 : 2);
}

// -- one group of a quantised panel

struct Codes4 {
    static constexpr int TAIL = 4 * 64, BYTES = TAIL + 2 * 32;

    static f32x16 code(const char* group, int column) {
        u32x16 word = load_as<u32x16>(group + column / 8 * 64);
        int shift = column % 4 * 8 + column / 4 % 2 * 4;
        return __builtin_convertvector(same_bits<i32x16>((word >> shift) & 15u), f32x16);
    }
    static float at(const char* group, int column, int lane) {
        uint8_t both = group[column / 8 * 64 + lane * 4 + column % 4];
        return column / 4 % 2 ? both >> 4 : both & 15;
    }
    static f32x16 zero(const char* group, f32x16) {
        return load_half((const uint16_t*)(group + TAIL) + LANES);
    }
#ifdef MINIFER_BF16_DOT
    template <class Use>
    static void each(const char* group, Use use) {  // four columns of each row at a time, as bytes
        const __m512i low = _mm512_set1_epi8(15);
        for (int w = 0; w < 4; w++) {
            __m512i word = load_as<__m512i>(group + 64 * w);
            use(_mm512_and_si512(word, low), 8 * w);
            use(_mm512_and_si512(_mm512_srli_epi16(word, 4), low), 8 * w + 4);
        }
    }
#endif
};

struct Codes8 {
    static constexpr int TAIL = 8 * 64, BYTES = TAIL + 32;

    static f32x16 code(const char* group, int column) {
        u32x16 word = load_as<u32x16>(group + column / 4 * 64);
        return __builtin_convertvector(same_bits<i32x16>((word >> (column % 4 * 8)) & 255u), f32x16);
    }
    static float at(const char* group, int column, int lane) {
        return uint8_t(group[column / 4 * 64 + lane * 4 + column % 4]);
    }
    static f32x16 zero(const char*, f32x16 scale) { return -128 * scale; }
#ifdef MINIFER_BF16_DOT
    template <class Use>
    static void each(const char* group, Use use) {
        for (int w = 0; w < 8; w++) use(load_as<__m512i>(group + 64 * w), 4 * w);
    }
#endif
};

template <class Codes>
inline f32x16 scale_of(const char* group) {
    return load_half((const uint16_t*)(group + Codes::TAIL));
}

// Row `row` of a matrix as float32: how a token is looked up in a head that is its embedding too.
template <class Codes>
inline void one_row(const char* panel, int lane, int columns, float* to) {
    for (int k = 0; k < columns; k += GROUP, panel += Codes::BYTES) {
        f32x16 scale = scale_of<Codes>(panel), zero = Codes::zero(panel, scale);
        for (int i = 0; i < GROUP; i++) to[k + i] = Codes::at(panel, i, lane) * scale[lane] + zero[lane];
    }
}

inline void row_of(int kind, const char* data, int64_t row, int columns, float* to) {
    const char* panel = data + row / LANES * panel_bytes(kind, columns);
    int lane = row % LANES;
    if (kind == Q4) return one_row<Codes4>(panel, lane, columns, to);
    if (kind == Q8) return one_row<Codes8>(panel, lane, columns, to);
    for (int k = 0; k < columns; k++) {
        if (kind == F32) to[k] = ((const float*)panel)[k * LANES + lane];
        else {
            uint32_t bits = ((const uint16_t*)panel)[k / 2 * 2 * LANES + lane * 2 + k % 2];
            to[k] = same_bits<float>(bits << 16);
        }
    }
}

// What a panel meets. `sums`: for zeros, of each group of 32 entries (of `high` and `low`'s integers
// where they are there).
template <class T>
struct Vector {
    const T* values;
    const float* sums;
    const int8_t* high = nullptr;  // value ≈ (256 high + low) · step
    const int8_t* low = nullptr;
    float step = 1;
};

// What goes beside up to `rows` vectors that meet codes.
template <class T>
struct Beside {
    std::vector<float> sums;
    int widest = 0;

    void reserve(int rows, int columns) {
        widest = columns;
        sums.resize(size_t(rows) * columns / GROUP);
    }
    Vector<T> of(const T* x, int count, int place) {
        float* sum_of = &sums[size_t(place) * widest / GROUP];
        for (int k = 0; k < count; k += GROUP) sum_of[k / GROUP] = sum(load(x + k) + load(x + k + LANES));
        return {x, sum_of};
    }
};

// -- W in float32 arithmetic: any kind, any CPU. acc[b] += panel · x[b].

template <class Codes, int B>
inline void dot_codes(const char* panel, int columns, const Vector<float>* in, f32x16* acc) {
    for (int k = 0; k < columns; k += GROUP, panel += Codes::BYTES) {
        f32x16 scale = scale_of<Codes>(panel), zero = Codes::zero(panel, scale), part[B] = {};
        for (int i = 0; i < GROUP; i++) {
            f32x16 code = Codes::code(panel, i);
            for (int b = 0; b < B; b++) part[b] += code * in[b].values[k + i];
        }
        for (int b = 0; b < B; b++) acc[b] += part[b] * scale + zero * in[b].sums[k / GROUP];
    }
}

// P panels that lie `bytes` apart meet B vectors: each number that is loaded is used P or B times.
// stream: they come from memory, and what follows them will be needed next.
template <int P, int B, bool stream = true>
inline void dot(int kind, const char* panel, int64_t bytes, int columns,
                const Vector<float>* in, f32x16 (&acc)[P][B]) {
    if constexpr (P == 1) {
        if (kind == Q4) return dot_codes<Codes4, B>(panel, columns, in, acc[0]);
        if (kind == Q8) return dot_codes<Codes8, B>(panel, columns, in, acc[0]);
    }
    const float* x[B];
    for (int b = 0; b < B; b++) x[b] = in[b].values;
    if (kind == F32) {
        for (int k = 0; k < columns; k++) {
            f32x16 w[P];
            for (int p = 0; p < P; p++) w[p] = load((const float*)(panel + p * bytes) + LANES * k);
            for (int b = 0; b < B; b++)
                for (int p = 0; p < P; p++) acc[p][b] += w[p] * x[b][k];
        }
    } else {
        for (int k = 0; k < columns; k += 2) {
            f32x16 even[P], odd[P];
            for (int p = 0; p < P; p++) {
                u32x16 pair = load_as<u32x16>(panel + p * bytes + 32 * k);
                even[p] = same_bits<f32x16>(pair << 16);
                odd[p] = same_bits<f32x16>(pair & 0xffff0000u);
            }
            for (int b = 0; b < B; b++)
                for (int p = 0; p < P; p++) acc[p][b] += even[p] * x[b][k] + odd[p] * x[b][k + 1];
        }
    }
}

// A quantised panel as dense numbers, for when it is used by many vectors.
template <class Codes>
inline void unpack(const char* panel, int columns, float* to) {
    for (int k = 0; k < columns; k += GROUP, panel += Codes::BYTES) {
        f32x16 scale = scale_of<Codes>(panel), zero = Codes::zero(panel, scale);
        for (int i = 0; i < GROUP; i++) store(to + LANES * (k + i), Codes::code(panel, i) * scale + zero);
    }
}

#ifdef MINIFER_BF16_DOT

// -- W in bfloat16 arithmetic: 32 products an instruction, summed in float32.

inline f32x16 dot_pairs(f32x16 acc, __m512i weights, const bf16* x) {
    __m512i pair = _mm512_set1_epi32(load_as<int32_t>(x));  // columns k, k + 1 for every row
    return same_bits<f32x16>(
        _mm512_dpbf16_ps(same_bits<__m512>(acc), (__m512bh)weights, (__m512bh)pair));
}

// -- Codes in integer arithmetic: 64 products of bytes an instruction.
//
// x is rounded to multiples of a step and given as two bytes: Σ code · x = (256 Σ code · high +
// Σ code · low) · step. The step is 1/32639 of the largest entry, and an entry is off by half a step
// at most, about 2⁻¹⁶ of the largest one. Entries above 1/128 of it lose no more than the rounding
// to bfloat16 took from them before; smaller ones lose more, and weigh little beside it.

inline __m512i dot_bytes(__m512i acc, __m512i codes, const int8_t* x) {
    return _mm512_dpbusd_epi32(acc, codes, _mm512_set1_epi32(load_as<int32_t>(x)));
}

template <class Codes, int B>
inline void dot_codes(const char* panel, int columns, const Vector<bf16>* in, f32x16* acc) {
    for (int k = 0; k < columns; k += GROUP, panel += Codes::BYTES) {
        __m512i high[B] = {}, low[B] = {};
        fetch<true>(panel, Codes::BYTES);
        Codes::each(panel, [&](__m512i codes, int column) {
            for (int b = 0; b < B; b++) {
                high[b] = dot_bytes(high[b], codes, in[b].high + k + column);
                low[b] = dot_bytes(low[b], codes, in[b].low + k + column);
            }
        });
        f32x16 scale = scale_of<Codes>(panel), zero = Codes::zero(panel, scale);
        for (int b = 0; b < B; b++) {
            __m512i whole = _mm512_add_epi32(_mm512_slli_epi32(high[b], 8), low[b]);
            f32x16 part = same_bits<f32x16>(_mm512_cvtepi32_ps(whole));
            acc[b] += part * scale + zero * in[b].sums[k / GROUP];
        }
    }
    for (int b = 0; b < B; b++) acc[b] *= in[b].step;
}

template <>
struct Beside<bf16> {
    std::vector<float> sums;
    std::vector<int8_t> high, low;
    int widest = 0;

    void reserve(int rows, int columns) {
        widest = columns;
        sums.resize(size_t(rows) * columns / GROUP);
        high.resize(size_t(rows) * columns);
        low.resize(size_t(rows) * columns);
    }

    Vector<bf16> of(const bf16* x, int count, int place) {
        f32x16 top = {}, poison = {};
        for (int k = 0; k < count; k += LANES) {
            f32x16 v = load(x + k), size = same_bits<f32x16>(same_bits<u32x16>(v) & 0x7fffffffu);
            top = choose(size > top, size, top);
            poison += v - v;  // NaN where an entry is infinite or NaN, else 0
        }
        float step = largest(top) / (127 * 256 + 127), inverse = step > 0 ? 1 / step : 0;
        float* sum_of = &sums[size_t(place) * widest / GROUP];
        int8_t *h = &high[size_t(place) * widest], *l = &low[size_t(place) * widest];
        std::fill_n(sum_of, count / GROUP, 0.0f);
        for (int k = 0; k < count; k += LANES) {
            __m512i whole = _mm512_cvtps_epi32(same_bits<__m512>(load(x + k) * inverse));
            __m512i upper = _mm512_srai_epi32(_mm512_add_epi32(whole, _mm512_set1_epi32(128)), 8);
            _mm_storeu_si128((__m128i*)(h + k), _mm512_cvtepi32_epi8(upper));
            _mm_storeu_si128((__m128i*)(l + k), _mm512_cvtepi32_epi8(whole));
            sum_of[k / GROUP] += sum(same_bits<f32x16>(_mm512_cvtepi32_ps(whole)));
        }
        return {x, sum_of, h, l, step + sum(poison)};
    }
};

// Chains of dependent sums are kept apart, so that one need not wait for the other.
template <int P, int B>
constexpr int CHAINS = P * B == 1 ? 4 : P * B == 2 ? 2 : 1;

template <int P, int B, bool stream = true>
inline void dot(int kind, const char* panel, int64_t bytes, int columns,
                const Vector<bf16>* in, f32x16 (&acc)[P][B]) {
    if constexpr (P == 1) {
        if (kind == Q4) return dot_codes<Codes4, B>(panel, columns, in, acc[0]);
        if (kind == Q8) return dot_codes<Codes8, B>(panel, columns, in, acc[0]);
    }
    constexpr int U = CHAINS<P, B>;
    const bf16* x[B];
    for (int b = 0; b < B; b++) x[b] = in[b].values;
    f32x16 part[U][P][B] = {};
    for (int k = 0; k < columns; k += 2 * U)
        for (int u = 0; u < U; u++) {
            __m512i w[P];
            for (int p = 0; p < P; p++) {
                const char* from = panel + p * bytes + 32 * (k + 2 * u);
                if (stream) fetch<P == 1>(from, 64);
                w[p] = load_as<__m512i>(from);
            }
            for (int b = 0; b < B; b++)
                for (int p = 0; p < P; p++)
                    part[u][p][b] = dot_pairs(part[u][p][b], w[p], x[b] + k + 2 * u);
        }
    for (int u = 0; u < U; u++)
        for (int p = 0; p < P; p++)
            for (int b = 0; b < B; b++) acc[p][b] += part[u][p][b];
}

template <class Codes>
inline void unpack(const char* panel, int columns, bf16* to) {
    for (int k = 0; k < columns; k += GROUP, panel += Codes::BYTES) {
        f32x16 scale = scale_of<Codes>(panel), zero = Codes::zero(panel, scale);
        for (int i = 0; i < GROUP; i += 2) {
            bf16 even[LANES], odd[LANES];
            store(even, Codes::code(panel, i) * scale + zero);
            store(odd, Codes::code(panel, i + 1) * scale + zero);
            u32x16 low = __builtin_convertvector(load_as<u16x16>(even), u32x16);
            u32x16 high = __builtin_convertvector(load_as<u16x16>(odd), u32x16) << 16;
            u32x16 pair = low | high;
            std::memcpy(to + LANES * (k + i), &pair, sizeof pair);
        }
    }
}

#endif

}  // namespace minifer
