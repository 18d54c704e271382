// The rotation of a layer's heads, with their norm.

#include "product.h"

// A head [dim], in place: pairs (i, i + dim / 2) turned. cos and sin [dim], the first half of sin negated.
static void turn(float* x, int64_t dim, const float* cos, const float* sin) {
    const int64_t half = dim / 2;
    for (int64_t i = 0; i < half; i += LANES) {
        const int64_t left = half - i;
        const vec a = load(x + i, left), b = load(x + half + i, left);
        store(x + i, a * load(cos + i, left) + b * load(sin + i, left), left, false);
        store(x + half + i, b * load(cos + half + i, left) + a * load(sin + half + i, left), left, false);
    }
}

extern "C" {

// The first `heads` of x [tokens, *, dim], whose tokens are `step` apart, in place: normed with weights [heads, dim],
// where there are some, then turned by the token's cos and sin [tokens, dim].
void phloem_rotate(float* x, int64_t tokens, int64_t step, int64_t heads, int64_t dim, const float* weights, float eps,
                   const float* cos, const float* sin, int threads) {
    constexpr int64_t SMALL = 1 << 14;  // elements that are turned before a second thread has woken up
#pragma omp parallel for num_threads(threads) schedule(static) if (tokens * heads * dim > SMALL)
    for (int64_t token = 0; token < tokens; token++)
        for (int64_t head = 0; head < heads; head++) {
            float* at = x + token * step + head * dim;
            if (weights) norm(at, weights + head * dim, eps, dim, at, false);
            turn(at, dim, cos + token * dim, sin + token * dim);
        }
}
}
