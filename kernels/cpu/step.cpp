// A whole step of a decoder-only transformer in one call: the megakernel of a CPU.
//
// T rows go through all layers inside one parallel region. A row is one token with its position
// and the block table of its request: a decode has one row, a speculative verification or a short
// piece of a prompt a few. Five phases a layer, a barrier after each:
//
//   1  qkv  = W_qkv · norm(x)                                    panels of W are shared out
//   2  rotate q and k, append k and v to their slots             rows
//   3  attend over the live blocks                               (row, KV head, stretch)
//   4  x   += W_o · attention
//   5  h    = silu(W_gate · norm(x)) · (W_up · norm(x));  6  x += W_down · h
//
// The residual stream x stays float32; what meets a matrix is rounded to the model's type.
// The head's largest logit is found where it is computed: a greedy step writes no logits.

#include <chrono>
#include <new>
#include <optional>
#include <type_traits>
#include <vector>

#ifdef _OPENMP
#include <omp.h>
#endif

#include "attention.h"
#include "blocks.h"
#include "lanes.h"
#include "panels.h"
#include "team.h"

namespace minifer {

// -- what Python hands over (`step.py` holds the same structures)

struct Matrix {
    const char* data;   // panels
    const float* bias;  // [panels · 16] or null
    int32_t rows;
    int32_t columns;    // a multiple of 32
    int32_t kind;
    int32_t pad;
};

struct Layer {
    const float* attention_norm;  // [D]
    const float* mlp_norm;
    const float* q_norm;  // [C] or null
    const float* k_norm;
    Matrix qkv, o, gate_up, down;  // gate_up: a panel of gate rows, then the same rows of up, …
    void* keys;                    // [N, P, K, C]
    void* values;
    int64_t window;                // 0: full attention
};

struct Model {
    int32_t layers, width, heads, kv_heads, hidden, vocabulary, block_size;
    int32_t cache_kind;  // F32 or BF16, of keys and values
    int32_t round;       // 1: vectors are bfloat16 where they meet a matrix
    float eps, scale, rope_scaling;
    int32_t threads;
    const Layer* layer;
    const float* final_norm;
    Matrix head;
    const float* inv_freq;  // [C/2]
};

struct Step {
    int32_t rows, table_width, num_logits, pad;
    float* x;                  // [T, D], the embedded tokens; overwritten. Not filled yet with:
    const int64_t* tokens;     // [T], rows of the head, or null
    const int64_t* positions;  // [T]
    const int64_t* slots;      // [T], where keys and values go; below 0: nowhere
    const int32_t* tables;     // [requests, table_width]
    const int32_t* table_of;   // [T], each row's table
    const int32_t* logits_rows;
    float* logits;             // [R, V] or null
    int64_t* best;             // [R], the largest logit's lowest index
    float* best_logit;         // [R], NaN where any logit is
    double* seconds;           // [PHASES] or null: what each phase took, its wait included
};

enum Phase { QKV, APPEND, ATTENTION, OUTPUT, GATE_UP, DOWN, HEAD, PHASES };

using Clock = std::chrono::steady_clock;

constexpr int STRETCH = 64;   // positions of a context that are worth a unit of work,
constexpr int MOST = 16;      // of which a context has this many at most

int round_up(int n, int to) { return (n + to - 1) / to * to; }

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

template <class T>
class Run {
public:
    Run(const Model& model, const Step& step, int threads)
        : m(model), s(step), rows(step.rows), threads(threads), barrier(threads),
          counters(7 * model.layers + 4) {
        int heads = (m.heads + 2 * m.kv_heads) * C;
        qkv.resize(size_t(rows) * heads);
        normed.reserve(rows, m.width);
        attended.reserve(rows, m.heads * C);
        hidden.reserve(rows, m.hidden);
        cos.resize(size_t(rows) * C / 2);
        sin.resize(cos.size());
        if (rows > FEW) {
            bytes.reserve(std::min(rows, SOME), round_up(std::max({m.width, m.hidden, m.heads * C}), GROUP));
            in_bytes.resize(std::min(rows, SOME));
        }
        plan_attention();
        best.resize(size_t(threads) * std::max(1, s.num_logits));
        locals.reserve(threads);
        for (int i = 0; i < threads; i++) locals.emplace_back(*this, i);
    }

