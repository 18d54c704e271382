// A product with weights in blocks of few bits, as GGUF files have them: w = scale * (q - zero), or scale * q + minimum,
// where 32 or 16 values q of a row share a scale. Formats: ggml-common.h and ggml-quants.c of llama.cpp.
//
// Rows of x are rounded to 8 bits, 32 values to a scale, so that what is shared is multiplied in integers: exact in
// whatever way the processor does it. Then a float per block is added to the sums, block after block: a row's result
// depends on nothing else.
//
// A strip is LANES outputs, half a panel, and may be of another kind than its neighbours. It holds the scales of its
// blocks, block after block, then, from the next line on, their values in groups of four inputs, [block][8][LANES][4]:
// the low 4 bits of groups g and g + 4 in a byte, further bits in planes of their own behind those of the block. Its
// bytes are taken out once for all rows of a tile, whose sums stay in the first level cache.

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "product.h"

#if (defined(__AVX512F__) || defined(__AVX2__)) && !defined(PHLOEM_GENERIC)
#include <immintrin.h>
#endif

constexpr int BLOCK = 32, GROUPS = 8, SUPER = 8;  // values of a block, its groups of four, blocks that share two floats
constexpr int TILE = 32;                          // rows: what is known of them and a strip fits the second level cache

typedef int32_t ints __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int16_t shorts __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef uint16_t pairs __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef uint8_t small __attribute__((vector_size(LANES), aligned(1), may_alias));
typedef int8_t steps __attribute__((vector_size(LANES), aligned(1), may_alias));

struct Rounded {  // 32 values of a row of x: scale * q
    int8_t q[BLOCK];
    float scale, sum;    // the scale, and the sum of the values
    int32_t all, half[2];  // minus the sum of q, of its first and of its second half
};

static void round_block(const float* x, int64_t width, Rounded& to) {
    float values[BLOCK] = {};
    std::memcpy(values, x, std::min<int64_t>(width, BLOCK) * sizeof(float));
    uint32_t most = 0, bits[BLOCK];  // of the largest magnitude: those of what is not a number are larger still
    std::memcpy(bits, values, sizeof bits);
    for (int j = 0; j < BLOCK; j++) most = std::max(most, bits[j] & 0x7fffffffu);
    float largest;
    std::memcpy(&largest, &most, sizeof largest);
    const float inverse = largest > 1e-30f ? 127.0f / largest : 0.0f;
    for (int j = 0; j < BLOCK; j++) values[j] = values[j] * inverse + 0x1.8p23f;  // the integer lies in the low bits
    std::memcpy(bits, values, sizeof bits);
    for (int j = 0; j < BLOCK; j++) to.q[j] = (int8_t)(uint8_t)bits[j];
    for (int h = 0; h < 2; h++) {
        int32_t sum = 0;
        for (int j = 0; j < BLOCK / 2; j++) sum += to.q[h * BLOCK / 2 + j];
        to.half[h] = -sum;
    }
    to.all = to.half[0] + to.half[1];
    to.scale = largest / 127.0f;
    to.sum = to.scale * (float)-to.all;
}

// sum += four products in each lane: w unsigned, of at most 63 unless WIDE; four signed bytes of x in `word`.
#if defined(__AVX512VNNI__) && !defined(PHLOEM_GENERIC)
constexpr bool OFFSET = true;  // 8 bits are taken as they lie, 128 too large
template <bool WIDE>
static inline ints dot(ints sum, ints w, int32_t word) {
    return (ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, _mm512_set1_epi32(word));
}
#elif defined(__AVXVNNI__) && !defined(__AVX512F__) && !defined(PHLOEM_GENERIC)
constexpr bool OFFSET = true;
template <bool WIDE>
static inline ints dot(ints sum, ints w, int32_t word) {
    return (ints)_mm256_dpbusd_avx_epi32((__m256i)sum, (__m256i)w, _mm256_set1_epi32(word));
}
#else
constexpr bool OFFSET = false;
template <bool WIDE>
static inline ints dot(ints sum, ints w, int32_t word) {
    const ints x = ints{} + word;
#if defined(__AVX512BW__) && !defined(PHLOEM_GENERIC)
    if (!WIDE) {
        const __m512i twos = _mm512_maddubs_epi16((__m512i)w, (__m512i)x);
        return sum + (ints)_mm512_madd_epi16(twos, _mm512_set1_epi16(1));
    }
#elif defined(__AVX2__) && !defined(__AVX512F__) && !defined(PHLOEM_GENERIC)
    if (!WIDE) {
        const __m256i twos = _mm256_maddubs_epi16((__m256i)w, (__m256i)x);
        return sum + (ints)_mm256_madd_epi16(twos, _mm256_set1_epi16(1));
    }
#endif
    const shorts first = WIDE ? (shorts)((pairs)w << 8) >> 8 : (shorts)w & 255;  // two products fit 16 bits
    const shorts second = WIDE ? (shorts)w >> 8 : (shorts)((pairs)w >> 8);
    const shorts twos = first * ((shorts)((pairs)x << 8) >> 8) + second * ((shorts)x >> 8);
    return sum + ((ints)((bits)twos << 16) >> 16) + ((ints)twos >> 16);
}
#endif

