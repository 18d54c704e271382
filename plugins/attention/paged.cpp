// Ragged attention over paged K and V, read where they lie: a slot's row is found through the slot table.
//
// A job is a few queries over a range of context entries. Its queries, those of all heads that share a KV head, are the
// rows of two small matrix products per block of entries, scores = q . k^T and out = weights . v, with the tile of the
// packed product (sums stay in registers). K is turned on the way in, so that entries are lanes; V is packed too where
// there are more rows than a tile has.
//
// Softmax is that of flash attention (Dao et al. 2022), with one difference: a block's weights are relative to the
// block's own highest score, and results are merged afterwards, one block after the other. Blocks are cut at fixed places
// of the context, so a query's result is the same to the bit whatever other queries, jobs and threads there are: a job
// of several blocks merges them itself, and several jobs, of which all but the first have one block each, leave parts that
// are merged at the end. A node of a draft tree has the result it has as a token of its path, if no block ends in the tree:
// what it doesn't see adds nothing to its sums, and the sum of its weights leaves that out.
//
// All this is more than order: products may round what attention gives them (kind `quant`), and a last bit that differs
// there comes out as one step of the rounding.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

#include <omp.h>

#include "vectors.h"

constexpr int BLOCK = 128;  // entries that are scored at a time: K and V of one head stay in the cache
typedef int32_t ints __attribute__((vector_size(LANES * sizeof(float)), aligned(4), may_alias));
typedef uint16_t narrow __attribute__((vector_size(LANES * sizeof(uint16_t)), aligned(2), may_alias));

struct Query {      // which entries of its context a query sees
    int32_t first;  // all of [first, plain)
    int32_t plain;  // and those of [plain, last) whose byte in the masks is not 0
    int32_t last;
    int32_t mask;  // where its bytes begin
};

struct Job {
    int32_t begin, end;  // of its queries in `members`
    int32_t segment;     // whose row of the table holds the slots
    int32_t low, high;   // entries
    int32_t part;        // where its queries' parts lie; -1: the result is whole
};

struct Plan {  // of all layers that have the state group, window and widths in common
    const int32_t* table;  // [segments, width] slots
    int64_t width;
    const int64_t* slots;  // [tokens] that receive k and v
    int64_t tokens;
    const Job* jobs;
    int64_t jobs_count;
    const int32_t* members;  // queries of the jobs, as rows of q
    const Query* queries;    // [tokens]
    const uint8_t* masks;
    const int32_t* merged;  // queries whose results are merged from parts,
    const int32_t* begins;  // [merged_count + 1] where those of each begin in
    const int32_t* parts;   // parts in the order of their entries
    int64_t merged_count;
    int64_t heads, kv_heads, k_dim, v_dim, kind;
    float* states;   // of the parts, [parts, heads, state]
    float* scratch;  // [threads, scratch_each]
    int64_t scratch_each, threads;
    int64_t rows;  // of the largest job, heads that share a KV head counted
};

struct Layer {
    const float* q;
    int64_t q_step;  // from row to row
    char *keys, *values;
    float* out;
    float scale, cap;  // cap 0: none
};

static int64_t up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// A state: a row's sum of weighted values [up(v_dim, PANEL)], its highest score, its sum of weights; whole vectors.
static int64_t state_floats(int64_t v_dim) { return up(v_dim, PANEL) + LANES; }

struct Scratch {
    float *queries, *keys, *values, *scores, *sums, *whole;

    Scratch(float* at, int64_t rows, int64_t k_dim, int64_t v_dim) {
        queries = at;                                      // [rows / ROWS][k_dim][ROWS]
        keys = queries + up(up(rows, ROWS) * k_dim, LANES);  // [BLOCK / PANEL][k_dim][PANEL]
        values = keys + BLOCK * k_dim;                     // [BLOCK][up(v_dim, PANEL)]
        scores = values + BLOCK * up(v_dim, PANEL);        // [ROWS][BLOCK]
        sums = scores + ROWS * BLOCK;                      // [ROWS][up(v_dim, PANEL)]
        whole = sums + ROWS * up(v_dim, PANEL);            // [rows] states
    }

    static int64_t floats(int64_t rows, int64_t k_dim, int64_t v_dim) {
        const int64_t width = up(v_dim, PANEL);
        return up(up(rows, ROWS) * k_dim, LANES) + BLOCK * (k_dim + width) + ROWS * (BLOCK + width) +
               rows * state_floats(v_dim);
    }
};

// --- what is stored, as float32

