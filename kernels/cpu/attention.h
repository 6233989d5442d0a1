// Rotate a head, and attend with one row of the step over a stretch of its context.
//
// The G query heads that share a KV head go together, so each key and value is read once. The sum
// over keys is the online softmax (https://arxiv.org/abs/1805.02867): a running maximum m, the sum l
// of e^(score − m) and the weighted values. Two stretches with (m, l, values) join into one.

#pragma once

#include <algorithm>
#include <limits>

#include "lanes.h"
#include "panels.h"

namespace minifer {

// Known when this is compiled, so that a query and its sums stay in registers.
constexpr int C = MINIFER_HEAD_DIM;     // a multiple of 16
constexpr int G = MINIFER_QUERY_GROUP;  // query heads that share a KV head
constexpr int PARTS = C / LANES;
constexpr int TILE = LANES;  // keys whose scores are known before the maximum moves

// x [C] is turned by the angles position · inv_freq[i]: pair (i, i + C/2).
inline void rotate(float* x, const float* cos, const float* sin) {
    constexpr int half = C / 2, whole = half / LANES * LANES;
    for (int i = 0; i < whole; i += LANES) {
        f32x16 a = load(x + i), b = load(x + i + half), c = load(cos + i), s = load(sin + i);
        store(x + i, a * c - b * s);
        store(x + i + half, b * c + a * s);
    }
    for (int i = whole; i < half; i++) {
        float a = x[i], b = x[i + half];
        x[i] = a * cos[i] - b * sin[i];
        x[i + half] = b * cos[i] + a * sin[i];
    }
}

// x [C] · weight / rms(x).
inline void norm_head(float* x, const float* weight, float eps) {
    float squares = 0;
    for (int i = 0; i < C; i++) squares += x[i] * x[i];
    float scale = 1.0f / std::sqrt(squares / C + eps);
    for (int i = 0; i < C; i++) x[i] *= scale * weight[i];
}

// What a stretch of the context says: for each of G heads m, l, and values [C].
struct Partial {
    float* m;       // [G]
    float* l;       // [G]
    float* values;  // [G, C], e^(score − m) · v summed
};

// Where the keys and values of one KV head lie: block b, place p → base + (b · P + p) · stride.
template <class T>
struct Cache {
    const T* keys;   // of the head
    const T* values;
    int64_t stride;  // numbers from one slot to the next: K · C
    const int32_t* table;
    int block_size;
};

// The slots of a row's positions one after the other, without a division each.
class Walk {
public:
    Walk(const int32_t* table, int block_size, int position)
        : table_(table + position / block_size), size_(block_size), place_(position % block_size) {}

    int64_t next() {
        int64_t slot = int64_t(*table_) * size_ + place_;
        if (++place_ == size_) {
            place_ = 0;
            table_++;
        }
        return slot;
    }

private:
    const int32_t* table_;
    const int size_;
    int place_;
};

inline void prefetch(const void* from, int bytes) {
    for (int i = 0; i < bytes; i += 64) __builtin_prefetch((const char*)from + i);
}

// The two products of attention for G queries. In float32 arithmetic:
template <class T>
struct Arithmetic {
    using Weight = float;  // of a value
    const float* q;        // [G, C]

    explicit Arithmetic(const float* query) : q(query) {}

    // With one key, not yet summed across lanes: to products[g · TILE].
    void score(const T* key, f32x16* products) const {
        f32x16 k[PARTS];
        for (int c = 0; c < PARTS; c++) k[c] = load(key + c * LANES);
        for (int g = 0; g < G; g++) {
            f32x16 product = k[0] * load(q + g * C);
            for (int c = 1; c < PARTS; c++) product += k[c] * load(q + g * C + c * LANES);
            products[g * TILE] = product;
        }
    }

    // acc += weights[g][j] · values, over `count` values.
    static void add(f32x16 (&acc)[G][PARTS], const T* values, const int64_t* offset,
                    const float (*weights)[TILE], int count) {
        for (int j = 0; j < count; j++)
            for (int c = 0; c < PARTS; c++) {
                f32x16 v = load(values + offset[j] + c * LANES);
                for (int g = 0; g < G; g++) acc[g][c] += v * weights[g][j];
            }
    }

    static void put_in_order(f32x16 (&)[PARTS]) {}
};

#if defined(MINIFER_BF16_DOT) && MINIFER_HEAD_DIM % 32 == 0
// In bfloat16, as the cache is: 32 products an instruction. Queries and weights are rounded.
template <>
struct Arithmetic<bf16> {
    using Weight = bf16;
    alignas(64) bf16 q[G * C];

    explicit Arithmetic(const float* query) {
        for (int i = 0; i < G * C; i += LANES) store(q + i, load(query + i));
    }

