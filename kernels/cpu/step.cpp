// A whole step of a decoder-only transformer in one call: the megakernel of a CPU.
//
// T rows go through all layers inside one parallel region. A row is one token with its position
// and the block table of its request: a decode has one row, a speculative verification a few, a
// piece of a prompt as many as it has tokens. Six phases a layer, a barrier after each:
//
//   1  qkv  = W_qkv · norm(x)                            panels of W are shared out
//   2  rotate q and k, append k and v to their slots     rows
//   3  attend over the live blocks                       blocks of rows, or stretches of contexts
//   4  x   += W_o · attention                            panels
//   5  h    = silu(W_gate · norm(x)) · (W_up · norm(x))  pairs of panels
//   6  x   += W_down · h                                 panels
//
// and once a step, 7: the head. Its largest logit is found where it is computed: a greedy step
// writes no logits.
//
// The residual stream x and all sums are float32. In a bfloat16 model what meets a matrix is rounded
// to bfloat16, and what meets codes to integers of 16 bits; on a CPU that multiplies neither it stays
// float32.
//
//   abi.h        the structures that Python hands over
//   lanes.h      sixteen numbers at a time
//   team.h       the threads: a barrier, and who takes which item of a phase
//   panels.h     a matrix, dense or of codes, times a few vectors
//   attention.h  one row's attention over a stretch of its context
//   blocks.h     the attention of sixteen rows of one request
//   rows.h       which rows attend in which of the two ways
//   read.h       memory read as the step reads it, and nothing else

#include <chrono>
#include <new>
#include <optional>
#include <type_traits>
#include <vector>

#ifdef _OPENMP
#include <omp.h>
#endif

#include "abi.h"
#include "lanes.h"
#include "panels.h"
#include "read.h"
#include "rows.h"
#include "team.h"

namespace minifer {

inline double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

template <class T>
class Run {
public:
    Run(const Model& model, const Step& step, int threads)
        : m(model), s(step), rows(step.rows), threads(threads), barrier(threads),
          counters(5 * model.layers + 1), heads(model, step) {
        normed.reserve(rows, m.width);
        hidden.reserve(rows, m.hidden);
        if (rows > FEW) {
            bytes.reserve(std::min(rows, SOME), widest());
            in_bytes.resize(std::min(rows, SOME));
        }
        best.resize(size_t(threads) * std::max(1, s.num_logits));
        locals.reserve(threads);
        for (int i = 0; i < threads; i++) locals.emplace_back(*this, i);
    }

    void work(int thread) {
        Local& local = locals[thread];
        for (int r = thread; r < rows; r += threads) begin(r, local);
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
        double since;              // when the last phase ended
        int counter = 0;           // of the next phase that is shared out
        std::vector<float> token;  // a row of the head
        Vectors<T> few;            // norms of a few rows: cheaper made by each thread than waited for
        std::vector<T> panel;      // two panels of codes, multiplied out
        Beside<T> bytes;           // what codes are multiplied by, of a few rows
        std::vector<Vector<T>> in;  // what the next matrix meets

        Local(Run& run, int thread) : thread(thread), since(now()) {
            token.resize(run.m.head.columns);
            if (run.rows <= FEW) few.reserve(run.rows, run.m.width);
            panel.resize(size_t(2) * run.widest() * LANES);
            if (run.rows <= FEW || run.s.num_logits <= FEW) bytes.reserve(FEW, run.widest());
            in.reserve(run.rows);
        }
    };

    // Look the token up, and find the angles of its position.
    void begin(int r, Local& local) {
        if (s.tokens) {
            float* row = local.token.data();
            row_of(m.head.kind, m.head.data, s.tokens[r], m.head.columns, row);
            std::copy_n(row, m.width, s.x + size_t(r) * m.width);
        }
        heads.find_angles(r);
    }

    // The end of a phase: nobody goes on before all are through.
    void meet(Phase phase, Local& local) {
        barrier.wait();
        if (!s.seconds || local.thread) return;
        double end = now();
        s.seconds[phase] += end - local.since;
        local.since = end;
    }