    void work(int thread) {
        Local& local = locals[thread];
        for (int r = thread; r < rows; r += threads) begin(r);
        barrier.wait();
        for (int i = 0; i < m.layers; i++) layer(m.layer[i], local);
        head(local);
    }

    void finish() {
        for (int r = 0; r < s.num_logits; r++) {
            float value = -std::numeric_limits<float>::infinity();
            int64_t index = 0;
            bool nan = false;
            for (int t = 0; t < threads; t++) {
                const Best& top = best[size_t(t) * s.num_logits + r];
                for (int i = 0; i < LANES; i++) {
                    int64_t here = int64_t(top.panel[i]) * LANES + i;
                    nan |= top.nan[i] != 0;
                    if (top.value[i] > value || (top.value[i] == value && here < index)) {
                        value = top.value[i];
                        index = here;
                    }
                }
            }
            s.best[r] = index;
            s.best_logit[r] = nan ? std::numeric_limits<float>::quiet_NaN() : value;
        }
    }

private:
    // The largest logit so far, and its panel, in each lane; panels come in rising order.
    struct Best {
        f32x16 value = splat(-std::numeric_limits<float>::infinity());
        i32x16 panel = {}, nan = {};

        void see(int number, f32x16 logits) {
            i32x16 larger = logits > value;
            value = choose(larger, logits, value);
            panel = (larger & number) | (~larger & panel);
            nan |= logits != logits;
        }
    };

    // What one thread keeps for itself.
    struct Local {
        int thread;
        double since;           // when the last phase ended
        int counter = 0;        // of the next phase that is shared out
        Vectors<T> few;         // norms of a few rows: cheaper made by each thread than waited for
        std::vector<T> panel;   // one panel, unpacked
        Beside<T> bytes;        // what codes are multiplied by
        std::vector<Vector<T>> in;

        Local(Run& run, int thread)
            : thread(thread), since(std::chrono::duration<double>(Clock::now().time_since_epoch()).count()) {
            const Model& m = run.m;
            int widest = round_up(std::max({m.width, m.hidden, m.heads * C}), GROUP);
            if (run.rows <= FEW) few.reserve(run.rows, m.width);
            panel.resize(size_t(2) * widest * LANES);
            if (run.rows <= FEW || run.s.num_logits <= FEW) bytes.reserve(FEW, widest);
            in.reserve(run.rows);
        }
    };

    // Look the token up, and find the angles of its position.
    void begin(int r) {
        if (s.tokens) {
            std::vector<float> row(m.head.columns);
            row_of(m.head.kind, m.head.data, s.tokens[r], m.head.columns, row.data());
            std::copy_n(row.data(), m.width, s.x + size_t(r) * m.width);
        }
        int half = C / 2;
        for (int i = 0; i < half; i++) {
            float angle = float(s.positions[r]) * m.inv_freq[i];
            cos[size_t(r) * half + i] = std::cos(angle) * m.rope_scaling;
            sin[size_t(r) * half + i] = std::sin(angle) * m.rope_scaling;
        }
    }

    // The end of a phase: nobody goes on before all are through.
    void meet(Phase phase, Local& local) {
        barrier.wait();
        if (!s.seconds || local.thread) return;
        double now = std::chrono::duration<double>(Clock::now().time_since_epoch()).count();
        s.seconds[phase] += now - local.since;
        local.since = now;
    }

