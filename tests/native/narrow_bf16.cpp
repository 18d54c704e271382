// The product with weights of 16 bits under the sanitizers.

#include "bf16.cpp"

#include <vector>

struct Packed {
    std::vector<char> panels;
    Narrow told;

    Packed(const Matrix& matrix, const std::vector<float>& w, bool unit, int threads)
        : panels(matrix.count() * steps_of(matrix.k, 2) * 2 * TILE), told{matrix, panels.data(), unit} {
        phloem_pack(&told, w.data(), panels.data(), threads);
    }

    static std::vector<float> rounded(const std::vector<float>& w, int64_t) {
        std::vector<float> made(w);
        for (float& v : made) {
            const uint32_t up = (uint32_t)narrowed(vec{} + v)[0] << 16;
            std::memcpy(&v, &up, sizeof v);
        }
        return made;
    }
};

#include "narrow.h"

int main() { return all(); }
