// The threads of one step, and how they share the work of a phase.
//
// All phases of a step run inside one parallel region: a thread that has finished its share of a
// phase meets the others at a barrier and goes on, instead of ending one launch and waiting for
// the next. A barrier costs a fraction of a microsecond, a launch several.

#pragma once

#include <atomic>
#include <thread>

#ifdef MINIFER_AVX512
#include <immintrin.h>
#endif

namespace minifer {

// Meets in `wait`; spins, and lets others run where a thread has lost its core.
class Barrier {
public:
    explicit Barrier(int size) : size_(size) {}

    void wait() {
        if (size_ == 1) return;
        int round = round_.load(std::memory_order_relaxed);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
            arrived_.store(0, std::memory_order_relaxed);
            round_.store(round + 1, std::memory_order_release);
            return;
        }
        for (int spins = 0; round_.load(std::memory_order_acquire) == round; spins++) {
            if (spins < 4096)
                pause();
            else
                std::this_thread::yield();
        }
    }

private:
    static void pause() {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        asm volatile("yield");
#endif
    }

    const int size_;
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<int> round_{0};
};

struct alignas(64) Counter {
    std::atomic<int> next{0};
};

// Share `count` items: each thread takes a fixed part first, then a few at a time from what is left.
// The fixed part needs no talk, and as its items lie one after the other, what is fetched ahead is
// what comes next. The rest evens out what a busy neighbour has delayed; it is small, because what
// is fetched ahead of it often is another thread's next item: a quarter would cost a fifth of the
// bandwidth.
template <class Work>
inline void share(int count, int thread, int threads, Counter& counter, Work work) {
    int each = count * 15 / 16 / threads, some = (count + 31) / 32;
    for (int i = thread * each; i < (thread + 1) * each; i++) work(i);
    for (;;) {
        int i = each * threads + some * counter.next.fetch_add(1, std::memory_order_relaxed);
        if (i >= count) return;
        for (int end = i + some < count ? i + some : count; i < end; i++) work(i);
    }
}

}  // namespace minifer
