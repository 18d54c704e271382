// Runs the rotation over odd shapes on memory of exactly the size it may touch, for the sanitizers.

#include "rotation.cpp"

#include "drawn.h"

#include <cstdio>

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
        for (const bool norms : {false, true})
            for (const int64_t tokens : {1, 3, 400})
                for (const int64_t dim : {2, 6, 64, 80})
                    if (!rotation(tokens, 3, dim, norms, threads)) {
                        printf("rotation of %ld tokens, dim %ld\n", (long)tokens, (long)dim);
                        return 1;
                    }
    return 0;
}
