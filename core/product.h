// What the products of all quants have in common: y[m, n] = x[m, k] . w[n, k]^T with all that comes before and after it.
// A kernel keeps w in panels of PANEL outputs, and says how one is multiplied and what becomes of a row of x before.
//
// A decode step has few rows, and then the weights' way from memory is the floor: every byte should be read once and
// cost nothing beside it. So panels are streamed through once per call. A panel is held against a block of rows of x at a
// time, whose sums stay in registers; further blocks of rows find the panel in the cache, and each block fetches its share
// of the panels to come, so that memory is busy all the while. These are fetched STREAMS at a time, from each a line in
// turn: one stream alone, which crosses a page every few rows, gets neither memory nor the processor's own prefetching up
// to speed. With more rows than that can hide, the same tile runs at the vector units' rate.
// Tile shape after Goto & van de Geijn, "Anatomy of High-Performance Matrix Multiplication" (2008).
//
// What is small is done where its input is at hand: rows of x are prepared once before the panels; bias, gate and residual
// come on sums that are still in registers, norms of output rows when all panels are done.
// A row's result must not depend on the other rows: each sum has its own order, whatever the block and the thread.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include <omp.h>

#include "vectors.h"

constexpr int STREAMS = 4;
constexpr int LINE = 64;  // bytes

enum Gate : int64_t { NONE, SILU, GELU };  // of the first half of the outputs, which is multiplied by the second half

struct Matrix {           // what is known of a product when the model is loaded, but for the weights
    const float* bias;    // [n] or null
    const float* before;  // weights [k] of the inputs' norm, or null
    const float* after;   // weights [outputs] of the norm of the outputs, or null
    int64_t n, k, gate;
    float before_eps, after_eps;

    int64_t outputs() const { return gate ? n / 2 : n; }
    int64_t each() const { return gate ? LANES : PANEL; }  // outputs of a panel
    int64_t count() const { return (outputs() + each() - 1) / each(); }

    // The row of w that is number `lane` of a panel, -1 behind the last. With a gate, a panel has LANES of the first half
    // and the LANES of the second that go with them.
    int64_t row(int64_t panel, int64_t lane) const {
        const int64_t second = gate ? lane / LANES : 0, column = panel * each() + lane - second * LANES;
        return column < outputs() ? second * outputs() + column : -1;
    }
};

// The first `width` lanes; the others are 0.
static inline vec load(const float* p, int64_t width) {
    if (width >= LANES) return *(const vec*)p;
    vec v = {};
    for (int64_t j = 0; j < width; j++) v[j] = p[j];
    return v;
}

static inline void store(float* p, vec v, int64_t width, bool add) {
    if (add) v += load(p, width);
    if (width >= LANES) {
        *(vec*)p = v;
        return;
    }
    for (int64_t j = 0; j < width; j++) p[j] = v[j];
}

// x times the logistic function of x (SiLU), or of 2 sqrt(2 / pi) (x + 0.044715 x^3), which is GELU's tanh form.
static inline vec activated(vec x, int64_t gate) {
    const vec t = gate == SILU ? x : x * (x * x * 0.07135481627f + 1.595769122f);
    const vec e = exponential(t < 0.0f ? t : -t);
    return x * ((t < 0.0f ? e : vec{} + 1.0f) / (e + 1.0f));
}

// 1 / rms(x).
static inline float norm_scale(const float* x, float eps, int64_t n) {
    vec squares = {};
    for (int64_t i = 0; i < n; i += LANES) {
        const vec v = load(x + i, n - i);
        squares += v * v;
    }
    float sum = 0.0f;
    for (int j = 0; j < LANES; j++) sum += squares[j];
    return 1.0f / std::sqrt(sum / n + eps);
}

// y = x / rms(x) * w, or added to what y holds. y may be x.
static inline void norm(const float* x, const float* w, float eps, int64_t n, float* y, bool add) {
    const float scale = norm_scale(x, eps, n);
    for (int64_t i = 0; i < n; i += LANES) store(y + i, load(x + i, n - i) * scale * load(w + i, n - i), n - i, add);
}