    void layer(const Layer& layer, Local& local) {
        normalise(layer.attention_norm, layer.qkv, nullptr, rows, local);
        multiply(layer.qkv, local, [&](int row, int panel, f32x16 out) {
            put(heads.qkv(row), panel, heads.stride, out);
        });
        meet(QKV, local);
        for (int r = local.thread; r < rows; r += threads) heads.append(layer, r);
        meet(APPEND, local);
        share(heads.num_units(), local.thread, threads, counters[local.counter++],
              [&](int unit) { heads.attend(layer, unit); });
        meet(ATTENTION, local);
        inputs(heads.out, layer.o, rows, local);
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

    // `from` as what `next` is multiplied by. Of many rows the threads share what codes need.
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

    // The entries of the longest vector that meets a matrix.
    int widest() const { return round_up(std::max({m.width, m.hidden, m.heads * C}), GROUP); }

    static bool meets_codes(const Matrix& w, int count) {
        return count <= SOME && (w.kind == Q4 || w.kind == Q8);
    }

    // How many panels go together: more of them where vectors are many.
    static int together(const Matrix& w, int count) {
        return count <= FEW || meets_codes(w, count) ? 1 : 2;
    }

    // -- matrices

    // Calls out(row, panel, sixteen sums) for all rows of `local.in` and all panels.
    template <class Out>
    void multiply(const Matrix& w, Local& local, Out out) {
        int panels = w.rows / LANES, each = together(w, int(local.in.size()));
        int items = (panels + each - 1) / each;
        share(items, local.thread, threads, counters[local.counter++], [&](int item) {
            int first = item * each;
            auto use = [&](int row, auto& sums) {
                int panel = first;
                for (f32x16 sum : sums) out(row, panel++, sum);
            };
            if (each == 2 && first + 1 < panels) product<2>(w, first, local, use);
            else product<1>(w, first, local, use);
        });
    }

    // W_gate and W_up: panels in pairs.
    void gate_up(const Matrix& w, Local& local) {
        bool pairs = together(w, int(local.in.size())) == 2;
        share(w.rows / LANES / 2, local.thread, threads, counters[local.counter++], [&](int pair) {
            auto use = [&](int row, f32x16 (&sums)[2]) {
                store(hidden.row(row) + pair * LANES, silu(sums[0]) * sums[1]);
            };
            if (pairs) return product<2>(w, 2 * pair, local, use);
            f32x16 gates[SOME];
            product<1>(w, 2 * pair, local, [&](int row, f32x16 (&sums)[1]) { gates[row] = sums[0]; });
            product<1>(w, 2 * pair + 1, local, [&](int row, f32x16 (&sums)[1]) {
                f32x16 both[2] = {gates[row], sums[0]};
                use(row, both);
            });
        });
    }

    // Calls out(row, P · sixteen sums): panels first … first + P − 1, all rows of `local.in`.
    template <int P, class Out>
    void product(const Matrix& w, int first, Local& local, Out out) {
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
        auto take = [&](auto many) {
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
        take(std::integral_constant<int, 8>{});
        take(std::integral_constant<int, 4>{});
        take(std::integral_constant<int, 2>{});
        take(std::integral_constant<int, 1>{});
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

    const Model& m;
    const Step& s;
    const int rows, threads;
    Barrier barrier;
    std::vector<Counter> counters;  // of the phases that are shared out: all but the second
    RowsAttention<T> heads;
    Vectors<T> normed, hidden;
    Beside<T> bytes;  // of more than FEW rows and up to SOME: made once, read by all threads
    std::vector<Vector<T>> in_bytes;
    std::vector<Best> best;
    std::vector<Local> locals;
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

// The sum of the 32-bit words of some memory, see `read.h`.
extern "C" int64_t minifer_read(const char* data, int64_t bytes, int32_t threads) {
    return minifer::read(data, bytes, threads);
}
