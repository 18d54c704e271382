// Runs paged.cpp over odd shapes on memory of just the size it may touch, for the sanitizers, and checks its results.

#include "paged.cpp"

#include "drawn.h"

#include <array>
#include <cstdio>
#include <random>
#include <vector>

struct Case {
    int64_t heads, kv_heads, k_dim, v_dim, kind, threads;
    float cap;
};

// Contexts of these lengths, of which the last queries are the step's own; the third has a mask over its last two.
static int run(const Case& c) {
    const std::vector<int32_t> lengths = {1, 40, 131, 700}, own = {1, 3, 2, 30};
    const int64_t segments = 4, width = 700, slots_count = 872, tokens = 36, size = c.kind == 0 ? 4 : 2;
    std::vector<int32_t> table(segments * width, 0), members;
    std::vector<int64_t> slots;
    std::vector<Query> queries;
    std::vector<Job> jobs;
    std::vector<int32_t> merged, begins = {0}, parts;
    int32_t slot = 0, row = 0;
    for (int64_t s = 0; s < segments; s++) {
        for (int64_t e = 0; e < lengths[s]; e++) table[s * width + e] = slots_count - 1 - slot++;
        const int32_t first = row;
        for (int32_t i = lengths[s] - own[s]; i < lengths[s]; i++, row++) {
            slots.push_back(table[s * width + i]);
            const bool tree = s == 2;
            queries.push_back({s == 3 ? 5 : 0, tree ? 129 : i + 1, tree ? 131 : i + 1, tree ? 2 * (row - first) : 0});
            members.push_back(row);
        }
        if (s < 3) {
            jobs.push_back({first, row, (int32_t)s, 0, lengths[s], -1});
            continue;
        }
        jobs.push_back({first, row, (int32_t)s, 5, BLOCK, 0});  // in two parts
        jobs.push_back({first, row, (int32_t)s, BLOCK, lengths[s], own[s]});
        for (int32_t i = 0; i < own[s]; i++) {
            merged.push_back(first + i);
            parts.insert(parts.end(), {i, own[s] + i});
            begins.push_back(parts.size());
        }
    }
    const std::vector<uint8_t> masks = {1, 0, 0, 1};
    const int64_t most = 30 * (c.heads / c.kv_heads), each = phloem_scratch_floats(most, c.k_dim, c.v_dim);
    std::vector<float> scratch(each * c.threads), states(60 * c.heads * phloem_state_floats(c.v_dim));
    const std::vector<float> q = drawn(tokens * c.heads * c.k_dim), out_of = drawn(tokens * c.heads * c.v_dim);
    std::vector<float> stored_k = drawn(slots_count * c.kv_heads * c.k_dim);
    std::vector<float> stored_v = drawn(slots_count * c.kv_heads * c.v_dim);
    const std::vector<float> k = drawn(tokens * c.kv_heads * c.k_dim), v = drawn(tokens * c.kv_heads * c.v_dim);
    std::vector<char> keys((char*)stored_k.data(), (char*)stored_k.data() + stored_k.size() * size);
    std::vector<char> values((char*)stored_v.data(), (char*)stored_v.data() + stored_v.size() * size);
    std::vector<float> out(out_of);
    const Plan plan{table.data(), width, slots.data(), tokens, jobs.data(), (int64_t)jobs.size(), members.data(),
                    queries.data(), masks.data(), merged.data(), begins.data(), parts.data(),
                    (int64_t)merged.size(), c.heads, c.kv_heads, c.k_dim, c.v_dim, c.kind, states.data(),
                    scratch.data(), each, c.threads, most};
    phloem_attend(&plan, q.data(), c.heads * c.k_dim, (const char*)k.data(), c.kv_heads * c.k_dim * size,
                  (const char*)v.data(), c.kv_heads * c.v_dim * size, keys.data(), values.data(), out.data(), 0.3f,
                  c.cap);
    if (c.kind != 0) return 0;  // other bytes are no numbers of that kind: touched, not compared
    double worst = 0;
    for (int64_t s = 0, r = 0; s < segments; s++)
        for (int64_t i = 0; i < own[s]; i++, r++)
            for (int64_t h = 0; h < c.heads; h++) {
                std::vector<double> sums(c.v_dim);
                double total = 0;
                for (int64_t e = queries[r].first; e < queries[r].last; e++) {
                    if (e >= queries[r].plain && !masks[queries[r].mask + e - queries[r].plain]) continue;
                    const int64_t at = table[s * width + e] * c.kv_heads + h / (c.heads / c.kv_heads);
                    double score = 0;
                    for (int64_t d = 0; d < c.k_dim; d++)
                        score += 0.3 * q[(r * c.heads + h) * c.k_dim + d] * ((float*)keys.data())[at * c.k_dim + d];
                    if (c.cap != 0) score = c.cap * std::tanh(score / c.cap);
                    const double weight = std::exp(score);
                    total += weight;
                    for (int64_t d = 0; d < c.v_dim; d++)
                        sums[d] += weight * ((float*)values.data())[at * c.v_dim + d];
                }
                for (int64_t d = 0; d < c.v_dim; d++)
                    worst = std::max(worst, std::abs(sums[d] / total - out[(r * c.heads + h) * c.v_dim + d]));
            }
    if (worst < 2e-5) return 0;
    printf("%ld heads of %ld and %ld: off by %g\n", (long)c.heads, (long)c.k_dim, (long)c.v_dim, worst);
    return 1;
}

int main() {
    int wrong = 0;
    for (const int64_t threads : {1, 2})
        for (const int64_t kind : {0, 1, 2})
            for (const float cap : {0.0f, 4.0f})
                for (const auto& [heads, kv_heads, k_dim, v_dim] :
                     {std::array<int64_t, 4>{9, 3, 64, 64}, {1, 1, 1, 1}, {4, 1, 5, 33}, {6, 6, 20, 7}, {2, 1, 80, 128}})
                    wrong += run({heads, kv_heads, k_dim, v_dim, kind, threads, cap});
    return wrong != 0;
}
