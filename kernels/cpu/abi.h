// What Python hands over: `step.py` holds the same structures, field by field.

#pragma once

#include <cstdint>

namespace minifer {

struct Matrix {
    const char* data;   // panels
    const float* bias;  // [rows] or null
    int32_t rows;       // a multiple of 16
    int32_t columns;    // a multiple of 32
    int32_t kind;       // `Kind` of panels.h
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
    int64_t window;  // 0: full attention
};

struct Model {
    int32_t layers, width, heads, kv_heads, hidden, vocabulary, block_size;
    int32_t cache_kind;  // F32 or BF16, of keys and values
    int32_t round;       // 1: vectors are bfloat16 where they meet a matrix, on a CPU that multiplies
                         // bfloat16; on others they stay float32
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
    float* logits;      // [R, V] or null
    int64_t* best;      // [R], the largest logit's lowest index
    float* best_logit;  // [R], NaN where any logit is
    double* seconds;    // [PHASES] or null: what each phase took, its wait included
};

enum Phase { QKV, APPEND, ATTENTION, OUTPUT, GATE_UP, DOWN, HEAD, PHASES };

}  // namespace minifer
