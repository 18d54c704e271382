// Rounds matrices of odd shapes to 4 bits, on memory of exactly the size that may be touched, for the sanitizers.

#include "int4.cpp"

#include "drawn.h"

#include <cstdio>

int main() {
    for (const int threads : {1, 2})
        for (const int64_t n : {1, 3, 40})
            for (const int64_t k : {1, 31, 32, 33, 200}) {
                auto w = drawn(n * k);
                if (n == 3) std::fill(w.begin(), w.begin() + k, 0.25f);
                if (n == 40) w[5] = 1e30f, w[7 * k] = 1e-40f;
                const int64_t blocks = (k + BLOCK - 1) / BLOCK;
                std::vector<uint8_t> to(n * blocks * BYTES);
                phloem_quantise(w.data(), n, k, to.data(), threads);
                for (int64_t i = 0; i < n * k; i++) {
                    const float* group = w.data() + i / k * k + i % k / BLOCK * BLOCK;
                    const auto ends = std::minmax_element(group, group + std::min<int64_t>(k - i % k / BLOCK * BLOCK, BLOCK));
                    const uint8_t* block = to.data() + (i / k * blocks + i % k / BLOCK) * BYTES;
                    uint16_t floats[2];
                    std::memcpy(floats, block, sizeof floats);
                    const int at = i % k % BLOCK, q = at < 16 ? block[4 + at] & 15 : block[4 + at - 16] >> 4;
                    const float off = std::abs(whole(floats[0]) * q + whole(floats[1]) - w[i]);
                    if (*ends.second < 60000 && !(off <= (*ends.second - *ends.first) / 8 + 1e-3f * std::abs(w[i]) + 1e-7f)) {
                        printf("%ld x %ld: %g is off by %g\n", (long)n, (long)k, w[i], off);
                        return 1;
                    }
                }
            }
    return 0;
}
