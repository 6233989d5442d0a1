// How the rows of a step attend: what is computed once a row, and who does what.
//
// Sixteen rows or more of one request go in blocks (`blocks.h`). Any other row is on its own
// (`attention.h`), and its context is cut into stretches, so that a long one keeps all threads busy:
// how, depends on its length alone, so that a row's sums are the same in any company and with any
// number of threads.

#pragma once

#include <algorithm>
#include <vector>

#include "abi.h"
#include "attention.h"
#include "blocks.h"
#include "team.h"

namespace minifer {

constexpr int STRETCH = 64;  // positions of a context that are worth a unit of work,
constexpr int MOST = 16;     // of which a context has this many at most

// Vectors [T, columns] in the type they are multiplied in, zero beyond their width.
template <class T>
struct Vectors {
    std::vector<T> values;
    int stride = 0;

    void reserve(int rows, int width) {
        stride = round_up(width, GROUP);
        values.assign(size_t(rows) * stride, T{});
    }
    T* row(int r) { return values.data() + size_t(r) * stride; }
};

// T: the type in which attention's output meets a matrix.
template <class T>
class RowsAttention {
public:
    const int stride;  // of a row of qkv: H queries, K keys, K values, [C] each
    Vectors<T> out;    // [T, H · C]

    RowsAttention(const Model& model, const Step& step)
        : stride((model.heads + 2 * model.kv_heads) * C), m(model), s(step) {
        out.reserve(s.rows, m.heads * C);
        qkv_.resize(size_t(s.rows) * stride);
        cos_.resize(size_t(s.rows) * C / 2);
        sin_.resize(cos_.size());
        plan();
    }

    float* qkv(int row) { return &qkv_[size_t(row) * stride]; }
    int num_units() const { return int(units_.size()); }

    // The angles of a row's position, for all layers.
    void find_angles(int row) {
        constexpr int half = C / 2;
        for (int i = 0; i < half; i++) {
            float angle = float(s.positions[row]) * m.inv_freq[i];
            cos_[size_t(row) * half + i] = std::cos(angle) * m.rope_scaling;
            sin_[size_t(row) * half + i] = std::sin(angle) * m.rope_scaling;
        }
    }

    // Rotate the row's queries and keys, scale its queries, write its keys and values to their slot.
    void append(const Layer& layer, int row) {
        constexpr int half = C / 2;
        float *q = qkv(row), *k = q + m.heads * C, *v = k + m.kv_heads * C;
        for (int h = 0; h < m.heads + m.kv_heads; h++) {
            const float* weight = h < m.heads ? layer.q_norm : layer.k_norm;
            if (weight) norm_head(q + h * C, weight, m.eps);
            rotate(q + h * C, &cos_[size_t(row) * half], &sin_[size_t(row) * half]);
        }
        for (int i = 0; i < m.heads * C; i++) q[i] *= m.scale;
        int64_t slot = s.slots[row];
        if (slot < 0) return;
        if (m.cache_kind == BF16) save((bf16*)layer.keys, slot, k), save((bf16*)layer.values, slot, v);
        else save((float*)layer.keys, slot, k), save((float*)layer.values, slot, v);
    }

    void attend(const Layer& layer, int unit) {
        const Unit& u = units_[unit];
        if (m.cache_kind == BF16) attend<bf16>(layer, u);
        else attend<float>(layer, u);
    }

private:
    struct Unit {
        int row, head, first, last;  // positions first … last − 1
        int rows = 0;                // of a block that goes together; 0: one row, and what follows
        int part = 0;                // its partial result
        int first_part = 0, parts = 1;  // of all stretches of the row and head
        int join = 0;                // who of them is the last is counted here
    };

