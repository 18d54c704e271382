// Random inputs of the programs that run kernels under the sanitizers.

#pragma once

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
