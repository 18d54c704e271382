// The product with weights of 8 bits under the sanitizers.

#include "int8.cpp"

#include <vector>

struct Packed {
    std::vector<char> panels;
    std::vector<float> scales;
    Eight told;

    Packed(const Matrix& matrix, const std::vector<float>& w, bool unit, int threads)
        : panels(matrix.count() * steps_of(matrix.k, 1) * 2 * TILE), scales(matrix.count() * PANEL),
          told{matrix, panels.data(), scales.data(), unit} {
        phloem_pack(&told, w.data(), panels.data(), scales.data(), threads);
    }

    static std::vector<float> rounded(const std::vector<float>& w, int64_t k) {
        std::vector<float> made(w.size());
        for (size_t row = 0; row < w.size(); row += k) {
            const auto at = [&](int64_t i) { return load(w.data() + row + i, k - i); };
            const Fit fit(k, LARGEST, at);
            for (int64_t i = 0; i < k; i++) made[row + i] = fit(at(i))[0] * fit.scale;
        }
        return made;
    }
};

#include "narrow.h"

int main() { return all(); }