    void layer(const Layer& layer, Local& local) {
        int heads = (m.heads + 2 * m.kv_heads) * C;
        normalise(layer.attention_norm, layer.qkv, nullptr, rows, local);
        multiply(layer.qkv, local, [&](int row, int panel, f32x16 out) {
            put(&qkv[size_t(row) * heads], panel, heads, out);
        });
        meet(QKV, local);
        for (int r = local.thread; r < rows; r += threads) append(layer, r);
        meet(APPEND, local);
        share(int(units.size()), local.thread, threads, counters[local.counter++],
              [&](int unit) { attention(layer, units[unit]); });
        meet(ATTENTION, local);
        inputs(attended, layer.o, rows, local);
        multiply(layer.o, local, [&](int row, int panel, f32x16 out) { add(row, panel, out); });
        meet(OUTPUT, local);
        normalise(layer.mlp_norm, layer.gate_up, nullptr, rows, local);
        gate_up(layer.gate_up, local);
        meet(GATE_UP, local);
        inputs(hidden, layer.down, rows, local);
        multiply(layer.down, local, [&](int row, int panel, f32x16 out) { add(row, panel, out); });
        meet(DOWN, local);
    }

    void head(Local& local) {
        normalise(m.final_norm, m.head, s.logits_rows, s.num_logits, local);
        Best* mine = &best[size_t(local.thread) * std::max(1, s.num_logits)];
        multiply(m.head, local, [&](int row, int panel, f32x16 out) {
            if (s.logits) put(s.logits + size_t(row) * m.vocabulary, panel, m.vocabulary, out);
            for (int i = m.vocabulary - panel * LANES; i < LANES; i++)
                out[i] = -std::numeric_limits<float>::infinity();  // no such token
            mine[row].see(panel, out);
        });
        meet(HEAD, local);
    }

    // -- norms, and what a matrix is given

    // The vectors that the next matrix meets: norms of `which` rows of x (all of them when null).
    void normalise(
        const float* weight, const Matrix& next, const int32_t* which, int count, Local& local) {
        Vectors<T>& to = count <= FEW && rows <= FEW ? local.few : normed;
        bool alone = &to == &local.few;
        for (int i = alone ? 0 : local.thread; i < count; i += alone ? 1 : threads)
            norm(s.x + size_t(which ? which[i] : i) * m.width, weight, to.row(i));
        if (!alone) barrier.wait();
        inputs(to, next, count, local);
    }

    void norm(const float* x, const float* weight, T* to) {
        int width = m.width, whole = width / LANES * LANES;
        f32x16 squares = {};
        for (int k = 0; k < whole; k += LANES) squares += load(x + k) * load(x + k);
        float total = sum(squares);
        for (int k = whole; k < width; k++) total += x[k] * x[k];
        float scale = 1.0f / std::sqrt(total / width + m.eps);
        for (int k = 0; k < whole; k += LANES) store(to + k, load(x + k) * scale * load(weight + k));
        for (int k = whole; k < width; k++) {
            f32x16 one = splat(x[k] * scale * weight[k]);
            T rounded[LANES];
            store(rounded, one);
            to[k] = rounded[0];
        }
    }

    void inputs(Vectors<T>& from, const Matrix& next, int count, Local& local) {
        bool alone = count <= FEW, codes = meets_codes(next, count);
        local.in.resize(count);
        for (int i = 0; i < count; i++) {
            if (!codes) local.in[i] = {from.row(i), nullptr};
            else if (alone) local.in[i] = local.bytes.of(from.row(i), from.stride, i);
            else if (i % threads == local.thread) in_bytes[i] = bytes.of(from.row(i), from.stride, i);
        }
        if (!codes || alone) return;
        barrier.wait();
        std::copy_n(in_bytes.begin(), count, local.in.begin());
    }

    static bool meets_codes(const Matrix& w, int count) { return count <= SOME && (w.kind == Q4 || w.kind == Q8); }

    // How many panels go together: more of them where vectors are many.
    static int together(const Matrix& w, int count) { return count <= FEW || meets_codes(w, count) ? 1 : 2; }

    // -- matrices

