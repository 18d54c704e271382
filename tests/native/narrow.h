// Runs a product over narrow weights on odd shapes, on memory of exactly the size it may touch, for the sanitizers. The
// source that is included before has `Kernel`, and `Told` and `pack` come from the program.

#pragma once

#include "drawn.h"

#include <cmath>
#include <cstdio>
#include <vector>

static std::vector<float> taken(const std::vector<float>& rows, int64_t k) {
    std::vector<float> made(rows.size());
    for (size_t at = 0; at < rows.size(); at += k) phloem_taken(rows.data() + at, k, made.data() + at);
    return made;
}

// One product with all that is asked for, added to what y holds; true where it is what doubles give for rounded factors.
static bool product(int64_t m, int64_t outputs, int64_t k, Gate gate, bool norms, bool unit, int threads) {
    const int64_t n = gate ? 2 * outputs : outputs;
    const auto x = drawn(m * k), w = drawn(n * k), bias = drawn(n), before = drawn(k), after = drawn(outputs);
    const Matrix matrix{bias.data(), norms ? before.data() : nullptr, norms ? after.data() : nullptr, n, k, gate, 1e-5f,
                        1e-6f};
    Packed packed(matrix, w, unit, threads);
    std::vector<float> y = drawn(m * outputs);
    const std::vector<float> held = y;
    std::vector<char> scratch(m * (phloem_row_bytes(&packed.told) + (norms ? outputs * sizeof(float) : 0)));
    phloem_multiply(&packed.told, x.data(), m, k, y.data(), outputs, 1, scratch.data(), threads);

    auto in = x;
    for (int64_t row = 0; norms && row < m; row++)
        norm(x.data() + row * k, before.data(), 1e-5f, k, in.data() + row * k, false);
    in = taken(in, k);
    const auto weights = Packed::rounded(w, k);
    for (int64_t row = 0; row < m; row++) {
        std::vector<float> sums(n), out(outputs);
        for (int64_t i = 0; i < n; i++) {
            double sum = bias[i];
            for (int64_t d = 0; d < k; d++) sum += (double)in[row * k + d] * weights[i * k + d];
            sums[i] = sum;
        }
        for (int64_t i = 0; i < outputs; i++) {
            const double a = sums[i], cubic = 1.5957691216057308 * (a + 0.044715 * a * a * a);
            out[i] = gate ? a / (1 + std::exp(gate == SILU ? -a : -cubic)) * sums[outputs + i] : a;
        }
        if (norms) norm(out.data(), after.data(), 1e-6f, outputs, out.data(), false);
        for (int64_t i = 0; i < outputs; i++)
            if (!(std::abs(out[i] + held[row * outputs + i] - y[row * outputs + i]) < 1e-3 * (1 + std::abs(out[i]))))
                return false;
    }
    return true;
}

static int all() {
    for (const int threads : {1, 2})
        for (const bool unit : {false, matrix_unit()})
            for (const bool norms : {false, true})
                for (const int64_t m : {1, 7, 17, 33, 70})
                    for (const int64_t outputs : {1, 37, 300})
                        for (const int64_t k : {1, 5, 129})
                            for (const Gate gate : {NONE, SILU, GELU}) {
                                if (product(m, outputs, k, gate, norms, unit, threads)) continue;
                                printf("%ld x %ld x %ld, gate %ld\n", (long)m, (long)outputs, (long)k, (long)gate);
                                return 1;
                            }
    return 0;
}
