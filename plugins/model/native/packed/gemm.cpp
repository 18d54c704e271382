// Packed float32 matrix product: y[m, n] = x[m, k] . w[n, k]^T, plus a bias, plus what y holds.
//
// A decode step has few rows, and then the weights' way from memory is the floor: every byte should be read once and
// cost nothing beside it. So w lies in panels of PANEL outputs, [panel][k][PANEL], which are streamed through once per
// call. A panel is held against up to ROWS rows of x at a time, whose sums stay in registers; further blocks of rows
// find the panel in the cache, and each block fetches its share of the next panel, so that memory is busy all the while.
// With more rows than that can hide, the same tile runs at the vector units' rate.
// Tile shape after Goto & van de Geijn, "Anatomy of High-Performance Matrix Multiplication" (2008).

#include <algorithm>
#include <cstdint>

#if defined(__AVX512F__)
constexpr int LANES = 16, ROWS = 12;  // 24 sums, 2 weights: of 32 registers
#elif defined(__AVX2__)
constexpr int LANES = 8, ROWS = 6;  // 12 sums, 2 weights, 1 broadcast: of 16 registers
#else
constexpr int LANES = 4, ROWS = 8;  // NEON, SSE
#endif
constexpr int PANEL = 2 * LANES;
typedef float vec __attribute__((vector_size(LANES * sizeof(float)), aligned(4), may_alias));

struct Product {
    const float* x;
    int64_t ldx;
    const float* bias;  // [n] or null
    float* y;
    int64_t ldy;
    int64_t k;
    bool add;
};

template <int R>
static void block(const Product& p, const float* w, const float* next, int64_t step, int64_t row, int64_t column,
                  int64_t width) {
    vec low[R] = {}, high[R] = {};
    const float* x = p.x + row * p.ldx;
    for (int64_t i = 0; i < p.k; i++, w += PANEL, next += step) {
        __builtin_prefetch(next);  // never read, so it may lie past the end
        const vec first = *(const vec*)w, second = *(const vec*)(w + LANES);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            const float s = x[r * p.ldx + i];
            low[r] += first * s;
            high[r] += second * s;
        }
    }
    for (int r = 0; r < R; r++) {
        float sums[PANEL];
        *(vec*)sums = low[r];
        *(vec*)(sums + LANES) = high[r];
        float* y = p.y + (row + r) * p.ldy + column;
        for (int64_t j = 0; j < width; j++) {
            const float bias = p.bias ? p.bias[column + j] : 0.0f;
            y[j] = sums[j] + bias + (p.add ? y[j] : 0.0f);
        }
    }
}

using Block = void (*)(const Product&, const float*, const float*, int64_t, int64_t, int64_t, int64_t);
static constexpr Block BLOCKS[] = {block<1>, block<2>, block<3>, block<4>,  block<5>,  block<6>,
#if !defined(__AVX2__) || defined(__AVX512F__)
                                   block<7>, block<8>,
#endif
#if defined(__AVX512F__)
                                   block<9>, block<10>, block<11>, block<12>,
#endif
};

extern "C" {

int64_t phloem_panel() { return PANEL; }

// w [n, k] row-major to [ceil(n / PANEL)][k][PANEL], missing outputs as zeros.
void phloem_pack(const float* w, int64_t n, int64_t k, float* packed, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t panel = 0; panel < (n + PANEL - 1) / PANEL; panel++) {
        float* out = packed + panel * k * PANEL;
        for (int64_t i = 0; i < k; i++)
            for (int64_t j = 0; j < PANEL; j++, out++) {
                const int64_t column = panel * PANEL + j;
                *out = column < n ? w[column * k + i] : 0.0f;
            }
    }
}

// Rows are cut into equal blocks of at most ROWS; threads share the panels, so each reads its part of w once.
void phloem_gemm(const float* x, int64_t m, int64_t ldx, const float* packed, int64_t n, int64_t k, const float* bias,
                 float* y, int64_t ldy, int add, int threads) {
    const Product p{x, ldx, bias, y, ldy, k, add != 0};
    const int64_t blocks = (m + ROWS - 1) / ROWS;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t panel = 0; panel < (n + PANEL - 1) / PANEL; panel++) {
        const int64_t column = panel * PANEL, width = std::min<int64_t>(PANEL, n - column);
        for (int64_t b = 0; b < blocks; b++) {
            const int64_t from = b * m / blocks, to = (b + 1) * m / blocks;
            const float* w = packed + panel * k * PANEL;
            BLOCKS[to - from - 1](p, w, w + k * PANEL + b * k * PANEL / blocks, PANEL / blocks, from, column, width);
        }
    }
}
}
