// Sixteen numbers at a time, on any CPU.
//
// GCC and Clang know vectors of 64 bytes as a type. Where the machine has AVX-512 each is one
// register; elsewhere (AVX2, NEON) the compiler takes several. Only what has an instruction of its
// own, such as the product of bfloat16 pairs, is written twice.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) && defined(__AVX512BW__) && !defined(MINIFER_PORTABLE)
#define MINIFER_AVX512 1
#include <immintrin.h>
#endif
#if defined(MINIFER_AVX512) && defined(__AVX512BF16__) && defined(__AVX512VNNI__)
#define MINIFER_BF16_DOT 1  // 32 products of bfloat16, or 64 of bytes, in one instruction
#endif

namespace minifer {

constexpr int LANES = 16;

inline int round_up(int n, int to) { return (n + to - 1) / to * to; }

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));

#if !defined(__clang__) && __GNUC__ < 12  // the name it had in GCC alone
#define __builtin_shufflevector(a, b, ...) __builtin_shuffle(a, b, i32x16{__VA_ARGS__})
#endif

// A bfloat16 is the upper half of a float32.
struct bf16 {
    uint16_t bits;
};

template <class To, class From>
inline To same_bits(const From& from) {
    static_assert(sizeof(To) == sizeof(From), "the bits of one must fit the other");
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

template <class V>
inline V load_as(const void* from) {
    V v;
    std::memcpy(&v, from, sizeof v);
    return v;
}

inline f32x16 splat(float value) { return f32x16{} + value; }

inline f32x16 load(const float* from) { return load_as<f32x16>(from); }

inline f32x16 load(const bf16* from) {
    return same_bits<f32x16>(__builtin_convertvector(load_as<u16x16>(from), u32x16) << 16);
}

inline void store(float* to, f32x16 v) { std::memcpy(to, &v, sizeof v); }

// Rounded to nearest, ties to even; a NaN stays one.
inline void store(bf16* to, f32x16 v) {
#ifdef MINIFER_BF16_DOT
    __m256bh half = _mm512_cvtneps_pbh(same_bits<__m512>(v));
    std::memcpy(to, &half, sizeof half);
#else
    u32x16 bits = same_bits<u32x16>(v);
    u32x16 rounded = bits + 0x7fffu + ((bits >> 16) & 1u);
    u32x16 nan = same_bits<u32x16>(v != v);
    u16x16 half = __builtin_convertvector(((rounded & ~nan) | ((bits | 0x400000u) & nan)) >> 16, u16x16);
    std::memcpy(to, &half, sizeof half);
#endif
}

inline float sum(f32x16 v) {
#ifdef MINIFER_AVX512
    return _mm512_reduce_add_ps(same_bits<__m512>(v));
#else
    float total[8];
    for (int i = 0; i < 8; i++) total[i] = v[i] + v[i + 8];
    return ((total[0] + total[4]) + (total[1] + total[5])) + ((total[2] + total[6]) + (total[3] + total[7]));
#endif
}

inline float largest(f32x16 v) {  // of numbers; of NaN it may take no notice
#ifdef MINIFER_AVX512
    return _mm512_reduce_max_ps(same_bits<__m512>(v));
#else
    float top = v[0];
    for (int i = 1; i < LANES; i++) top = v[i] > top ? v[i] : top;
    return top;
#endif
}

// Lane i of the result is the sum of v[i]: four rounds, in each of which two vectors become one.
inline f32x16 sums(const f32x16* v) {
    f32x16 a[8], b[4], c[2];
    for (int i = 0; i < 8; i++)  // a[i]: eight partial sums of v[i], then eight of v[i + 8]
        a[i] = __builtin_shufflevector(
                   v[i], v[i + 8], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23)
             + __builtin_shufflevector(
                   v[i], v[i + 8], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    for (int i = 0; i < 4; i++)
        b[i] = __builtin_shufflevector(
                   a[i], a[i + 4], 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27)
             + __builtin_shufflevector(
                   a[i], a[i + 4], 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
    for (int i = 0; i < 2; i++)
        c[i] = __builtin_shufflevector(
                   b[i], b[i + 2], 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29)
             + __builtin_shufflevector(
                   b[i], b[i + 2], 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    return __builtin_shufflevector(
               c[0], c[1], 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30)
         + __builtin_shufflevector(
               c[0], c[1], 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
}

constexpr i32x16 LANE = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

inline f32x16 choose(i32x16 condition, f32x16 yes, f32x16 no) {
    i32x16 a = same_bits<i32x16>(yes), b = same_bits<i32x16>(no);
    return same_bits<f32x16>((a & condition) | (b & ~condition));
}

// e^x to about 2 units in the last place; 0 below −87 and e^88 above 88.
// x = n ln 2 + r with |r| ≤ ln 2 / 2, then a polynomial for e^r (Cephes, Moshier) and n in the exponent.
inline f32x16 exp(f32x16 x) {
    x = choose(x > 88.0f, splat(88.0f), x);
    i32x16 tiny = x < -87.0f;
    x = choose(tiny, splat(-87.0f), x);
    f32x16 n = x * 1.44269504f + 12582912.0f;  // 1.5 · 2^23: rounds to an integer in the low bits
    i32x16 power = same_bits<i32x16>(n) - 0x4B400000;
    n -= 12582912.0f;
    f32x16 r = x - n * 0.693359375f + n * 2.12194440e-4f;
    f32x16 p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    f32x16 result = p * same_bits<f32x16>((power + 127) << 23);
    return choose(tiny, f32x16{}, result);
}

inline f32x16 silu(f32x16 x) { return x / (exp(-x) + 1.0f); }

}  // namespace minifer
