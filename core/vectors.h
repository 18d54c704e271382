// What the C++ kernels have in common: the machine's vectors, the shape of a tile whose sums stay in registers, and e^x.

#pragma once

#include <cstdint>

#if defined(__AVX512F__)
constexpr int LANES = 16, ROWS = 12;  // 24 sums, 2 of the panel: of 32 registers
#elif defined(__AVX2__)
constexpr int LANES = 8, ROWS = 6;  // 12 sums, 2 of the panel, 1 broadcast: of 16 registers
#else
constexpr int LANES = 4, ROWS = 8;  // NEON, SSE
#endif
constexpr int PANEL = 2 * LANES;
typedef float vec __attribute__((vector_size(LANES * sizeof(float)), aligned(4), may_alias));
typedef uint32_t bits __attribute__((vector_size(LANES * sizeof(float)), aligned(4), may_alias));

// e^x for x <= 0, after Cephes' expf; 0 where float32 has no normal number for it.
static inline vec exponential(vec x) {
    const vec magic = vec{} + 0x1.8p23f;  // added, it leaves the nearest integer in the low bits
    const vec shifted = x * 1.44269504088896341f + magic, n = shifted - magic;
    const vec r = x - n * 0.693359375f + n * 2.12194440e-4f;
    vec p = vec{} + 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    const vec power = (vec)(((bits)shifted - (bits)magic + 127u) << 23);
    return x < -87.0f ? vec{} : p * power;  // keeps what is not a number
}