struct Float32 {
    typedef float type;
    static vec load(const float* p) { return *(const vec*)p; }
};
struct BFloat16 {
    typedef uint16_t type;
    static vec load(const uint16_t* p) { return (vec)(__builtin_convertvector(*(const narrow*)p, bits) << 16); }
};
struct Float16 {
    typedef uint16_t type;
    static vec load(const uint16_t* p) {
        const bits x = __builtin_convertvector(*(const narrow*)p, bits);
        const vec size = (vec)((x & 0x7fff) << 13) * 0x1p112f;                // subnormals included
        const bits special = (bits)((x & 0x7c00) == 0x7c00) & 0x7f800000u;  // infinities, not a number
        return (vec)((bits)size | special | (x & 0x8000) << 16);
    }
};

template <typename S>
static vec load(const typename S::type* p, int64_t count) {  // never reads past what is there
    if (count >= LANES) return S::load(p);
    typename S::type some[LANES] = {};
    memcpy(some, p, count * sizeof(*p));
    return S::load(some);
}

static void fetch(const void* p, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch((const char*)p + i, 0, 2);
}

struct Next {  // K of the block that comes next
    const char* keys;
    int64_t step, bytes;
    const int32_t* slots;
    int64_t count;
    void fetch(int64_t i) const {
        if (i < count) ::fetch(keys + slots[i] * step, bytes);
    }
};

// Rows i and i + W exchange the lanes whose numbers differ in bit W; with all W this transposes.
template <int W, int... I>
static inline __attribute__((always_inline)) void exchange(vec* r, std::integer_sequence<int, I...> lanes) {
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) {
        if (i & W) continue;
        const vec a = r[i], b = r[i + W];
#if defined(__clang__)
        r[i] = __builtin_shufflevector(a, b, ((I & W) ? LANES + I - W : I)...);
        r[i + W] = __builtin_shufflevector(a, b, ((I & W) ? LANES + I : I + W)...);
#else
        r[i] = __builtin_shuffle(a, b, ints{((I & W) ? LANES + I - W : I)...});
        r[i + W] = __builtin_shuffle(a, b, ints{((I & W) ? LANES + I : I + W)...});
#endif
    }
    if constexpr (W > 1) exchange<W / 2>(r, lanes);
}

// LANES entries' K from element d on, those and no more that are there, to [dim][PANEL].
template <typename S, bool WHOLE>
static void turn(const typename S::type* keys, int64_t step, const int32_t* slots, int64_t count, int64_t d,
                 int64_t dim, float* out) {
    vec rows[LANES];
#pragma GCC unroll 16
    for (int j = 0; j < LANES; j++)
        if constexpr (WHOLE)
            rows[j] = S::load(keys + slots[j] * step + d);
        else
            rows[j] = j < count ? load<S>(keys + slots[j] * step + d, dim - d) : vec{};
    exchange<LANES / 2>(rows, std::make_integer_sequence<int, LANES>());
#pragma GCC unroll 16
    for (int l = 0; l < LANES; l++)
        if (WHOLE || d + l < dim) *(vec*)(out + (d + l) * PANEL) = rows[l];
}

// K of `count` entries, turned: [panel][dim][PANEL]. Meanwhile their V is on its way.
template <typename S>
static void pack_keys(const typename S::type* keys, int64_t step, const int32_t* slots, int64_t count, int64_t dim,
                      float* out, const char* values, int64_t value_step, int64_t value_bytes) {
    for (int64_t at = 0; at < up(count, PANEL); at += LANES) {
        float* panel = out + at / PANEL * PANEL * dim + at % PANEL;
        for (int64_t j = at; j < std::min<int64_t>(at + LANES, count); j++)
            fetch(values + slots[j] * value_step, value_bytes);
        for (int64_t d = 0; d < dim; d += LANES) {
            const bool whole = at + LANES <= count && d + LANES <= dim;
            (whole ? turn<S, true> : turn<S, false>)(keys, step, slots + at, count - at, d, dim, panel);
        }
    }
}

// V of `count` entries, [count][up(dim, PANEL)]. Meanwhile what comes next is on its way.
template <typename S>
static void pack_values(const typename S::type* values, int64_t step, const int32_t* slots, int64_t count, int64_t dim,
                        float* out, const Next& next) {
    const int64_t width = up(dim, PANEL);
    for (int64_t j = 0; j < count; j++, out += width) {
        next.fetch(j);
        const auto* row = values + slots[j] * step;
        int64_t d = 0;
        for (; d + LANES <= dim; d += LANES) *(vec*)(out + d) = S::load(row + d);
        for (; d < width; d += LANES) *(vec*)(out + d) = load<S>(row + d, std::max<int64_t>(dim - d, 0));
    }
}