    // Calls out(row, panel, sixteen sums) for all rows of `local.in` and all panels.
    template <class Out>
    void multiply(const Matrix& w, Local& local, Out out) {
        int panels = w.rows / LANES, each = together(w, int(local.in.size()));
        share((panels + each - 1) / each, local.thread, threads, counters[local.counter++], [&](int item) {
            int first = item * each;
            auto one = [&](int row, f32x16 (&sums)[1]) { out(row, first, sums[0]); };
            auto two = [&](int row, f32x16 (&sums)[2]) {
                out(row, first, sums[0]);
                out(row, first + 1, sums[1]);
            };
            if (each == 2 && first + 1 < panels) some<2>(w, first, local, two);
            else some<1>(w, first, local, one);
        });
    }

    // W_gate and W_up: panels in pairs.
    void gate_up(const Matrix& w, Local& local) {
        bool pairs = together(w, int(local.in.size())) == 2;
        share(w.rows / LANES / 2, local.thread, threads, counters[local.counter++], [&](int pair) {
            auto use = [&](int row, f32x16 (&sums)[2]) {
                store(hidden.row(row) + pair * LANES, silu(sums[0]) * sums[1]);
            };
            if (pairs) return some<2>(w, 2 * pair, local, use);
            f32x16 gates[SOME];
            some<1>(w, 2 * pair, local, [&](int row, f32x16 (&sums)[1]) { gates[row] = sums[0]; });
            some<1>(w, 2 * pair + 1, local, [&](int row, f32x16 (&sums)[1]) {
                f32x16 both[2] = {gates[row], sums[0]};
                use(row, both);
            });
        });
    }

    // Calls out(row, P · sixteen sums) for panels first … first + P − 1 and all rows of `local.in`.
    template <int P, class Out>
    void some(const Matrix& w, int first, Local& local, Out out) {
        int kind = w.kind, count = int(local.in.size());
        int64_t bytes = panel_bytes(kind, w.columns);
        const char* data = w.data + first * bytes;
        if ((kind == Q4 || kind == Q8) && !meets_codes(w, count)) {
            T* to = local.panel.data();
            for (int p = 0; p < P; p++, to += LANES * w.columns) {
                if (kind == Q4) unpack<Codes4>(data + p * bytes, w.columns, to);
                else unpack<Codes8>(data + p * bytes, w.columns, to);
            }
            kind = sizeof(T) == 2 ? BF16 : F32;
            bytes = panel_bytes(kind, w.columns);
            data = (const char*)local.panel.data();
        }
        f32x16 bias[P] = {};
        for (int p = 0; p < P && w.bias; p++) bias[p] = load(w.bias + (first + p) * LANES);
        int r = 0;
        auto meet = [&](auto many) {
            constexpr int B = decltype(many)::value;
            for (; count - r >= B; r += B) {
                f32x16 acc[P][B] = {};
                dot<P, B>(kind, data, bytes, w.columns, &local.in[r], acc);
                for (int b = 0; b < B; b++) {
                    f32x16 sums[P];
                    for (int p = 0; p < P; p++) sums[p] = acc[p][b] + bias[p];
                    out(r + b, sums);
                }
            }
        };
        meet(std::integral_constant<int, 8>{});
        meet(std::integral_constant<int, 4>{});
        meet(std::integral_constant<int, 2>{});
        meet(std::integral_constant<int, 1>{});
    }

    static void put(float* to, int panel, int width, f32x16 out) {
        int first = panel * LANES;
        if (first + LANES <= width) store(to + first, out);
        else
            for (int i = 0; first + i < width; i++) to[first + i] = out[i];
    }

    void add(int row, int panel, f32x16 out) {
        float* x = s.x + size_t(row) * m.width + panel * LANES;
        int count = std::min(LANES, m.width - panel * LANES);
        if (count == LANES) store(x, load(x) + out);
        else
            for (int i = 0; i < count; i++) x[i] += out[i];
    }

    // -- attention