    void score(const bf16* key, f32x16* products) const {
        __m512i k[C / 32];
        for (int c = 0; c < C / 32; c++) k[c] = load_as<__m512i>(key + 32 * c);
        for (int g = 0; g < G; g++) {
            __m512 product = {};
            for (int c = 0; c < C / 32; c++)
                product = _mm512_dpbf16_ps(
                    product, (__m512bh)k[c], (__m512bh)load_as<__m512i>(q + g * C + 32 * c));
            products[g * TILE] = same_bits<f32x16>(product);
        }
    }

    // Two values at a time, channel by channel: v0[0] v1[0] v0[1] v1[1] … The interleaving works
    // within 128 bits, so acc holds channels 0–3, 8–11, … and 4–7, 12–15, … until they are put in
    // order.
    static void add(f32x16 (&acc)[G][PARTS], const bf16* values, const int64_t* offset,
                    const bf16 (*weights)[TILE], int count) {
        for (int j = 0; j < count; j += 2) {
            const bf16 *v0 = values + offset[j], *v1 = j + 1 < count ? values + offset[j + 1] : v0;
            for (int c = 0; c < PARTS; c += 2) {
                __m512i a = load_as<__m512i>(v0 + c * LANES), b = load_as<__m512i>(v1 + c * LANES);
                __m512i low = _mm512_unpacklo_epi16(a, b), high = _mm512_unpackhi_epi16(a, b);
                for (int g = 0; g < G; g++) {  // the weight beyond the last is 0
                    acc[g][c] = dot_pairs(acc[g][c], low, &weights[g][j]);
                    acc[g][c + 1] = dot_pairs(acc[g][c + 1], high, &weights[g][j]);
                }
            }
        }
    }

    static void put_in_order(f32x16 (&acc)[PARTS]) {
        for (int c = 0; c < PARTS; c += 2) {
            f32x16 low = acc[c], high = acc[c + 1];
            acc[c] = __builtin_shufflevector(
                low, high, 0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
            acc[c + 1] = __builtin_shufflevector(
                low, high, 8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
        }
    }
};
#endif

// Attend with query [G, C] (scaled) over positions first … last − 1.
template <class T>
inline void attend(const float* query, const Cache<T>& cache, int first, int last, Partial out) {
    constexpr float NOTHING = -std::numeric_limits<float>::infinity();
    const Arithmetic<T> arithmetic(query);
    using Weight = typename Arithmetic<T>::Weight;
    f32x16 acc[G][PARTS] = {};
    float top[G], total[G] = {};
    std::fill_n(top, G, NOTHING);
    int64_t offset[2][TILE];  // of this tile's positions, and of the next one's
    Walk walk(cache.table, cache.block_size, first);
    auto look = [&](int64_t* tile, int start) {
        int count = std::min(TILE, last - start);
        for (int j = 0; j < count; j++) {
            tile[j] = walk.next() * cache.stride;
            prefetch(cache.keys + tile[j], C * sizeof(T));
            prefetch(cache.values + tile[j], C * sizeof(T));
        }
    };
    look(offset[0], first);
    for (int start = first, now = 0; start < last; start += TILE, now ^= 1) {
        int count = std::min(TILE, last - start);
        look(offset[now ^ 1], start + TILE);
        f32x16 products[G][TILE];
        for (int j = 0; j < count; j++) arithmetic.score(cache.keys + offset[now][j], &products[0][j]);
        alignas(64) Weight weights[G][TILE];
        for (int g = 0; g < G; g++) {
            for (int j = count; j < TILE; j++) products[g][j] = f32x16{};
            f32x16 scores = choose(LANE < count, sums(products[g]), splat(NOTHING));
            float m = std::max(top[g], largest(scores));
            float shrink = exp(splat(top[g] - m))[0];
            f32x16 e = exp(scores - m);  // 0 beyond the last
            store(weights[g], e);
            total[g] = total[g] * shrink + sum(e);
            top[g] = m;
            for (int c = 0; c < PARTS; c++) acc[g][c] *= shrink;
        }
        Arithmetic<T>::add(acc, cache.values, offset[now], weights, count);
    }
    for (int g = 0; g < G; g++) {
        out.m[g] = top[g];
        out.l[g] = total[g];
        Arithmetic<T>::put_in_order(acc[g]);
        for (int c = 0; c < PARTS; c++) store(out.values + g * C + c * LANES, acc[g][c]);
    }
}

// Join another stretch of the same row and heads into `out`.
inline void join(Partial out, const Partial& other) {
    for (int g = 0; g < G; g++) {
        if (other.l[g] == 0) continue;  // it saw no key
        float m = std::max(out.m[g], other.m[g]);
        float mine = std::exp(out.m[g] - m), theirs = std::exp(other.m[g] - m);
        out.l[g] = out.l[g] * mine + other.l[g] * theirs;
        for (int c = 0; c < C; c++) {
            float* v = out.values + g * C + c;
            *v = *v * mine + other.values[g * C + c] * theirs;
        }
        out.m[g] = m;
    }
}

}  // namespace minifer
