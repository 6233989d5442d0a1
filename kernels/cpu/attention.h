// One query and its KV head: rotate, append, and attend over the blocks that are live.
//
// A unit of work is one row of the step, one KV head, and a stretch of its context. The G query
// heads that share the KV head go together, so each key and value is read once. The sum over keys
// is the online softmax (https://arxiv.org/abs/1805.02867): a running maximum m, the sum l of
// e^(score − m) and the weighted values. Two stretches with (m, l, values) join into one.

#pragma once

#include <algorithm>
#include <limits>

#include "lanes.h"

namespace minifer {

// Known when this is compiled, so that a query and its sums stay in registers.
constexpr int C = MINIFER_HEAD_DIM;     // a multiple of 16
constexpr int G = MINIFER_QUERY_GROUP;  // query heads that share a KV head
constexpr int PARTS = C / LANES;
constexpr int TILE = LANES;  // keys whose scores are known before the maximum moves

// x [C] is turned by the angles position · inv_freq[i]: pair (i, i + C/2).
inline void rotate(float* x, const float* cos, const float* sin) {
    constexpr int half = C / 2;
    for (int i = 0; i < half; i++) {
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

// Where the keys (or values) of one KV head lie: block b, place p → base + (b · P + p) · stride.
template <class T>
struct Cache {
    const T* base;      // of the head
    int64_t stride;     // numbers from one slot to the next: K · C
    const int32_t* table;
    int block_size;

    const T* at(int position) const {
        int64_t slot = int64_t(table[position / block_size]) * block_size + position % block_size;
        return base + slot * stride;
    }
};

// Attend with query [G, C] (scaled) over positions first … last − 1.
template <class T>
inline void attend(const float* query, Cache<T> keys, Cache<T> values, int first, int last, Partial out) {
    constexpr float NOTHING = -std::numeric_limits<float>::infinity();
    f32x16 acc[G][PARTS] = {};
    float top[G], total[G] = {};
    std::fill_n(top, G, NOTHING);
    alignas(64) float weights[G][TILE];
    for (int start = first; start < last; start += TILE) {
        int count = std::min(TILE, last - start);
        f32x16 products[G][TILE];
        for (int j = 0; j < count; j++) {
            const T* key = keys.at(start + j);
            f32x16 k[PARTS];
            for (int c = 0; c < PARTS; c++) k[c] = load(key + c * LANES);
            for (int g = 0; g < G; g++) {
                f32x16 product = k[0] * load(query + g * C);
                for (int c = 1; c < PARTS; c++) product += k[c] * load(query + g * C + c * LANES);
                products[g][j] = product;
            }
        }
        for (int g = 0; g < G; g++) {
            for (int j = count; j < TILE; j++) products[g][j] = f32x16{};
            f32x16 scores = sums(products[g]);
            float m = top[g];
            for (int j = 0; j < count; j++) m = scores[j] > m || scores[j] != scores[j] ? scores[j] : m;
            float shrink = top[g] == m ? 1.0f : std::exp(top[g] - m);
            f32x16 e = exp(scores - m);
            for (int j = count; j < TILE; j++) e[j] = 0;
            store(weights[g], e);
            total[g] = total[g] * shrink + sum(e);
            top[g] = m;
            if (shrink != 1.0f)
                for (int c = 0; c < PARTS; c++) acc[g][c] *= shrink;
        }
        for (int j = 0; j < count; j++) {
            const T* value = values.at(start + j);
            for (int c = 0; c < PARTS; c++) {
                f32x16 v = load(value + c * LANES);
                for (int g = 0; g < G; g++) acc[g][c] += v * weights[g][j];
            }
        }
    }
    for (int g = 0; g < G; g++) {
        out.m[g] = top[g];
        out.l[g] = total[g];
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
