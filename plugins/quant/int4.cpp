// Floats made into blocks of 4 bits, 32 values with a scale and a minimum: GGUF's Q4_1.
//
// Of several scales the one is taken whose least squares fit lies closest, after `make_qkx2_quants` in ggml-quants.c of
// llama.cpp; with the smallest and the largest value as the ends, an outlier would cost all others their precision.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

constexpr int BLOCK = 32, BYTES = 20, LEVELS = 15;
constexpr int TRIES = 6;
constexpr float FEWEST = LEVELS - 1.5f, STEP = 0.5f;  // levels from the smallest to the largest value

struct Fit {
    float scale, minimum, error;
};

static inline float level(float x, float scale, float minimum) {
    constexpr float MAGIC = 0x1.8p23f;  // added, it leaves the nearest integer: a rounding that compilers vectorise
    return (std::min(std::max((x - minimum) * scale, 0.0f), (float)LEVELS) + MAGIC) - MAGIC;
}

// The best scale and minimum for values as they are rounded with 1 / `inverse`. More than `width` values are 0 and ignored.
static Fit fit(const float* x, int width, float inverse, float least) {
    float n = width, q1 = 0, q2 = 0, qx = 0, x1 = 0, error = 0;
#pragma omp simd reduction(+ : q1, q2, qx, x1)
    for (int j = 0; j < width; j++) {
        const float q = level(x[j], inverse, least);
        q1 += q, q2 += q * q, qx += q * x[j], x1 += x[j];
    }
    const float spread = n * q2 - q1 * q1;
    if (!(spread > 0)) return {0.0f, x1 / n, INFINITY};
    const float scale = (n * qx - q1 * x1) / spread, minimum = (q2 * x1 - q1 * qx) / spread;
#pragma omp simd reduction(+ : error)
    for (int j = 0; j < width; j++) {
        const float off = scale * level(x[j], inverse, least) + minimum - x[j];
        error += off * off;
    }
    return {scale, minimum, error};
}

// IEEE's 16 bits, to nearest even. The exponent is counted from elsewhere, so that both have the same bits but the last.
static uint16_t half(float x) {
    uint32_t sign, bits;
    std::memcpy(&sign, &x, sizeof sign);
    const float size = std::min(std::fabs(x), 65504.0f) * 0x1p-112f;
    std::memcpy(&bits, &size, sizeof bits);
    return (sign & 0x80000000u) >> 16 | (bits + 0xfff + (bits >> 13 & 1)) >> 13;
}

static float whole(uint16_t half) {
    const uint32_t bits = (half & 0x7fffu) << 13;
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return half & 0x8000u ? -x * 0x1p112f : x * 0x1p112f;
}

static void quantise(const float* x, int width, uint8_t* to) {
    const auto ends = std::minmax_element(x, x + width);
    const float least = *ends.first, range = *ends.second - least;
    Fit best = {0.0f, least, INFINITY};
    for (int i = 0; i < TRIES && range > 1e-30f; i++) {
        const Fit next = fit(x, width, (FEWEST + i * STEP) / range, least);
        if (next.error < best.error) best = next;
    }
    const uint16_t ends16[2] = {half(best.scale), half(best.minimum)};
    const float scale = whole(ends16[0]), minimum = whole(ends16[1]), inverse = scale > 0 ? 1 / scale : 0.0f;
    std::memcpy(to, ends16, sizeof ends16);
    uint8_t q[BLOCK] = {};
    for (int j = 0; j < width; j++) q[j] = (uint8_t)level(x[j], inverse, minimum);
    for (int j = 0; j < BLOCK / 2; j++) to[4 + j] = q[j] | q[j + BLOCK / 2] << 4;
}

extern "C" {

// w [n, k] row-major to [n][blocks][BYTES].
void phloem_quantise(const float* w, int64_t n, int64_t k, uint8_t* to, int threads) {
    const int64_t blocks = (k + BLOCK - 1) / BLOCK;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t row = 0; row < n; row++)
        for (int64_t b = 0; b < blocks; b++)
            quantise(w + row * k + b * BLOCK, std::min<int64_t>(k - b * BLOCK, BLOCK), to + (row * blocks + b) * BYTES);
}
}
