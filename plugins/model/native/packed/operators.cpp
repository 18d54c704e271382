// The float32 operators of a decoder layer: a product with packed weights y[m, n] = x[m, k] . w[n, k]^T with all that
// comes before and after it, and the rotation of heads.
//
// A decode step has few rows, and then the weights' way from memory is the floor: every byte should be read once and
// cost nothing beside it. So w lies in panels of PANEL outputs, [panel][k][PANEL], which are streamed through once per
// call. A panel is held against up to ROWS rows of x at a time, whose sums stay in registers; further blocks of rows
// find the panel in the cache, and each block fetches its share of the panels to come, so that memory is busy all the
// while. These are fetched STREAMS at a time, from each a line in turn: one stream alone, which crosses a page every few
// rows, gets neither memory nor the processor's own prefetching up to speed.
// With more rows than that can hide, the same tile runs at the vector units' rate.
// Tile shape after Goto & van de Geijn, "Anatomy of High-Performance Matrix Multiplication" (2008).
//
// What is small is done where its input is at hand: norms of input rows once before the panels, bias, gate and residual
// on sums that are still in registers, norms of output rows when all panels are done.
// A row's result does not depend on the other rows: each sum has its own order, whatever the block and the thread.

#include <algorithm>
#include <cmath>
#include <cstdint>

#include <omp.h>

#include "vectors.h"

constexpr int STREAMS = 4;
constexpr int LINE = 16;  // floats

enum Gate : int64_t { NONE, SILU, GELU };  // of the first half of the outputs, which is multiplied by the second half

struct Matrix {           // what is known of a product when the model is loaded
    const float* panels;  // with a gate, a panel has LANES of the first half and the LANES of the second that go with them
    const float* bias;    // [n] or null
    const float* before;  // weights [k] of the inputs' norm, or null
    const float* after;   // weights [outputs] of the norm of the outputs, or null
    int64_t n, k, gate;
    float before_eps, after_eps;

    int64_t outputs() const { return gate ? n / 2 : n; }
    int64_t each() const { return gate ? LANES : PANEL; }  // outputs of a panel
    int64_t count() const { return (outputs() + each() - 1) / each(); }
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

// y = x / rms(x) * w, or added to what y holds. y may be x.
static void norm(const float* x, const float* w, float eps, int64_t n, float* y, bool add) {
    vec squares = {};
    for (int64_t i = 0; i < n; i += LANES) {
        const vec v = load(x + i, n - i);
        squares += v * v;
    }
    float sum = 0.0f;
    for (int j = 0; j < LANES; j++) sum += squares[j];
    const float scale = 1.0f / std::sqrt(sum / n + eps);
    for (int64_t i = 0; i < n; i += LANES) store(y + i, load(x + i, n - i) * scale * load(w + i, n - i), n - i, add);
}

struct Product {
    const Matrix& matrix;
    const float* x;
    int64_t ldx;
    float* y;
    int64_t ldy;
    bool add;

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

struct Ahead {  // what a block fetches meanwhile: row i of it from stream i % STREAMS
    const float* from;
    int64_t apart, step;  // from stream to stream; from row to row of a stream

