// Runs the layer's operators over odd shapes on memory of exactly the size they may touch, for the sanitizers.

#include "packed/operators.cpp"

#include "drawn.h"

#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

static std::vector<double> normed(const std::vector<double>& x, const std::vector<float>& w, int64_t n, double eps) {
    std::vector<double> y(x.size());
    for (size_t row = 0; row < x.size(); row += n) {
        double squares = 0;
        for (int64_t i = 0; i < n; i++) squares += x[row + i] * x[row + i];
        for (int64_t i = 0; i < n; i++) y[row + i] = x[row + i] / std::sqrt(squares / n + eps) * w[i % w.size()];
    }
    return y;
}

// One product with all that is asked for, added to what y holds; true where it is what doubles give.
static bool product(int64_t m, int64_t outputs, int64_t k, Gate gate, bool norms, int threads) {
    const int64_t n = gate ? 2 * outputs : outputs;
    const auto x = drawn(m * k), w = drawn(n * k), bias = drawn(n), before = drawn(k), after = drawn(outputs);
    Matrix matrix{nullptr, bias.data(), nullptr, nullptr, n, k, gate, 1e-5f, 1e-6f};
    std::vector<float> panels(matrix.count() * PANEL * k), y = drawn(m * outputs), scratch;
    std::vector<double> in(x.begin(), x.end()), all(m * n), out(m * outputs), held(y.begin(), y.end());
    phloem_pack(&matrix, w.data(), panels.data(), threads);
    matrix.panels = panels.data();
    if (norms) {
        matrix.before = before.data(), matrix.after = after.data();
        scratch.resize(m * (k + outputs));
        in = normed(in, before, k, 1e-5);
    }
    phloem_multiply(&matrix, x.data(), m, k, y.data(), outputs, 1, scratch.data(), threads);
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

static bool rotation(int64_t tokens, int64_t heads, int64_t dim, bool norms, int threads) {
    const int64_t half = dim / 2, step = (heads + 1) * dim;  // a head more than is turned
    auto x = drawn(tokens * step);
    const auto weights = drawn(heads * dim), cos = drawn(tokens * dim), sin = drawn(tokens * dim);
    std::vector<double> expected(x.begin(), x.end());
    for (int64_t at = 0; at < tokens * step; at += dim) {
        const int64_t token = at / step, head = at % step / dim;
        if (head == heads) continue;
        std::vector<double> row(x.begin() + at, x.begin() + at + dim);
        const std::vector<float> w(weights.begin() + head * dim, weights.begin() + (head + 1) * dim);
        if (norms) row = normed(row, w, dim, 1e-6);
        for (int64_t i = 0; i < dim; i++)
            expected[at + i] = row[i] * cos[token * dim + i] + row[(i + half) % dim] * sin[token * dim + i];
    }
    phloem_rotate(x.data(), tokens, step, heads, dim, norms ? weights.data() : nullptr, 1e-6f, cos.data(), sin.data(),
                  threads);
    for (int64_t i = 0; i < tokens * step; i++)
        if (!(std::abs(expected[i] - x[i]) < 1e-4 * (1 + std::abs(expected[i])))) return false;
    return true;
}

int main() {
    for (const int threads : {1, 2})
        for (const bool norms : {false, true}) {
            for (const int64_t m : {1, 7, 12, 31})
                for (const int64_t outputs : {1, 37, 64, 300})
                    for (const int64_t k : {1, 5, 129})
                        for (const Gate gate : {NONE, SILU, GELU}) {
                            if (product(m, outputs, k, gate, norms, threads)) continue;
                            printf("%ld x %ld x %ld, gate %ld\n", (long)m, (long)outputs, (long)k, (long)gate);
                            return 1;
                        }
            for (const int64_t tokens : {1, 3, 400})
                for (const int64_t dim : {2, 6, 64, 80})
                    if (!rotation(tokens, 3, dim, norms, threads)) {
                        printf("rotation of %ld tokens, dim %ld\n", (long)tokens, (long)dim);
                        return 1;
                    }
        }
    return 0;
}
