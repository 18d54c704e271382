// Random inputs of the programs that run kernels under the sanitizers, and their norms in doubles.

#pragma once

#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

static std::mt19937 generator(1);

static std::vector<float> drawn(int64_t count) {
    std::normal_distribution<float> normal;
    std::vector<float> made(count);
    for (float& x : made) x = normal(generator);
    return made;
}

inline std::vector<double> normed(const std::vector<double>& x, const std::vector<float>& w, int64_t n, double eps) {
    std::vector<double> y(x.size());
    for (size_t row = 0; row < x.size(); row += n) {
        double squares = 0;
        for (int64_t i = 0; i < n; i++) squares += x[row + i] * x[row + i];
        for (int64_t i = 0; i < n; i++) y[row + i] = x[row + i] / std::sqrt(squares / n + eps) * w[i % w.size()];
    }
    return y;
}
