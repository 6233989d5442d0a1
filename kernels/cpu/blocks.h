// Attention of many rows of one request: a block of queries meets a span of keys as matrices do.
//
// One row at a time, every key is summed across lanes for it alone. Sixteen rows share the work: the
// keys of a span are laid out as a panel (lane i belongs to key i), the values as another (lane i
// belongs to channel i), and both products are those of `panels.h`. The softmax is the online one
// of `attention.h`.

#pragma once

#include "attention.h"
#include "panels.h"

namespace minifer {

constexpr int BLOCK = 16;  // rows of a block
constexpr int SPAN = 64;   // keys of a span,
constexpr int PANELS = SPAN / LANES;  // which are as many panels
constexpr int EIGHT = 8;   // queries that panels meet at a time
constexpr int QUERIES = (BLOCK * G + EIGHT - 1) / EIGHT * EIGHT;

// The type in which queries, keys and weights are multiplied, for a cache of S.
template <class S>
struct Multiplied {
    using Type = float;
};
#ifdef MINIFER_BF16_DOT
template <>
struct Multiplied<bf16> {
    using Type = bf16;
};
#endif

// The entries of vectors i and i + 8 in turn: vectors 2i and 2i + 1 of the result.
inline void riffle(const f32x16* v, f32x16* to) {
    for (int i = 0; i < 8; i++) {
        to[2 * i] = __builtin_shufflevector(
            v[i], v[i + 8], 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
        to[2 * i + 1] = __builtin_shufflevector(
            v[i], v[i + 8], 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    }
}

// v[i][j] becomes v[j][i]. An entry's number is 16 i + j; a round turns its eight bits by one.
inline void transpose(f32x16* v) {
    f32x16 t[LANES];
    riffle(v, t);
    riffle(t, v);
    riffle(v, t);
    riffle(t, v);
}

// Sixteen keys as a panel of C columns. `keys` below `count` are read, the others are zeros.
template <class S>
inline void key_panel(const S* keys, const int64_t* offset, int count, float* to) {
    for (int c = 0; c < C; c += LANES) {
        f32x16 v[LANES];
        for (int j = 0; j < LANES; j++) v[j] = j < count ? load(keys + offset[j] + c) : f32x16{};
        transpose(v);
        for (int i = 0; i < LANES; i++) store(to + (c + i) * LANES, v[i]);
    }
}

inline void key_panel(const bf16* keys, const int64_t* offset, int count, bf16* to) {
    constexpr int PAIRS = C / 2;  // two columns are one number of 32 bits
    for (int c = 0; c < PAIRS; c += LANES) {
        f32x16 v[LANES];
        int width = std::min(LANES, PAIRS - c);  // 8 where a head has 16 channels
        for (int j = 0; j < LANES; j++) {
            v[j] = f32x16{};
            if (j < count) std::memcpy(&v[j], keys + offset[j] + 2 * c, 4 * width);
        }
        transpose(v);
        for (int i = 0; i < width; i++) std::memcpy(to + (c + i) * 2 * LANES, &v[i], sizeof v[i]);
    }
}

// The values of a span as C / 16 panels of SPAN columns, one after the other; of those behind the
// last pair of key panels nothing is written.
template <class S>
inline void value_panels(const S* values, const int64_t* offset, int count, float* to) {
    for (int j = 0; j < round_up(count, 2 * LANES); j++)
        for (int c = 0; c < PARTS; c++)
            store(to + (c * SPAN + j) * LANES,
                  j < count ? load(values + offset[j] + c * LANES) : f32x16{});
}

inline void value_panels(const bf16* values, const int64_t* offset, int count, bf16* to) {
    auto wide = [&](int j, int c) {
        if (j >= count) return u32x16{};
        return __builtin_convertvector(load_as<u16x16>(values + offset[j] + c * LANES), u32x16);
    };
    for (int j = 0; j < round_up(count, 2 * LANES); j += 2)
        for (int c = 0; c < PARTS; c++) {
            u32x16 pair = wide(j, c) | (wide(j + 1, c) << 16);
            std::memcpy(to + (c * SPAN + j) * LANES, &pair, sizeof pair);
        }
}

// One KV head of up to BLOCK rows of a request: query [rows, G, C] lies `query_stride` apart, the
// rows stand at positions `position` and following ones. Each sees the keys up to its own position,
// from `window` positions before it on (0: all).
template <class S>
class BlockAttention {
    using A = typename Multiplied<S>::Type;

public:
    // The attention of row r and query head g of the group, [C].
    const float* of(int r, int g) const { return out[r * G + g]; }

    void attend(const float* query, int query_stride, int rows, int position, int64_t window,
                const Cache<S>& cache) {
        count_ = rows * G;
        std::fill_n(&q[0][0], QUERIES * C, A{});
        std::fill_n(&out[0][0], QUERIES * C, 0.0f);
        std::fill_n(top, QUERIES, -std::numeric_limits<float>::infinity());
        std::fill_n(total, QUERIES, 0.0f);
        for (int r = 0; r < rows; r++)
            for (int i = 0; i < G * C; i += LANES)
                store(&q[r * G][0] + i, load(query + int64_t(r) * query_stride + i));
        int first = window ? std::max<int64_t>(0, position + 1 - window) : 0, last = position + rows;
        Walk walk(cache.table, cache.block_size, first);
        for (int start = first; start < last; start += SPAN) {
            int count = std::min(SPAN, last - start);
            int64_t offset[SPAN];
            for (int j = 0; j < count; j++) offset[j] = walk.next() * cache.stride;
            for (int p = 0; p * LANES < round_up(count, 2 * LANES); p++)
                key_panel(cache.keys, offset + p * LANES, std::min(LANES, count - p * LANES), keys[p]);
            value_panels(cache.values, offset, count, &values[0][0]);
            for (int i = 0; i < count_; i += EIGHT) eight(i, start, count, position, window);
        }
        for (int i = 0; i < count_; i++)
            for (int c = 0; c < C; c += LANES) store(&out[i][c], load(&out[i][c]) / total[i]);
    }

private:
    // Queries i … i + 7 meet the span of `count` keys that begins at position `start`.
    void eight(int i, int start, int count, int position, int64_t window) {
        constexpr float NOTHING = -std::numeric_limits<float>::infinity();
        constexpr int KIND = sizeof(A) == 2 ? BF16 : F32;
        const int panels = round_up(count, 2 * LANES) / LANES;  // those with a key, in pairs
        Vector<A> in[EIGHT], weighted[EIGHT];
        alignas(64) A weights[EIGHT][SPAN];
        for (int b = 0; b < EIGHT; b++) {
            in[b] = {q[i + b], nullptr};
            weighted[b] = {weights[b], nullptr};
        }
        f32x16 scores[PANELS / 2][2][EIGHT] = {};
        for (int p = 0; p < panels; p += 2)
            dot<2, EIGHT, false>(KIND, (const char*)keys[p], sizeof keys[0], C, in, scores[p / 2]);
        f32x16 fall = {};  // of the maximum of each query
        float base[EIGHT];
        for (int b = 0; b < EIGHT; b++) {
            int seen = position + (i + b) / G + 1 - start;  // keys of the span up to the row's own
            int hidden = window ? int(std::max<int64_t>(0, seen - window)) : 0;
            f32x16 most = splat(NOTHING);
            for (int p = 0; p < panels; p++) {
                i32x16 lane = LANE + p * LANES;
                f32x16& s = scores[p / 2][p % 2][b];
                if (seen < (p + 1) * LANES || hidden > 0)
                    s = choose((lane < seen) & (lane >= hidden), s, splat(NOTHING));
                most = choose(s > most, s, most);
            }
            float m = std::max(top[i + b], largest(most));
            base[b] = m == NOTHING ? 0 : m;  // no key yet: all weights are 0
            fall[b] = top[i + b] - base[b];
            top[i + b] = m;
        }
        f32x16 shrink = exp(fall);
        for (int b = 0; b < EIGHT; b++) {
            f32x16 whole = {};
            for (int p = 0; p < panels; p++) {
                f32x16 e = exp(scores[p / 2][p % 2][b] - base[b]);
                store(weights[b] + p * LANES, e);
                whole += e;
            }
            total[i + b] = total[i + b] * shrink[b] + sum(whole);
        }
        constexpr int P = PARTS % 2 ? 1 : 2;
        for (int c = 0; c < PARTS; c += P) {
            f32x16 sums[P][EIGHT] = {};
            dot<P, EIGHT, false>(
                KIND, (const char*)values[c], sizeof values[0], panels * LANES, weighted, sums);
            for (int b = 0; b < EIGHT; b++)
                for (int p = 0; p < P; p++) {
                    float* to = &out[i + b][(c + p) * LANES];
                    store(to, load(to) * shrink[b] + sums[p][b]);
                }
        }
    }

    int count_ = 0;
    alignas(64) A q[QUERIES][C];
    alignas(64) A keys[PANELS][C * LANES];
    alignas(64) A values[PARTS][SPAN * LANES];
    alignas(64) float out[QUERIES][C];
    float top[QUERIES], total[QUERIES];
};

}  // namespace minifer
