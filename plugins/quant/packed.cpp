// The product with float32 weights, in panels [panel][k][PANEL]: product.h says how they are streamed.

#include "product.h"

struct Packed {
    Matrix matrix;
    const float* panels;
};

template <int R>
static void block(const Product& p, const float* w, const Ahead& ahead, int64_t row, int64_t panel) {
    vec low[R] = {}, high[R] = {};
    const float* x = p.row<float>(row);
    const int64_t ldx = p.step / sizeof(float);
    for (int64_t i = 0; i < p.matrix.k; i++, w += PANEL) {
        ahead.fetch<PANEL * sizeof(float)>(i);
        const vec first = *(const vec*)w, second = *(const vec*)(w + LANES);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            const float s = x[r * ldx + i];
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

struct Kernel {
    const Packed& packed;

    int64_t bytes() const { return packed.matrix.before ? packed.matrix.k * sizeof(float) : 0; }

    void prepare(const float* x, char* to) const {
        norm(x, packed.matrix.before, packed.matrix.before_eps, packed.matrix.k, (float*)to, false);
    }

    void multiply(const Product& p, int64_t first, int64_t last) const {
        walk<PANEL * sizeof(float)>(
            (const char*)packed.panels, p.matrix.k, p.m, ROWS, first, last,
            [&](const char* w, const Ahead& ahead, int64_t row, int64_t rows, int64_t panel) {
                BLOCKS[rows - 1](p, (const float*)w, ahead, row, panel);
            });
    }
};

extern "C" {

int64_t phloem_lanes() { return LANES; }

// w [n, k] row-major to panels, missing outputs as zeros. `packed->panels` may not point anywhere yet.
void phloem_pack(const Packed* packed, const float* w, float* panels, int threads) {
    const int64_t k = packed->matrix.k;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t panel = 0; panel < packed->matrix.count(); panel++) {
        float* out = panels + panel * k * PANEL;
        for (int64_t i = 0; i < k; i++)
            for (int64_t j = 0; j < PANEL; j++, out++) {
                const int64_t row = packed->matrix.row(panel, j);
                *out = row < 0 ? 0.0f : w[row * k + i];
            }
    }
}

void phloem_multiply(const Packed* packed, const float* x, int64_t m, int64_t ldx, float* y, int64_t ldy, int add,
                     char* scratch, int threads) {
    run(Kernel{*packed}, packed->matrix, x, m, ldx, y, ldy, add, scratch, threads);
}
}
