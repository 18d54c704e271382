// Runs the float32 product over odd shapes on memory of exactly the size it may touch, for the sanitizers.

#include "packed.cpp"

#include "drawn.h"

#include <cstdio>

// One product with all that is asked for, added to what y holds; true where it is what doubles give.
static bool product(int64_t m, int64_t outputs, int64_t k, Gate gate, bool norms, int threads) {
    const int64_t n = gate ? 2 * outputs : outputs;
    const auto x = drawn(m * k), w = drawn(n * k), bias = drawn(n), before = drawn(k), after = drawn(outputs);
    Packed packed{{bias.data(), nullptr, nullptr, n, k, gate, 1e-5f, 1e-6f}, nullptr};
    std::vector<float> panels(packed.matrix.count() * PANEL * k), y = drawn(m * outputs), scratch;
    std::vector<double> in(x.begin(), x.end()), all(m * n), out(m * outputs), held(y.begin(), y.end());
    phloem_pack(&packed, w.data(), panels.data(), threads);
    packed.panels = panels.data();
    if (norms) {
        packed.matrix.before = before.data(), packed.matrix.after = after.data();
        scratch.resize(m * (k + outputs));
        in = normed(in, before, k, 1e-5);
    }
    phloem_multiply(&packed, x.data(), m, k, y.data(), outputs, 1, (char*)scratch.data(), threads);
    for (int64_t i = 0; i < m * n; i++) {
        all[i] = bias[i % n];
        for (int64_t d = 0; d < k; d++) all[i] += in[i / n * k + d] * w[i % n * k + d];
    }
    for (int64_t i = 0; i < m * outputs; i++) {
        const double a = all[i / outputs * n + i % outputs], cubic = 1.5957691216057308 * (a + 0.044715 * a * a * a);
        out[i] = gate ? a / (1 + std::exp(gate == SILU ? -a : -cubic)) * all[i / outputs * n + outputs + i % outputs] : a;
    }
    if (norms) out = normed(out, after, outputs, 1e-6);
    for (int64_t i = 0; i < m * outputs; i++)
        if (!(std::abs(out[i] + held[i] - y[i]) < 1e-4 * (1 + std::abs(out[i])))) return false;
    return true;
}

int main() {
    for (const int threads : {1, 2})
        for (const bool norms : {false, true})
            for (const int64_t m : {1, 7, 12, 31})
                for (const int64_t outputs : {1, 37, 64, 300})
                    for (const int64_t k : {1, 5, 129})
                        for (const Gate gate : {NONE, SILU, GELU}) {
                            if (product(m, outputs, k, gate, norms, threads)) continue;
                            printf("%ld x %ld x %ld, gate %ld\n", (long)m, (long)outputs, (long)k, (long)gate);
                            return 1;
                        }
    return 0;
}