// --- arithmetic

struct Packed {  // a panel of a matrix, rows `step` apart
    const float* at;
    int64_t step;
    vec load(int64_t i, int64_t lane) const { return *(const vec*)(at + i * step + lane); }
    void fetch(int64_t) const {}
};

template <typename S>
struct InPlace {  // a panel of V where it lies; meanwhile what comes next is on its way
    const typename S::type* at;
    int64_t step;
    const int32_t* slots;
    Next next;
    vec load(int64_t i, int64_t lane) const { return S::load(at + slots[i] * step + lane); }
    void fetch(int64_t i) const { next.fetch(i); }
};

// c [R][PANEL] = a . b over k; a's elements lie A_ROW apart from row to row and A_STEP along k.
template <int R, int A_ROW, int A_STEP, typename B>
static void product(const float* a, const B& b, int64_t k, float* c, int64_t ldc) {
    vec low[R] = {}, high[R] = {};
    for (int64_t i = 0; i < k; i++, a += A_STEP) {
        b.fetch(i);
        const vec first = b.load(i, 0), second = b.load(i, LANES);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            const float s = a[r * A_ROW];
            low[r] += first * s;
            high[r] += second * s;
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
        *(vec*)(c + r * ldc) = low[r];
        *(vec*)(c + r * ldc + LANES) = high[r];
    }
}

template <int A_ROW, int A_STEP, typename B, int... R>
static void multiply(int64_t rows, const float* a, const B& b, int64_t k, float* c, int64_t ldc,
                     std::integer_sequence<int, R...>) {
    using Product = void (*)(const float*, const B&, int64_t, float*, int64_t);
    static constexpr Product every[] = {product<R + 1, A_ROW, A_STEP, B>...};
    every[rows - 1](a, b, k, c, ldc);
}

// After Cephes' tanhf.
static vec tangent(vec x) {
    const vec size = x < 0.0f ? -x : x, z = x * x;
    const vec e = exponential(size * -2.0f), far = (1.0f - e) / (1.0f + e);
    vec p = vec{} - 5.70498872745e-3f;
    p = p * z + 2.06390887954e-2f;
    p = p * z - 5.37397155531e-2f;
    p = p * z + 1.33314422036e-1f;
    p = p * z - 3.33332819422e-1f;
    return size < 0.625f ? p * z * x + x : x < 0.0f ? -far : far;
}

// All lanes come to their highest, or their sum.
template <int W, bool SUM, int... I>
static vec fold(vec x, std::integer_sequence<int, I...> lanes) {
#if defined(__clang__)
    const vec y = __builtin_shufflevector(x, x, (I ^ W)...);
#else
    const vec y = __builtin_shuffle(x, ints{(I ^ W)...});
#endif
    const vec z = SUM ? x + y : x < y ? y : x;
    if constexpr (W > 1) return fold<W / 2, SUM>(z, lanes);
    return z;
}

// A row's scores of entries low, low + 1, ... become weights, 0 for those it does not see; of these `width`, whole
// panels, are read. Returns the highest score, minus infinity if it sees none.
static float weigh(float* scores, int64_t width, int64_t low, int64_t count, const Query& query, const uint8_t* masks,
                   float cap, float& total) {
    const float never = -INFINITY;
    if (cap != 0.0f)
        for (int64_t i = 0; i < width; i += LANES) *(vec*)(scores + i) = tangent(*(vec*)(scores + i) / cap) * cap;
    const int64_t from = std::clamp<int64_t>(query.first - low, 0, width);
    const int64_t to = std::clamp<int64_t>(query.last - low, 0, std::min(count, width));
    std::fill(scores, scores + from, never);
    std::fill(scores + to, scores + width, never);
    for (int64_t i = std::max(from, query.plain - low); i < to; i++)
        if (!masks[query.mask + low + i - query.plain]) scores[i] = never;
    vec most = vec{} + never;
    for (int64_t i = 0; i < width; i += LANES) {
        const vec x = *(vec*)(scores + i);
        most = x < most ? most : x;
    }
    const auto lanes = std::make_integer_sequence<int, LANES>();
    const float highest = fold<LANES / 2, false>(most, lanes)[0];
    vec sum = {};
    for (int64_t i = 0; i < width; i += LANES) {
        const vec weight = highest == never ? vec{} : exponential(*(vec*)(scores + i) - highest);
        *(vec*)(scores + i) = weight;
        sum += weight;
    }
    const int64_t tree = std::min(to, std::max(from, query.plain - low)), shift = low % LANES;
    if (tree < to || shift) {  // an entry adds to its own lane, wherever the job begins; what is seen of a tree moves up
        float seen[BLOCK] = {};
        std::copy(scores, scores + tree, seen + shift);
        for (int64_t i = tree, at = shift + tree; i < to; i++)
            if (masks[query.mask + low + i - query.plain]) seen[at++] = scores[i];
        sum = vec{};
        for (int64_t i = 0; i < shift + to; i += LANES) sum += *(vec*)(seen + i);
    }
    total = fold<LANES / 2, true>(sum, lanes)[0];
    return highest;
}