struct Product {  // one call
    const Matrix& matrix;
    const char* x;  // the rows as the kernel has prepared them
    int64_t step;   // bytes from row to row
    int64_t m;
    float* y;
    int64_t ldy;
    bool add;

    template <class T>
    const T* row(int64_t r) const {
        return (const T*)(x + r * step);
    }

    // What a panel's sums become: outputs of a row.
    void finish(vec low, vec high, int64_t row, int64_t panel) const {
        const int64_t column = panel * matrix.each(), width = matrix.outputs() - column;
        float* out = y + row * ldy + column;
        if (matrix.gate) {
            if (matrix.bias) {
                low += load(matrix.bias + column, width);
                high += load(matrix.bias + matrix.outputs() + column, width);
            }
            store(out, activated(low, matrix.gate) * high, width, add);
            return;
        }
        if (matrix.bias) {
            low += load(matrix.bias + column, width);
            high += load(matrix.bias + column + LANES, width - LANES);
        }
        store(out, low, width, add);
        store(out + LANES, high, width - LANES, add);
    }
};

struct Ahead {  // what a block fetches meanwhile: unit i of it from stream i % STREAMS
    const char* from;
    int64_t apart, step;  // bytes from stream to stream; from unit to unit of a stream

    template <int WIDTH>
    void fetch(int64_t i) const {
        const char* line = from + i % STREAMS * apart + i / STREAMS * step;
        for (int j = 0; j < WIDTH; j += LINE) __builtin_prefetch(line + j);
    }
};

// Panels [first, last) of `units` times WIDTH bytes each, one after the other, against blocks of at most `most` rows,
// which are equal as far as may be: block(w, ahead, row, rows, panel), which fetches once for each unit.
template <int WIDTH, class Block>
static inline void walk(const char* panels, int64_t units, int64_t m, int64_t most, int64_t first, int64_t last,
                        const Block& block) {
    const int64_t blocks = (m + most - 1) / most, size = units * WIDTH;
    for (int64_t panel = first; panel < last; panel++) {
        const char* w = panels + panel * size;
        const int64_t at = (panel - first) % STREAMS, next = panel - at + STREAMS;
        const char* group = panels + std::min(next, last - STREAMS) * size;
        for (int64_t b = 0; b < blocks; b++) {
            const int64_t from = b * m / blocks, to = (b + 1) * m / blocks;
            const int64_t share = (at * blocks + b) * units / (STREAMS * blocks);  // units that others have fetched
            const Ahead ahead = next < last ? Ahead{group + share * WIDTH, size, WIDTH / blocks} : Ahead{w, 0, 0};
            block(w, ahead, from, to - from, panel);
        }
    }
}

// Threads share the panels, so each reads its part of w once. A kernel has `bytes()`, how many a row of x takes once it is
// prepared, 0 where it is taken as it is; `prepare(x, to)`, which does that; and `multiply(product, first, last)` for
// panels. `scratch` holds m rows of these bytes, a multiple of 4, and, with a norm after the product, m rows of outputs.
template <class Kernel>
static void run(const Kernel& kernel, const Matrix& matrix, const float* x, int64_t m, int64_t ldx, float* y, int64_t ldy,
                bool add, char* scratch, int threads) {
    const int64_t bytes = kernel.bytes(), outputs = matrix.outputs(), step = bytes ? bytes : ldx * (int64_t)sizeof(float);
    float* whole = (float*)(scratch + m * bytes);
    const Product p{matrix, bytes ? scratch : (const char*)x, step, m, matrix.after ? whole : y,
                    matrix.after ? outputs : ldy, add && !matrix.after};
#pragma omp parallel num_threads(threads)
    {
        if (bytes) {
#pragma omp for schedule(static)
            for (int64_t row = 0; row < m; row++) kernel.prepare(x + row * ldx, scratch + row * bytes);
        }
        const int64_t team = omp_get_num_threads(), member = omp_get_thread_num(), panels = matrix.count();
        kernel.multiply(p, member * panels / team, (member + 1) * panels / team);
        if (matrix.after) {
#pragma omp barrier
#pragma omp for schedule(static) nowait
            for (int64_t row = 0; row < m; row++)
                norm(whole + row * outputs, matrix.after, matrix.after_eps, outputs, y + row * ldy, add);
        }
    }
}
