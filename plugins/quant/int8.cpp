// The product with weights of 8 bits and a scale per output; _tiles.h has the layout and the loops.
//
// A row of x is rounded to integers with a scale of its own; sums are exact, the scales come on these. What enters a layer
// has a few values that are much larger than all others, of which 8 bits would leave little; so these integers have two
// digits, each a plane of bytes, which meet the weights one after the other while these are at hand. Weights have 128 added,
// as integer units want one of the factors unsigned: 128 times the sum of a plane is taken off again.

#if defined(__AVX512VNNI__) || (defined(__AVXVNNI__) && !defined(__AVX512F__))
#define FOURS  // 4 bytes meet 4 bytes in one instruction
#if defined(__AMX_INT8__)
#define MEET _tile_dpbsud
#endif
#endif
#include "_tiles.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

typedef int8_t chars __attribute__((vector_size(LANES), aligned(1), may_alias));
typedef int16_t shorts __attribute__((vector_size(LANES * 2), aligned(2), may_alias));

struct Eight {  // what is known of a product when the model is loaded
    Matrix matrix;
    const char* panels;
    const float* scales;  // [panels][PANEL]
    int64_t unit;         // 1 to use the matrix unit
};

constexpr int LARGEST = 127, SHIFT = 7, BASE = 1 << SHIFT;  // x is BASE * [-127, 127] + [-64, 63]

struct Row {  // what follows the planes of a row of x
    float scale;
    int32_t sums[2];
};

// Each lane's two int16 products, added up.
static inline ints pairs(words a, words b) {
#if defined(__AVX512BW__)
    return (ints)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__) && !defined(__AVX512F__)
    return (ints)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
    return ((ints)(a << 16) >> 16) * ((ints)(b << 16) >> 16) + ((ints)a >> 16) * ((ints)b >> 16);
#endif
}

// n numbers, LANES at a time from `at(i)`: what an integer of 1 stands for, where `top` is for the largest, and its inverse.
// A scale that is not a number tells of numbers that cannot be rounded.
struct Fit {
    float scale, inverse;

    template <class At>
    Fit(int64_t n, int top, const At& at) {
        ints most = {};  // sizes are ordered as their bits are, and behind them what is not a number
        for (int64_t i = 0; i < n; i += LANES) {
            const ints size = (ints)at(i) & 0x7fffffff;
            most = size > most ? size : most;
        }
        int32_t sizes[LANES], last = 0;
        std::memcpy(sizes, &most, sizeof sizes);
        for (int j = 0; j < LANES; j++) last = std::max(last, sizes[j]);
        float largest;
        std::memcpy(&largest, &last, sizeof largest);
        scale = largest / top;
        inverse = largest > 1e-30f ? top / largest : 0.0f;  // of less nothing is left
    }

    ints operator()(vec x) const {
        const vec magic = vec{} + 0x1.8p23f;  // added, it leaves the nearest integer in the low bits
        return (ints)(x * inverse + magic) - (ints)magic;
    }
};

static inline chars narrowed(ints x) {
    return __builtin_convertvector(__builtin_convertvector(x, shorts), chars);  // one by one if at once, by GCC 12
}

struct Kernel {
    const Eight& told;
    const int64_t steps = steps_of(told.matrix.k, 1), unit = told.unit;

    typedef ints Number;
    static constexpr int PLANES = 2;

#if defined(FOURS)
    static constexpr int EACH = 4;
    struct Weights {
        words four;
        explicit Weights(const char* w) : four(*(const words*)w) {}
    };
    static void add(ints& sum, const Weights& w, const char* x) {
        const words four = words{} + *(const uint32_t*)x;
#if defined(__AVX512VNNI__)
        sum = (ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w.four, (__m512i)four);
#else
        sum = (ints)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)w.four, (__m256i)four);
#endif
    }
    static void put(chars b, char* to) { *(chars*)to = b; }
#else
    static constexpr int EACH = 8;  // int16: the first and third of four, the second and fourth
    struct Weights {
        words even, odd;
        explicit Weights(const char* w) : even(*(const words*)w & 0xff00ffu), odd(*(const words*)w >> 8 & 0xff00ffu) {}
    };
    static void add(ints& sum, const Weights& w, const char* x) {
        sum += pairs(w.even, words{} + ((const uint32_t*)x)[0]) + pairs(w.odd, words{} + ((const uint32_t*)x)[1]);
    }
    static void put(chars b, char* to) {
        constexpr int PLACES[] = {0, 2, 1, 3};
        for (int j = 0; j < LANES; j++) ((int16_t*)to)[j / 4 * 4 + PLACES[j % 4]] = b[j];
    }