    void fetch(int64_t i) const {
        const float* line = from + i % STREAMS * apart + i / STREAMS * step;
        for (int j = 0; j < PANEL; j += LINE) __builtin_prefetch(line + j);
    }
};

template <int R>
static void block(const Product& p, const float* w, const Ahead& ahead, int64_t row, int64_t panel) {
    vec low[R] = {}, high[R] = {};
    const float* x = p.x + row * p.ldx;
    for (int64_t i = 0; i < p.matrix.k; i++, w += PANEL) {
        ahead.fetch(i);
        const vec first = *(const vec*)w, second = *(const vec*)(w + LANES);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            const float s = x[r * p.ldx + i];
            low[r] += first * s;
            high[r] += second * s;
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) p.finish(low[r], high[r], row + r, panel);
}

using Block = void (*)(const Product&, const float*, const Ahead&, int64_t, int64_t);
static constexpr Block BLOCKS[] = {block<1>, block<2>, block<3>, block<4>,  block<5>,  block<6>,
#if !defined(__AVX2__) || defined(__AVX512F__)
                                   block<7>, block<8>,
#endif
#if defined(__AVX512F__)
                                   block<9>, block<10>, block<11>, block<12>,
#endif
};

// Panels [first, last), one after the other. Rows are cut into equal blocks of at most ROWS.
static void multiply(const Product& p, int64_t m, int64_t first, int64_t last) {
    const int64_t blocks = (m + ROWS - 1) / ROWS, size = p.matrix.k * PANEL;
    for (int64_t panel = first; panel < last; panel++) {
        const float* w = p.matrix.panels + panel * size;
        const int64_t at = (panel - first) % STREAMS, next = panel - at + STREAMS;
        const float* group = p.matrix.panels + std::min(next, last - STREAMS) * size;
        for (int64_t b = 0; b < blocks; b++) {
            const int64_t from = b * m / blocks, to = (b + 1) * m / blocks;
            const int64_t share = (at * blocks + b) * p.matrix.k / (STREAMS * blocks);  // rows that others have fetched
            const Ahead ahead = next < last ? Ahead{group + share * PANEL, size, PANEL / blocks} : Ahead{w, 0, 0};
            BLOCKS[to - from - 1](p, w, ahead, from, panel);
        }
    }
}

// A head [dim], in place: pairs (i, i + dim / 2) turned. cos and sin [dim], the first half of sin negated.
static void turn(float* x, int64_t dim, const float* cos, const float* sin) {
    const int64_t half = dim / 2;
    for (int64_t i = 0; i < half; i += LANES) {
        const int64_t left = half - i;
        const vec a = load(x + i, left), b = load(x + half + i, left);
        store(x + i, a * load(cos + i, left) + b * load(sin + i, left), left, false);
        store(x + half + i, b * load(cos + half + i, left) + a * load(sin + half + i, left), left, false);
    }
}

extern "C" {

int64_t phloem_lanes() { return LANES; }

// w [n, k] row-major to [count][k][PANEL], missing outputs as zeros. `panels` may not point anywhere yet.
void phloem_pack(const Matrix* matrix, const float* w, float* panels, int threads) {
    const int64_t k = matrix->k, outputs = matrix->outputs();
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t panel = 0; panel < matrix->count(); panel++) {
        float* out = panels + panel * k * PANEL;
        for (int64_t i = 0; i < k; i++)
            for (int64_t j = 0; j < PANEL; j++, out++) {
                const int64_t second = matrix->gate ? j / LANES : 0;
                const int64_t column = panel * matrix->each() + j - second * LANES;
                *out = column < outputs ? w[(second * outputs + column) * k + i] : 0.0f;
            }
    }
}

// Threads share the panels, so each reads its part of w once. `scratch` holds m rows of k with a norm before the
// product, and m rows of outputs with one after it.
void phloem_multiply(const Matrix* matrix, const float* x, int64_t m, int64_t ldx, float* y, int64_t ldy, int add,
                     float* scratch, int threads) {
    const int64_t k = matrix->k, outputs = matrix->outputs();
    float* whole = matrix->before ? scratch + m * k : scratch;
    const Product p{*matrix, matrix->before ? scratch : x, matrix->before ? k : ldx, matrix->after ? whole : y,
                    matrix->after ? outputs : ldy, add && !matrix->after};
#pragma omp parallel num_threads(threads)
    {
        if (matrix->before) {
#pragma omp for schedule(static)
            for (int64_t row = 0; row < m; row++)
                norm(x + row * ldx, matrix->before, matrix->before_eps, k, scratch + row * k, false);
        }
        const int64_t team = omp_get_num_threads(), member = omp_get_thread_num(), panels = matrix->count();
        multiply(p, m, member * panels / team, (member + 1) * panels / team);
        if (matrix->after) {
#pragma omp barrier
#pragma omp for schedule(static) nowait
            for (int64_t row = 0; row < m; row++)
                norm(whole + row * outputs, matrix->after, matrix->after_eps, outputs, y + row * ldy, add);
        }
    }
}

// The first `heads` of x [tokens, *, dim], whose tokens are `step` apart, in place: normed with weights [heads, dim],
// where there are some, then turned by the token's cos and sin [tokens, dim].
void phloem_rotate(float* x, int64_t tokens, int64_t step, int64_t heads, int64_t dim, const float* weights, float eps,
                   const float* cos, const float* sin, int threads) {
    constexpr int64_t SMALL = 1 << 14;  // elements that are turned before a second thread has woken up
#pragma omp parallel for num_threads(threads) schedule(static) if (tokens * heads * dim > SMALL)
    for (int64_t token = 0; token < tokens; token++)
        for (int64_t head = 0; head < heads; head++) {
            float* at = x + token * step + head * dim;
            if (weights) norm(at, weights + head * dim, eps, dim, at, false);
            turn(at, dim, cos + token * dim, sin + token * dim);
        }
}
}