    struct Unit {
        int row, head, first, last;  // positions first … last − 1
        int rows = 0;                // of a block that goes together; 0: one row, and what follows
        int part = 0;                // its partial result
        int first_part = 0, parts = 1;  // of all stretches of the row and head
        int join = 0;                // who of them is the last is counted here
    };

    // Many rows of one request go in blocks. Otherwise each row is on its own, and its context is cut:
    // how, depends on its length alone, so that a row's sums are the same in any company and with any
    // number of threads.
    void plan_attention() {
        int parts = 0, joins = 0;
        for (int r = 0; r < rows; r++) {
            int64_t last = s.positions[r] + 1;
            if (int run = run_of(r); run >= BLOCK) {
                for (int end = r + run; r < end; r += BLOCK)
                    for (int h = 0; h < m.kv_heads; h++)
                        units.push_back({r, h, 0, 0, std::min(BLOCK, end - r)});
                r = r - BLOCK + (run - 1) % BLOCK;  // the last of the run
                continue;
            }
            int pieces = int(std::min<int64_t>(MOST, (last + STRETCH - 1) / STRETCH));
            for (int h = 0; h < m.kv_heads; h++, joins++)
                for (int p = 0, first_part = parts; p < pieces; p++)
                    units.push_back({r, h, int(last * p / pieces), int(last * (p + 1) / pieces), 0,
                                     parts++, first_part, pieces, joins});
        }
        stride = round_up(G * (C + 2), LANES);
        scratch.resize(size_t(parts) * stride);
        done = std::vector<Counter>(joins);
    }

    // How many rows from r on are of one request, one position after the other.
    int run_of(int r) const {
        int end = r + 1;
        while (end < rows && s.table_of[end] == s.table_of[r] && s.positions[end] == s.positions[end - 1] + 1)
            end++;
        return end - r;
    }

    const int32_t* table(int row) const { return s.tables + size_t(s.table_of[row]) * s.table_width; }

    // Keys and values of a layer, for one row and KV head.
    template <class S>
    Cache<S> cache(const Layer& layer, int row, int head) const {
        int64_t stride = int64_t(m.kv_heads) * C, at = int64_t(head) * C;
        return {(const S*)layer.keys + at, (const S*)layer.values + at, stride, table(row), m.block_size};
    }

    int qkv_stride() const { return (m.heads + 2 * m.kv_heads) * C; }

    const float* query(const Unit& u) const { return &qkv[size_t(u.row) * qkv_stride() + size_t(u.head) * G * C]; }

    T* attended_by(int row, int head, int g) { return attended.row(row) + (head * G + g) * C; }

    Partial partial(int part) {
        float* base = &scratch[size_t(part) * stride];
        return {base + G * C, base + G * (C + 1), base};
    }

    void append(const Layer& layer, int r) {
        int H = m.heads, K = m.kv_heads, half = C / 2;
        float* q = &qkv[size_t(r) * (H + 2 * K) * C];
        float *k = q + H * C, *v = k + K * C;
        for (int h = 0; h < H + K; h++) {
            const float* weight = h < H ? layer.q_norm : layer.k_norm;
            if (weight) norm_head(q + h * C, weight, m.eps);
            rotate(q + h * C, &cos[size_t(r) * half], &sin[size_t(r) * half]);
        }
        for (int i = 0; i < H * C; i++) q[i] *= m.scale;
        int64_t slot = s.slots[r];
        if (slot < 0) return;
        if (m.cache_kind == BF16) save((bf16*)layer.keys, slot, k), save((bf16*)layer.values, slot, v);
        else save((float*)layer.keys, slot, k), save((float*)layer.values, slot, v);
    }

    template <class S>
    void save(S* cache, int64_t slot, const float* from) {
        int count = m.kv_heads * C;
        for (int i = 0; i < count; i += LANES) store(cache + slot * count + i, load(from + i));
    }

    void attention(const Layer& layer, const Unit& u) {
        if (m.cache_kind == BF16) attention<bf16>(layer, u);
        else attention<float>(layer, u);
    }

