// Runs the product of blocks over odd shapes on memory of exactly the size it may touch, for the sanitizers.

#include "blocks.cpp"

#include "drawn.h"

#include <cmath>
#include <cstdio>

constexpr int BITS[] = {4, 4, 5, 5, 8, 4, 5, 6};
constexpr int64_t (*HEADERS[])(int64_t) = {
    Kind<4, HALF>::header,         Kind<4, HALF_MINIMUM>::header,  Kind<5, HALF>::header,
    Kind<5, HALF_MINIMUM>::header, Kind<8, HALF>::header,          Kind<4, SUPER_MINIMUM>::header,
    Kind<5, SUPER_MINIMUM>::header, Kind<6, SUPER_HALVES>::header,
};

// A strip of random bytes, whose 16-bit floats are of a sensible size: from 2^-7 to 2.
static void fill(uint8_t* strip, int64_t bytes, int64_t values) {
    std::uniform_int_distribution<int> any(0, 255);
    for (int64_t i = 0; i < bytes; i++) strip[i] = (uint8_t)any(generator);
    for (int64_t i = 1; i < bytes - values; i += 2) strip[i] = (strip[i] & 0x9f) | 0x20;
}

// One product, added to what y holds; true where it is what doubles give for the weights as they are read.
static bool product(int kind, int64_t m, int64_t n, int64_t k, Gate gate, bool norms, int threads) {
    const int64_t blocks = (k + BLOCK - 1) / BLOCK, values = blocks * BITS[kind] * 4 * LANES,
                  size = (HEADERS[kind](blocks) + values + LINE - 1) / LINE * LINE, outputs = gate ? n / 2 : n;
    const auto bias = drawn(n), before = drawn(k), x = drawn(m * k);
    Blocks w{{bias.data(), norms ? before.data() : nullptr, nullptr, n, k, gate, 1e-5f, 1e-5f}, nullptr, nullptr, nullptr};
    const int64_t strips = 2 * w.matrix.count();
    std::vector<int64_t> offsets(strips + 1);
    std::vector<uint8_t> kinds(strips, kind), data(strips * size);
    for (int64_t s = 0; s <= strips; s++) offsets[s] = s * size;
    for (int64_t s = 0; s < strips; s++) fill(data.data() + s * size, size, values);
    w.strips = data.data(), w.offsets = offsets.data(), w.kinds = kinds.data();
    const Kernel kernel{w};
    std::vector<char> scratch(m * kernel.bytes());
    std::vector<float> y = drawn(m * outputs), held = y, row(k);
    phloem_multiply(&w, x.data(), m, k, y.data(), outputs, 1, scratch.data(), threads);
    for (int64_t r = 0; r < m; r++) {
        std::vector<float> all(n), sizes(n);
        std::vector<Rounded> rounded(blocks);
        std::vector<char> prepared(kernel.bytes());
        kernel.prepare(x.data() + r * k, prepared.data());
        std::memcpy(rounded.data(), prepared.data(), blocks * sizeof(Rounded));
        for (int64_t s = 0; s < strips; s++)
            for (int64_t lane = 0; lane < LANES; lane++) {
                const int64_t out = w.matrix.row(s / 2, s % 2 * LANES + lane);
                if (out < 0) continue;
                KINDS[kind].read(data.data() + s * size, blocks, lane, k, row.data());
                double sum = bias[out], magnitude = 1;
                for (int64_t i = 0; i < k; i++) {
                    const double v = (double)rounded[i / BLOCK].scale * rounded[i / BLOCK].q[i % BLOCK] * row[i];
                    sum += v, magnitude += std::abs(v);
                }
                all[out] = sum, sizes[out] = magnitude;
            }
        for (int64_t o = 0; o < outputs; o++) {
            const double a = all[o], b = gate ? all[outputs + o] : 1;
            const double cubic = 1.5957691216057308 * (a + 0.044715 * a * a * a);
            const double exact = gate ? a / (1 + std::exp(gate == SILU ? -a : -cubic)) * b : a;
            const double slack = gate ? sizes[o] * (1 + std::abs(b)) + sizes[outputs + o] * (1 + std::abs(a)) : sizes[o];
            if (!(std::abs(exact + held[r * outputs + o] - y[r * outputs + o]) < 1e-5 * slack)) return false;
        }
    }
    return true;
}

int main() {
    for (const int threads : {1, 2})
        for (int kind = 0; kind < 8; kind++)
            for (const int64_t m : {1, 33, 65})
                for (const int64_t n : {2, 38, 70})
                    for (const int64_t k : {512, 37}) {
                        if (kind >= 5 && k % 256) continue;
                        for (const Gate gate : {NONE, SILU, GELU}) {
                            if (product(kind, m, n, k, gate, m % 2, threads)) continue;
                            printf("kind %d: %ld x %ld x %ld, gate %ld\n", kind, (long)m, (long)n, (long)k, (long)gate);
                            return 1;
                        }
                    }
    return 0;
}
