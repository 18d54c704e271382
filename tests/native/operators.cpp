// Runs the packed product over odd shapes on memory of exactly the size it may touch, for the sanitizers.

#include "packed/gemm.cpp"

#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

int main() {
    std::mt19937 generator(1);
    std::normal_distribution<float> normal;
    const auto drawn = [&](int64_t count) {
        std::vector<float> made(count);
        for (float& x : made) x = normal(generator);
        return made;
    };
    for (const int threads : {1, 2})
        for (const int64_t m : {1, 2, 7, 12, 13, 31})
            for (const int64_t n : {1, 16, 37, 100})
                for (const int64_t k : {1, 5, 64, 129}) {
                    const auto x = drawn(m * k), w = drawn(n * k), bias = drawn(n), before = drawn(m * n);
                    std::vector<float> y(before), packed((n + PANEL - 1) / PANEL * PANEL * k);
                    phloem_pack(w.data(), n, k, packed.data(), threads);
                    phloem_gemm(x.data(), m, k, packed.data(), n, k, bias.data(), y.data(), n, 1, threads);
                    for (int64_t i = 0; i < m * n; i++) {
                        double sum = (double)bias[i % n] + before[i];
                        for (int64_t d = 0; d < k; d++) sum += (double)x[i / n * k + d] * w[i % n * k + d];
                        if (std::abs(sum - y[i]) < 1e-4) continue;
                        printf("%ld x %ld x %ld: off by %g\n", (long)m, (long)n, (long)k, std::abs(sum - y[i]));
                        return 1;
                    }
                }
    return 0;
}