    void plan() {
        int parts = 0, joins = 0;
        for (int r = 0, run; r < s.rows; r += run) {
            run = run_of(r);
            if (run >= BLOCK) {
                for (int first = r; first < r + run; first += BLOCK)
                    for (int h = 0; h < m.kv_heads; h++)
                        units_.push_back({first, h, 0, 0, std::min(BLOCK, r + run - first)});
                continue;
            }
            run = 1;
            int64_t last = s.positions[r] + 1;
            int pieces = int(std::min<int64_t>(MOST, (last + STRETCH - 1) / STRETCH));
            for (int h = 0; h < m.kv_heads; h++, joins++)
                for (int p = 0, first_part = parts; p < pieces; p++)
                    units_.push_back({r, h, int(last * p / pieces), int(last * (p + 1) / pieces), 0,
                                      parts++, first_part, pieces, joins});
        }
        partials_.resize(size_t(parts) * PARTIAL);
        done_ = std::vector<Counter>(joins);
    }

    // How many rows from r on are of one request, one position after the other.
    int run_of(int r) const {
        int end = r + 1;
        auto follows = [&](int row) {
            return s.table_of[row] == s.table_of[row - 1] && s.positions[row] == s.positions[row - 1] + 1;
        };
        while (end < s.rows && follows(end)) end++;
        return end - r;
    }

    template <class S>
    void save(S* cache, int64_t slot, const float* from) {
        int count = m.kv_heads * C;
        for (int i = 0; i < count; i += LANES) store(cache + slot * count + i, load(from + i));
    }

    // Keys and values of a layer, for one row and KV head.
    template <class S>
    Cache<S> cache(const Layer& layer, const Unit& u) const {
        int64_t step = int64_t(m.kv_heads) * C, at = int64_t(u.head) * C;
        const int32_t* table = s.tables + size_t(s.table_of[u.row]) * s.table_width;
        return {(const S*)layer.keys + at, (const S*)layer.values + at, step, table, m.block_size};
    }

    const float* query(const Unit& u) { return qkv(u.row) + size_t(u.head) * G * C; }

    T* result(int row, int head, int g) { return out.row(row) + (head * G + g) * C; }

    template <class S>
    void attend(const Layer& layer, const Unit& u) {
        if (u.rows) return block<S>(layer, u);
        int first = u.first;
        if (layer.window) first = std::max<int64_t>(first, s.positions[u.row] + 1 - layer.window);
        minifer::attend(query(u), cache<S>(layer, u), std::min(first, u.last), u.last, partial(u.part));
        // The last of the row's stretches to end joins them.
        if (u.parts > 1) {
            int before = done_[u.join].next.fetch_add(1, std::memory_order_acq_rel);
            if (before % u.parts != u.parts - 1) return;  // layers count on
        }
        Partial whole = partial(u.first_part);
        for (int p = 1; p < u.parts; p++) join(whole, partial(u.first_part + p));
        for (int g = 0; g < G; g++)
            for (int c = 0; c < C; c += LANES)
                store(result(u.row, u.head, g) + c, load(whole.values + g * C + c) / whole.l[g]);
    }

    template <class S>
    void block(const Layer& layer, const Unit& u) {
        BlockAttention<S> block;
        int position = int(s.positions[u.row]);
        block.attend(query(u), stride, u.rows, position, layer.window, cache<S>(layer, u));
        for (int r = 0; r < u.rows; r++)
            for (int g = 0; g < G; g++)
                for (int c = 0; c < C; c += LANES)
                    store(result(u.row + r, u.head, g) + c, load(block.of(r, g) + c));
    }

    static constexpr int PARTIAL = (G * (C + 2) + LANES - 1) / LANES * LANES;  // numbers of one

    Partial partial(int part) {
        float* base = &partials_[size_t(part) * PARTIAL];
        return {base + G * C, base + G * (C + 1), base};
    }

    const Model& m;
    const Step& s;
    std::vector<float> qkv_, cos_, sin_, partials_;
    std::vector<Unit> units_;
    std::vector<Counter> done_;
};

}  // namespace minifer