#endif

    vec value(const Sums<Kernel>& sums, const char* x, int64_t panel, int half) const {
        const Row& row = *(const Row*)(x + 2 * plane());
        const vec high = __builtin_convertvector(sums.planes[0] - 128 * row.sums[0], vec);
        const vec low = __builtin_convertvector(sums.planes[1] - 128 * row.sums[1], vec);
        const vec scales = *(const vec*)(told.scales + panel * PANEL + half * LANES) * row.scale;
        return (high * BASE + low) * scales;
    }

    int64_t plane() const { return steps * QUADS * EACH; }
    int64_t bytes() const { return 2 * plane() + LINE; }

    void prepare(const float* x, char* to) const {
        const Matrix& m = told.matrix;
        const float scale = m.before ? norm_scale(x, m.before_eps, m.k) : 1.0f;
        const auto at = [&](int64_t i) {
            const vec v = load(x + i, m.k - i);
            return m.before ? v * scale * load(m.before + i, m.k - i) : v;
        };
        const Fit fit(m.k, BASE * LARGEST, at);
        ints sums[2] = {};
        for (int64_t i = 0; i < steps * QUADS * 4; i += LANES) {
            const ints rounded = fit(at(i)), high = (rounded + BASE / 2) >> SHIFT;
            const ints digits[] = {high, rounded - high * BASE};
            for (int d = 0; d < 2; d++) {
                sums[d] += digits[d];
                put(narrowed(digits[d]), to + d * plane() + i * EACH / 4);
            }
        }
        Row& row = *(Row*)(to + 2 * plane());
        row = {fit.scale, {0, 0}};
        for (int d = 0; d < 2; d++) {
            int32_t lanes[LANES];
            std::memcpy(lanes, &sums[d], sizeof lanes);
            for (int j = 0; j < LANES; j++) row.sums[d] += lanes[j];
        }
    }

    void multiply(const Product& p, int64_t first, int64_t last) const {
        multiply_panels(*this, p, told.panels, first, last);
    }
};

extern "C" {

int64_t phloem_lanes() { return LANES; }
int64_t phloem_unit() { return matrix_unit(); }
int64_t phloem_row_bytes(const Eight* eight) { return Kernel{*eight}.bytes(); }

// w [n, k] row-major to panels and scales [panels][PANEL], those of missing rows 0.
void phloem_pack(const Eight* eight, const float* w, char* panels, float* scales, int threads) {
    const int64_t k = eight->matrix.k, steps = steps_of(k, 1);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t panel = 0; panel < eight->matrix.count(); panel++)
        for (int64_t lane = 0; lane < PANEL; lane++) {
            const int64_t row = eight->matrix.row(panel, lane), columns = row < 0 ? 0 : k;
            const auto at = [&](int64_t i) { return load(w + std::max<int64_t>(row, 0) * k + i, columns - i); };
            const Fit fit(columns, LARGEST, at);
            scales[panel * PANEL + lane] = fit.scale;
            for (int64_t step = 0; step < steps; step++) {
                uint8_t four[4 * QUADS];
                for (int64_t i = 0; i < 4 * QUADS; i += LANES)
                    *(chars*)(four + i) = narrowed(fit(at(step * 4 * QUADS + i)) + 128);
                place(panels + panel * steps * 2 * TILE, step, lane, four);
            }
        }
}

// What a product takes x [k] for.
void phloem_taken(const float* x, int64_t k, float* to) {
    const auto at = [&](int64_t i) { return load(x + i, k - i); };
    const Fit fit(k, BASE * LARGEST, at);
    for (int64_t i = 0; i < k; i += LANES)
        store(to + i, __builtin_convertvector(fit(at(i)), vec) * fit.scale, k - i, false);
}

void phloem_multiply(const Eight* eight, const float* x, int64_t m, int64_t ldx, float* y, int64_t ldy, int add,
                     char* scratch, int threads) {
    run(Kernel{*eight}, eight->matrix, x, m, ldx, y, ldy, add, scratch, threads);
}
}