    template <class S>
    void attention(const Layer& layer, const Unit& u) {
        if (u.rows) return block<S>(layer, u);
        stretch<S>(layer, u);
        if (u.parts > 1) {
            Counter& counter = done[u.join];
            if (counter.next.fetch_add(1, std::memory_order_acq_rel) % u.parts != u.parts - 1) return;
        }
        // The last of the row's stretches to end joins them.
        Partial whole = partial(u.first_part);
        for (int p = 1; p < u.parts; p++) join(whole, partial(u.first_part + p));
        for (int g = 0; g < G; g++)
            for (int c = 0; c < C; c += LANES)
                store(attended_by(u.row, u.head, g) + c, load(whole.values + g * C + c) / whole.l[g]);
    }

    template <class S>
    void stretch(const Layer& layer, const Unit& u) {
        int first = u.first;
        if (layer.window) first = std::max<int64_t>(first, s.positions[u.row] + 1 - layer.window);
        attend(query(u), cache<S>(layer, u.row, u.head), std::min(first, u.last), u.last, partial(u.part));
    }

    template <class S>
    void block(const Layer& layer, const Unit& u) {
        BlockAttention<S> block;
        block.attend(query(u), qkv_stride(), u.rows, int(s.positions[u.row]), layer.window,
                     cache<S>(layer, u.row, u.head));
        for (int r = 0; r < u.rows; r++)
            for (int g = 0; g < G; g++)
                for (int c = 0; c < C; c += LANES)
                    store(attended_by(u.row + r, u.head, g) + c, load(block.of(r, g) + c));
    }

    const Model& m;
    const Step& s;
    const int rows, threads;
    Barrier barrier;
    std::vector<Counter> counters, done;
    std::vector<float> qkv, cos, sin, scratch;
    Vectors<T> normed, attended, hidden;
    Beside<T> bytes;  // of FEW to SOME rows
    std::vector<Vector<T>> in_bytes;
    std::vector<Unit> units;
    std::vector<Best> best;
    std::vector<Local> locals;
    int stride = 0;
};

template <class T>
bool run(const Model& model, const Step& step) {
    std::optional<Run<T>> all;  // holds all memory of the step; empty where there was too little
    auto prepare = [&](int threads) {
        try {
            all.emplace(model, step, threads);
        } catch (const std::bad_alloc&) {
        }
    };
#ifdef _OPENMP
    // There may be fewer threads than asked for, and a barrier for more of them would never open.
#pragma omp parallel num_threads(model.threads)
    {
#pragma omp single
        prepare(omp_get_num_threads());
        if (all) all->work(omp_get_thread_num());
    }
#else
    prepare(1);
    if (all) all->work(0);
#endif
    if (all) all->finish();
    return all.has_value();
}

}  // namespace minifer

// 0, or 1 where there was no memory for it.
extern "C" int minifer_step(const minifer::Model* model, const minifer::Step* step) {
#ifdef MINIFER_BF16_DOT
    if (model->round) return !minifer::run<minifer::bf16>(*model, *step);
#endif
    return !minifer::run<float>(*model, *step);
}

// Reads `bytes` of memory, which begin at a multiple of 64, and nothing else: as fast as it comes.
extern "C" int64_t minifer_read(const char* data, int64_t bytes, int32_t threads) {
    using namespace minifer;
    constexpr int64_t LINE = 64, PIECE = 64 * LINE;
    int64_t total = 0;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(+ : total)
    for (int64_t piece = 0; piece < bytes / PIECE; piece++) {
        u32x16 sums[4] = {};
        for (int64_t i = 0; i < PIECE; i += 4 * LINE) {
            const char* from = data + piece * PIECE + i;
            fetch<true>(from, 4 * LINE);
            for (int j = 0; j < 4; j++) sums[j] += load_as<u32x16>(from + j * LINE);
        }
        u32x16 all = (sums[0] + sums[1]) + (sums[2] + sums[3]);
        total += all[0] + all[15];
    }
    return total;
}
