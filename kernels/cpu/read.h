// How fast memory can be read the way a step reads it: the limit of every step.

#pragma once

#include <algorithm>

#include "lanes.h"
#include "panels.h"

namespace minifer {

// Reads `bytes` of memory once, from front to back in each thread, and does next to nothing with them.
// Returns the sum of their 32-bit words, of which the last is filled up with zeros.
inline uint32_t read(const char* data, int64_t bytes, int threads) {
    constexpr int64_t LINE = 64, PIECE = 64 * LINE;
    uint32_t total = 0;
#pragma omp parallel for num_threads(threads) schedule(static) reduction(+ : total)
    for (int64_t start = 0; start < bytes / PIECE * PIECE; start += PIECE) {
        u32x16 sums[4] = {};
        for (int64_t i = start; i < start + PIECE; i += 4 * LINE) {
            fetch<true>(data + i, 4 * LINE);
            for (int j = 0; j < 4; j++) sums[j] += load_as<u32x16>(data + i + j * LINE);
        }
        u32x16 all = (sums[0] + sums[1]) + (sums[2] + sums[3]);
        for (int lane = 0; lane < LANES; lane++) total += all[lane];
    }
    for (int64_t i = bytes / PIECE * PIECE; i < bytes; i += 4) {
        uint32_t word = 0;
        std::memcpy(&word, data + i, std::min<int64_t>(4, bytes - i));
        total += word;
    }
    return total;
}

}  // namespace minifer