static void clear(float* states, int64_t rows, int64_t v_dim) {
    const int64_t each = state_floats(v_dim);
    std::fill(states, states + rows * each, 0.0f);
    for (int64_t r = 0; r < rows; r++) states[r * each + up(v_dim, PANEL)] = -INFINITY;
}

// Of one and the same code wherever it is called from, so that its roundings are the same.
__attribute__((noinline)) static void merge(float* state, const float* sums, float highest, float total,
                                            int64_t v_dim) {
    if (highest == -INFINITY) return;
    const int64_t width = up(v_dim, PANEL);
    const float most = std::max(state[width], highest);
    const float old = std::exp(state[width] - most), fresh = std::exp(highest - most);
    for (int64_t d = 0; d < width; d += LANES) {
        const vec before = *(vec*)(state + d) * old;
        *(vec*)(state + d) = before + *(const vec*)(sums + d) * fresh;
    }
    state[width] = most;
    state[width + 1] = state[width + 1] * old + total * fresh;
}

__attribute__((noinline)) static void finish(const float* state, float* out, int64_t v_dim) {
    const float total = state[up(v_dim, PANEL) + 1];
    for (int64_t d = 0; d < v_dim; d++) out[d] = state[d] / total;
}

// --- jobs

struct Task {
    const Plan& plan;
    const Layer& layer;
    const Job& job;
    int64_t kv_head;
    Scratch scratch;

    int64_t share() const { return plan.heads / plan.kv_heads; }
    int64_t rows() const { return (job.end - job.begin) * share(); }
    int64_t row_of(int64_t i) const { return plan.members[job.begin + i / share()]; }
    int64_t head_of(int64_t i) const { return kv_head * share() + i % share(); }
};

static void pack_queries(const Task& t) {
    const int64_t dim = t.plan.k_dim;
    for (int64_t i = 0; i < t.rows(); i++) {
        const float* q = t.layer.q + t.row_of(i) * t.layer.q_step + t.head_of(i) * dim;
        float* out = t.scratch.queries + i / ROWS * ROWS * dim + i % ROWS;
        for (int64_t d = 0; d < dim; d++) out[d * ROWS] = q[d] * t.layer.scale;
    }
}

// All rows of a job over entries [low, high), at most BLOCK, into their states.
template <typename S>
static void attend_block(const Task& t, int64_t low, int64_t high) {
    const Plan& p = t.plan;
    const int64_t count = high - low, width = up(p.v_dim, PANEL), each = state_floats(p.v_dim);
    const int64_t key_step = p.kv_heads * p.k_dim, value_step = p.kv_heads * p.v_dim;
    const int32_t* slots = p.table + t.job.segment * p.width + low;
    const auto* keys = (const typename S::type*)t.layer.keys + t.kv_head * p.k_dim;
    const auto* values = (const typename S::type*)t.layer.values + t.kv_head * p.v_dim;
    const int64_t size = sizeof(*keys);
    const Next next{(const char*)keys, key_step * size, p.k_dim * size, slots + count,
                    std::min<int64_t>(t.job.high - high, BLOCK)};
    pack_keys<S>(keys, key_step, slots, count, p.k_dim, t.scratch.keys, (const char*)values, value_step * size,
                 p.v_dim * size);
    const bool once = t.rows() <= ROWS && p.v_dim == width;  // V is read once: packing it would not pay
    if (!once)
        pack_values<S>(values, value_step, slots, count, p.v_dim, t.scratch.values, next);
    for (int64_t at = 0; at < t.rows(); at += ROWS) {
        const int64_t rows = std::min<int64_t>(ROWS, t.rows() - at);
        int64_t reach = 0;  // entries of the block that any of these rows sees
        for (int64_t r = 0; r < rows; r++)
            reach = std::max<int64_t>(reach, std::min<int64_t>(p.queries[t.row_of(at + r)].last, high) - low);
        if (reach <= 0) continue;
        const auto sequence = std::make_integer_sequence<int, ROWS>();
        float* scores = t.scratch.scores;
        for (int64_t j = 0; j < reach; j += PANEL)
            multiply<1, ROWS>(rows, t.scratch.queries + at * p.k_dim, Packed{t.scratch.keys + j * p.k_dim, PANEL},
                              p.k_dim, scores + j, BLOCK, sequence);
        float highest[ROWS], total[ROWS];
        for (int64_t r = 0; r < rows; r++)
            highest[r] = weigh(scores + r * BLOCK, up(reach, PANEL), low, count, p.queries[t.row_of(at + r)], p.masks,
                               t.layer.cap, total[r]);
        for (int64_t d = 0; d < width; d += PANEL)
            if (once)
                multiply<BLOCK, 1>(rows, scores, InPlace<S>{values + d, value_step, slots, d == 0 ? next : Next{}},
                                   reach, t.scratch.sums + d, width, sequence);
            else
                multiply<BLOCK, 1>(rows, scores, Packed{t.scratch.values + d, width}, reach, t.scratch.sums + d, width,
                                   sequence);
        for (int64_t r = 0; r < rows; r++)
            merge(t.scratch.whole + (at + r) * each, t.scratch.sums + r * width, highest[r], total[r], p.v_dim);
    }
}