static inline vec halves(const uint8_t* p) {  // LANES numbers of 16 bits
#if defined(__AVX512F__) && !defined(PHLOEM_GENERIC)
    return (vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__AVX2__) && defined(__F16C__) && !defined(PHLOEM_GENERIC)
    return (vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
    uint16_t half[LANES];
    std::memcpy(half, p, sizeof half);
    bits wide;
    for (int j = 0; j < LANES; j++) wide[j] = half[j];
    const vec magnitude = (vec)((wide & 0x7fffu) << 13) * 0x1p112f;  // the exponent is counted from elsewhere
    return (vec)((bits)magnitude | (wide & 0x8000u) << 16);
#endif
}

enum Scales { HALF, HALF_MINIMUM, SUPER_MINIMUM, SUPER_HALVES };

struct Scale {  // of the block's first and second half; what is added for each value
    vec first, second, minimum;
};

template <int BITS, Scales SCALES>
struct Kind {
    static constexpr bool WIDE = BITS == 8, MINIMUM = SCALES == HALF_MINIMUM || SCALES == SUPER_MINIMUM;
    static constexpr bool APART = SCALES == SUPER_HALVES, SUPERS = APART || SCALES == SUPER_MINIMUM;
    static constexpr int ZERO = MINIMUM ? -1 : BITS - 1;           // q is 2^ZERO too large
    static constexpr int64_t VALUES = 4 * LANES * BITS;            // bytes of a block
    static constexpr int64_t FLOATS = 2 * LANES * (APART || SCALES == HALF ? 1 : 2);  // bytes of its scales or its SUPER's

    static int64_t header(int64_t blocks) {
        const int64_t bytes = SUPERS ? blocks / SUPER * (FLOATS + SUPER * 2 * LANES) : blocks * FLOATS;
        return (bytes + LINE - 1) / LINE * LINE;
    }

    static inline Scale scale(const uint8_t* header, int64_t block) {
        if (!SUPERS) {
            const uint8_t* at = header + block * FLOATS;
            const vec first = halves(at);
            return {first, first, MINIMUM ? halves(at + 2 * LANES) : vec{}};
        }
        const uint8_t* super = header + block / SUPER * (FLOATS + SUPER * 2 * LANES);
        const uint8_t* at = super + FLOATS + block % SUPER * 2 * LANES;
        const vec d = halves(super);
        if (APART) {
            const vec first = __builtin_convertvector(*(const steps*)at, vec);
            return {d * first, d * __builtin_convertvector(*(const steps*)(at + LANES), vec), vec{}};
        }
        const vec first = d * __builtin_convertvector(*(const small*)at, vec);
        const vec least = halves(super + 2 * LANES) * __builtin_convertvector(*(const small*)(at + LANES), vec);
        return {first, first, -least};
    }

    // The 8 groups of a block. With WIDE they are signed unless OFFSET.
    static inline void take(const uint8_t* from, ints* w) {
        const bits* p = (const bits*)from;
        if (WIDE) {
#pragma GCC unroll 8
            for (int g = 0; g < GROUPS; g++) w[g] = (ints)(OFFSET ? p[g] : p[g] ^ 0x80808080u);
            return;
        }
#pragma GCC unroll 8
        for (int g = 0; g < GROUPS; g++) {
            const bits low = (g < 4 ? p[g] : p[g - 4] >> 4) & 0x0f0f0f0fu;
            bits high = {};
            if (BITS == 5) high = (g <= 4 ? p[4] << (4 - g) : p[4] >> (g - 4)) & 0x10101010u;
            if (BITS == 6) {
                const int at = g % 4 * 2;
                high = (at <= 4 ? p[4 + g / 4] << (4 - at) : p[4 + g / 4] >> (at - 4)) & 0x30303030u;
            }
            w[g] = (ints)(low | high);
        }
    }

    static constexpr int SHIFT = WIDE && !OFFSET ? -1 : ZERO;  // of what was taken

    static inline vec product(const ints* w, int from, int to, const Rounded& x, int32_t minus) {
        ints sum = {};
        if (SHIFT >= 0) sum = (ints)((bits)(ints{} + minus) << (SHIFT >= 0 ? SHIFT : 0));
#pragma GCC unroll 8
        for (int g = from; g < to; g++) {
            int32_t word;
            std::memcpy(&word, x.q + 4 * g, sizeof word);
            sum = dot<WIDE>(sum, w[g], word);
        }
        return __builtin_convertvector(sum, vec) * x.scale;
    }
};

struct Blocks {  // a matrix: strips 2 * panel and 2 * panel + 1, and one offset more
    Matrix matrix;
    const uint8_t* strips;
    const int64_t* offsets;
    const uint8_t* kinds;

    int64_t blocks() const { return (matrix.k + BLOCK - 1) / BLOCK; }
};

struct Lines {  // what one strip's tile fetches meanwhile, as `Ahead` does: its share of the lines of STREAMS strips
    const uint8_t* from;
    int64_t apart, next, end, each;  // from strip to strip; the lines [next, end), of which a block fetches so many

    void fetch() {
        for (const int64_t stop = std::min(next + each, end); next < stop; next++)
            __builtin_prefetch(from + next % STREAMS * apart + next / STREAMS * LINE);
    }
};

// The sums of a strip for rows [row, row + rows).
template <class K>
static void multiply_strip(const Product& p, const uint8_t* strip, int64_t blocks, Lines ahead, int64_t row,
                           int64_t rows, vec* sums) {
    const uint8_t* values = strip + K::header(blocks);
    for (int64_t r = 0; r < rows; r++) sums[r] = vec{};
    for (int64_t b = 0; b < blocks; b++, values += K::VALUES) {
        ahead.fetch();
        ints w[GROUPS];
        K::take(values, w);
        const Scale scale = K::scale(strip, b);
        const char* at = p.row<char>(row) + b * sizeof(Rounded);
        for (int64_t r = 0; r < rows; r++, at += p.step) {
            const Rounded& x = *(const Rounded*)at;
            vec sum = sums[r];
            if (K::APART) {
                sum += scale.first * K::product(w, 0, GROUPS / 2, x, x.half[0]);
                sum += scale.second * K::product(w, GROUPS / 2, GROUPS, x, x.half[1]);
            } else {
                sum += scale.first * K::product(w, 0, GROUPS, x, x.all);
            }
            if (K::MINIMUM) sum += scale.minimum * x.sum;
            sums[r] = sum;
        }
    }
}

// The weights [k] of one output.
template <class K>
static void read_lane(const uint8_t* strip, int64_t blocks, int64_t lane, int64_t k, float* to) {
    for (int64_t b = 0; b < blocks; b++) {
        ints w[GROUPS];
        K::take(strip + K::header(blocks) + b * K::VALUES, w);
        const Scale scale = K::scale(strip, b);
        for (int64_t i = 0; i < std::min<int64_t>(k - b * BLOCK, BLOCK); i++) {
            const uint8_t byte = ((const uint8_t*)&w[i / 4])[lane * 4 + i % 4];
            const int value = K::SHIFT == K::ZERO && K::ZERO >= 0 ? byte - (1 << (K::ZERO < 0 ? 0 : K::ZERO))
                              : K::WIDE                           ? (int8_t)byte
                                                                  : byte;
            to[b * BLOCK + i] = (K::APART && i >= BLOCK / 2 ? scale.second : scale.first)[lane] * value + scale.minimum[lane];
        }
    }
}

struct Calls {
    void (*multiply)(const Product&, const uint8_t*, int64_t, Lines, int64_t, int64_t, vec*);
    void (*read)(const uint8_t*, int64_t, int64_t, int64_t, float*);
};

template <class K>
constexpr Calls calls = {multiply_strip<K>, read_lane<K>};

static constexpr Calls KINDS[] = {  // numbered as in _blocks_kinds.py
    calls<Kind<4, HALF>>,          calls<Kind<4, HALF_MINIMUM>>,  calls<Kind<5, HALF>>,          calls<Kind<5, HALF_MINIMUM>>,
    calls<Kind<8, HALF>>,          calls<Kind<4, SUPER_MINIMUM>>, calls<Kind<5, SUPER_MINIMUM>>, calls<Kind<6, SUPER_HALVES>>,
};

struct Kernel {
    const Blocks& w;

    // A normed row needs a place of its own, behind the rounded one.
    int64_t bytes() const {
        return w.blocks() * sizeof(Rounded) + (w.matrix.before ? w.matrix.k * sizeof(float) : 0);
    }

    void prepare(const float* x, char* to) const {
        const int64_t k = w.matrix.k;
        Rounded* rounded = (Rounded*)to;
        if (w.matrix.before) {
            float* normed = (float*)(rounded + w.blocks());
            norm(x, w.matrix.before, w.matrix.before_eps, k, normed, false);
            x = normed;
        }
        for (int64_t b = 0; b < w.blocks(); b++) round_block(x + b * BLOCK, k - b * BLOCK, rounded[b]);
    }

    // Strips are fetched as `walk` fetches panels, while the first tile meets those before them.
    Lines ahead(int64_t strip, int64_t first, int64_t last) const {
        const int64_t at = (strip - first) % STREAMS, next = strip - at + STREAMS;
        if (next >= last) return {};
        const int64_t group = std::min(next, last - STREAMS), size = w.offsets[group + 1] - w.offsets[group];
        const int64_t lines = size / LINE, each = (lines + w.blocks() - 1) / w.blocks();
        return {w.strips + w.offsets[group], size, at * lines, (at + 1) * lines, each};
    }

    void multiply(const Product& p, int64_t first, int64_t last) const {
        alignas(64) vec sums[2][TILE];
        for (int64_t panel = first; panel < last; panel++)
            for (int64_t row = 0; row < p.m; row += TILE) {
                const int64_t rows = std::min<int64_t>(p.m - row, TILE);
                for (int64_t half = 0; half < 2; half++) {
                    const int64_t strip = 2 * panel + half;
                    const Lines lines = row ? Lines{} : ahead(strip, 2 * first, 2 * last);
                    KINDS[w.kinds[strip]].multiply(p, w.strips + w.offsets[strip], w.blocks(), lines, row, rows, sums[half]);
                }
                for (int64_t r = 0; r < rows; r++) p.finish(sums[0][r], sums[1][r], row + r, panel);
            }
    }
};

extern "C" {

int64_t phloem_lanes() { return LANES; }

void phloem_multiply(const Blocks* w, const float* x, int64_t m, int64_t ldx, float* y, int64_t ldy, int add,
                     char* scratch, int threads) {
    run(Kernel{*w}, w->matrix, x, m, ldx, y, ldy, add, scratch, threads);
}

// Rows of a matrix without a gate, as floats [count, k].
void phloem_rows(const Blocks* w, const int64_t* rows, int64_t count, float* to, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (count > TILE)
    for (int64_t i = 0; i < count; i++) {
        const int64_t strip = rows[i] / LANES, k = w->matrix.k;
        KINDS[w->kinds[strip]].read(w->strips + w->offsets[strip], w->blocks(), rows[i] % LANES, k, to + i * k);
    }
}

// x [k] as the product rounds it.
void phloem_round(const float* x, int64_t k, float* to) {
    for (int64_t b = 0; b * BLOCK < k; b++) {
        Rounded rounded;
        round_block(x + b * BLOCK, k - b * BLOCK, rounded);
        for (int64_t i = 0; i < std::min<int64_t>(k - b * BLOCK, BLOCK); i++)
            to[b * BLOCK + i] = rounded.scale * rounded.q[i];
    }
}
}
