// The product with weights of 16 bits (bfloat16), whose layout and loops are in _tiles.h.
//
// Where the machine multiplies pairs of bfloat16 (AMX, AVX512-BF16), rows of x are rounded to them and sums are float32;
// elsewhere weights are widened as they are loaded, which needs no unit of its own, and x stays as it is.

#if defined(__AMX_BF16__) && defined(__AVX512BF16__)
#define MEET _tile_dpbf16ps
#endif
#include "_tiles.h"

#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

typedef uint16_t halves __attribute__((vector_size(LANES * 2), aligned(2), may_alias));

// To nearest, and to even where that is in doubt. What is not a number stays so.
static inline halves narrowed(vec x) {
    const words b = (words)x, up = (b + 0x7fffu + (b >> 16 & 1u)) >> 16;
    return __builtin_convertvector(x != x ? words{} + 0x7fc0u : up, halves);
}

struct Narrow {  // what is known of a product when the model is loaded
    Matrix matrix;
    const char* panels;
    int64_t unit;  // 1 to use the matrix unit
};

struct Kernel {
    const Narrow& told;
    const int64_t steps = steps_of(told.matrix.k, 2), unit = told.unit;

    typedef vec Number;
    static constexpr int PLANES = 1;

#if defined(__AVX512BF16__)
    static constexpr int EACH = 4;
    struct Weights {
        __m512bh pairs;
        explicit Weights(const char* w) : pairs((__m512bh)_mm512_loadu_si512(w)) {}
    };
    static void add(vec& sum, const Weights& w, const char* x) {
        sum = (vec)_mm512_dpbf16_ps((__m512)sum, w.pairs, (__m512bh)_mm512_set1_epi32(*(const int32_t*)x));
    }
#else
    static constexpr int EACH = 8;
    struct Weights {
        vec even, odd;
        explicit Weights(const char* w) : even((vec)(*(const words*)w << 16)), odd((vec)(*(const words*)w & 0xffff0000u)) {}
    };
    static void add(vec& sum, const Weights& w, const char* x) {
        sum += w.even * ((const float*)x)[0];
        sum += w.odd * ((const float*)x)[1];
    }
#endif
    static vec value(const Sums<Kernel>& sums, const char*, int64_t, int) { return sums.planes[0]; }

    int64_t plane() const { return steps * QUADS * EACH; }
    int64_t bytes() const { return plane() + LINE; }  // the line keeps rows from sharing places in caches

    void prepare(const float* x, char* to) const {
        const Matrix& m = told.matrix;
        const float scale = m.before ? norm_scale(x, m.before_eps, m.k) : 1.0f;
        for (int64_t i = 0; i < steps * QUADS * 2; i += LANES) {
            vec v = load(x + i, m.k - i);
            if (m.before) v = v * scale * load(m.before + i, m.k - i);
            if (EACH == 4)
                *(halves*)(to + i * 2) = narrowed(v);
            else
                *(vec*)(to + i * 4) = v;
        }
    }

    void multiply(const Product& p, int64_t first, int64_t last) const {
        multiply_panels(*this, p, told.panels, first, last);
    }
};

extern "C" {

int64_t phloem_lanes() { return LANES; }
int64_t phloem_unit() { return matrix_unit(); }
int64_t phloem_row_bytes(const Narrow* narrow) { return Kernel{*narrow}.bytes(); }

// w [n, k] row-major to panels, missing rows and columns as zeros.
void phloem_pack(const Narrow* narrow, const float* w, char* panels, int threads) {
    const int64_t k = narrow->matrix.k, steps = steps_of(k, 2);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t panel = 0; panel < narrow->matrix.count(); panel++)
        for (int64_t lane = 0; lane < PANEL; lane++) {
            const int64_t row = narrow->matrix.row(panel, lane);
            for (int64_t step = 0; step < steps; step++) {
                uint16_t bytes[2 * QUADS] = {};
                for (int64_t i = 0, at = step * 2 * QUADS; row >= 0 && i < 2 * QUADS; i += LANES)
                    *(halves*)(bytes + i) = narrowed(load(w + row * k + at + i, k - at - i));
                place(panels + panel * steps * 2 * TILE, step, lane, bytes);
            }
        }
}

// What a product takes x [k] for.
void phloem_taken(const float* x, int64_t k, float* to) {
    for (int64_t i = 0; i < k; i += LANES) {
        const vec v = load(x + i, k - i);
        store(to + i, Kernel::EACH == 4 ? (vec)(__builtin_convertvector(narrowed(v), words) << 16) : v, k - i, false);
    }
}

void phloem_multiply(const Narrow* narrow, const float* x, int64_t m, int64_t ldx, float* y, int64_t ldy, int add,
                     char* scratch, int threads) {
    run(Kernel{*narrow}, narrow->matrix, x, m, ldx, y, ldy, add, scratch, threads);
}
}