template <typename S>
static void attend(const Task& t) {
    const Plan& p = t.plan;
    const int64_t each = state_floats(p.v_dim), rows = t.rows();
    pack_queries(t);
    clear(t.scratch.whole, rows, p.v_dim);
    for (int64_t low = t.job.low; low < t.job.high;) {
        const int64_t high = std::min<int64_t>(t.job.high, (low / BLOCK + 1) * BLOCK);
        attend_block<S>(t, low, high);
        low = high;
    }
    for (int64_t i = 0; i < rows; i++) {
        const float* whole = t.scratch.whole + i * each;
        if (t.job.part < 0)
            finish(whole, t.layer.out + (t.row_of(i) * p.heads + t.head_of(i)) * p.v_dim, p.v_dim);
        else
            std::copy(whole, whole + each, p.states + ((t.job.part + i / t.share()) * p.heads + t.head_of(i)) * each);
    }
}

static void merge_parts(const Plan& p, const Layer& layer, int64_t i, int64_t head, float* state) {
    const int64_t width = up(p.v_dim, PANEL), each = state_floats(p.v_dim);
    clear(state, 1, p.v_dim);
    for (int64_t at = p.begins[i]; at < p.begins[i + 1]; at++) {
        const float* part = p.states + (p.parts[at] * p.heads + head) * each;
        merge(state, part, part[width], part[width + 1], p.v_dim);
    }
    finish(state, layer.out + (p.merged[i] * p.heads + head) * p.v_dim, p.v_dim);
}

extern "C" {

int64_t phloem_span() { return BLOCK; }

int64_t phloem_state_floats(int64_t v_dim) { return state_floats(v_dim); }

int64_t phloem_scratch_floats(int64_t rows, int64_t k_dim, int64_t v_dim) {
    return up(Scratch::floats(rows, k_dim, v_dim), 16);
}

// One layer: k and v, whose rows are `k_step` and `v_step` bytes apart, go to their slots as they are; then all attend.
void phloem_attend(const Plan* plan, const float* q, int64_t q_step, const char* k, int64_t k_step, const char* v,
                   int64_t v_step, char* keys, char* values, float* out, float scale, float cap) {
    const Plan& p = *plan;
    const Layer layer{q, q_step, keys, values, out, scale, cap};
    const int64_t size = p.kind == 0 ? 4 : 2, key_bytes = p.kv_heads * p.k_dim * size;
    const int64_t value_bytes = p.kv_heads * p.v_dim * size;
#pragma omp parallel num_threads(p.threads)
    {
#pragma omp for schedule(static)
        for (int64_t i = 0; i < p.tokens; i++) {
            memcpy(keys + p.slots[i] * key_bytes, k + i * k_step, key_bytes);
            memcpy(values + p.slots[i] * value_bytes, v + i * v_step, value_bytes);
        }
        const Scratch scratch(p.scratch + omp_get_thread_num() * p.scratch_each, p.rows, p.k_dim, p.v_dim);
        const auto run = p.kind == 0 ? attend<Float32> : p.kind == 1 ? attend<BFloat16> : attend<Float16>;
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < p.jobs_count * p.kv_heads; i++)
            run(Task{p, layer, p.jobs[i / p.kv_heads], i % p.kv_heads, scratch});
#pragma omp for schedule(static)
        for (int64_t i = 0; i < p.merged_count * p.heads; i++)
            merge_parts(p, layer, i / p.heads, i % p.heads, scratch.whole);
    }
}
}
