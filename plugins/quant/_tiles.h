// Products with weights of 16 or 8 bits, laid out as matrix units want them; product.h says how they are streamed.
//
// Both sides are cut along k into steps of QUADS groups: 4 bytes of each output's weights, and the same elements of a row of
// x. A panel is [step][2][QUADS][LANES][4 bytes]: in each step two tiles of weights for a matrix unit (AMX), and for vector
// units a register per group and LANES outputs. A kind says how a row of x becomes groups (`prepare`), how a group meets
// one of weights (`add`; on a matrix unit, if there may be one, the macro MEET), and what is made of the sums (`value`). A row may have two planes
// of groups, of which a kind makes one result.
//
// A matrix unit takes up to two tiles of TALL rows at a time. It multiplies single rows as well: that costs no more than
// the weights' way from memory, and so all numbers of rows have one arithmetic.

#pragma once

#include <array>
#include <cstring>
#include <utility>

#include "product.h"

#if defined(MEET)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

constexpr int QUADS = 16, TALL = 16;
constexpr int GROUP = LANES * 4;     // bytes of a group of weights, for LANES outputs
constexpr int TILE = QUADS * GROUP;  // bytes of a step of weights, for LANES outputs
constexpr int UNIT = 2 * GROUP;      // bytes that are fetched at once

typedef uint32_t words __attribute__((vector_size(LANES * 4), aligned(4), may_alias));
typedef int32_t ints __attribute__((vector_size(LANES * 4), aligned(4), may_alias));

// Steps that k elements of so many bytes take.
static inline int64_t steps_of(int64_t k, int64_t element) { return (k * element + 4 * QUADS - 1) / (4 * QUADS); }

// A step's 4 * QUADS bytes of the output that is number `lane` of a panel, to their places.
static inline void place(char* panel, int64_t step, int64_t lane, const void* bytes) {
    char* to = panel + (step * 2 + lane / LANES) * TILE + lane % LANES * 4;
    for (int q = 0; q < QUADS; q++) std::memcpy(to + q * GROUP, (const char*)bytes + q * 4, 4);
}

// The sums of one row and LANES outputs, plane by plane.
template <class Kind>
struct Sums {
    typename Kind::Number planes[Kind::PLANES];
};

// R rows on vector units. EACH bytes of a row of x meet a group.
template <class Kind, int R>
static void block(const Kind& kind, const Product& p, const char* w, const Ahead& ahead, int64_t row, int64_t panel) {
    constexpr int P = Kind::PLANES;
    Sums<Kind> low[R] = {}, high[R] = {};
    const char* x = p.row<char>(row);
    for (int64_t step = 0; step < kind.steps; step++, w += 2 * TILE)
        for (int q = 0; q < QUADS; q++, x += Kind::EACH) {
            ahead.fetch<UNIT>(step * QUADS + q);
            const typename Kind::Weights first(w + q * GROUP), second(w + TILE + q * GROUP);
#pragma GCC unroll 16
            for (int i = 0; i < R * P; i++) {
                const char* group = x + i / P * p.step + i % P * kind.plane();
                Kind::add(low[i / P].planes[i % P], first, group);
                Kind::add(high[i / P].planes[i % P], second, group);
            }
        }
#pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
        const char* at = p.row<char>(row + r);
        p.finish(kind.value(low[r], at, panel, 0), kind.value(high[r], at, panel, 1), row + r, panel);
    }
}

template <class Kind>
using Block = void (*)(const Kind&, const Product&, const char*, const Ahead&, int64_t, int64_t);

template <class Kind, int... N>
static constexpr std::array<Block<Kind>, sizeof...(N)> blocks(std::integer_sequence<int, N...>) {
    return {block<Kind, N + 1>...};
}

// Whether there is a matrix unit, which the system lets a process use that has asked for it.
static bool matrix_unit() {
#if defined(MEET)
    constexpr long REQUEST = 0x1023, DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, REQUEST, DATA) == 0;
#else
    return false;
#endif
}

#if defined(MEET)
// The shapes of a thread's tiles: 0 to 3 are sums, 4 and 5 rows of x, 6 and 7 weights.
static void configure(int64_t tall) {
    struct {
        uint8_t palette, start, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } shapes = {};
    shapes.palette = 1;
    for (int i = 0; i < 8; i++) shapes.bytes[i] = LINE, shapes.rows[i] = i < 6 ? tall : TALL;
    asm volatile("ldtilecfg %0" ::"m"(shapes));
}

// One tile of rows, or TWO: those of two planes, or of one plane. These overlap where there are less than 2 * TALL rows, as
// nothing behind them may be read.
template <class Kind, bool TWO>
static void tiles(const Kind& kind, const Product& p, const char* w, const Ahead& ahead, int64_t row, int64_t rows,
                  int64_t panel) {
    constexpr int P = Kind::PLANES;
    typename Kind::Number sums[2 * TALL][2];
    const int64_t second = P == 1 && TWO ? rows - TALL : 0;
    const char *x = p.row<char>(row), *below = P == 1 ? p.row<char>(row + second) : x + kind.plane();
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t step = 0; step < kind.steps; step++, w += 2 * TILE, x += LINE, below += LINE) {
        for (int q = 0; q < QUADS; q++) ahead.fetch<UNIT>(step * QUADS + q);
        _tile_loadd(6, w, LINE);
        _tile_loadd(7, w + TILE, LINE);
        _tile_loadd(4, x, p.step);
        MEET(0, 4, 6);
        MEET(1, 4, 7);
        if (TWO) {
            _tile_loadd(5, below, p.step);
            MEET(2, 5, 6);
            MEET(3, 5, 7);
        }
    }
    _tile_stored(0, &sums[0][0], sizeof sums[0]);
    _tile_stored(1, &sums[0][1], sizeof sums[0]);
    if (TWO) {
        _tile_stored(2, &sums[TALL][0], sizeof sums[0]);
        _tile_stored(3, &sums[TALL][1], sizeof sums[0]);
    }
    for (int64_t r = 0; r < rows; r++) {
        const auto* sum = sums + (r < TALL ? r : r - second + TALL);
        Sums<Kind> low, high;
        for (int i = 0; i < P; i++) low.planes[i] = sum[i * TALL][0], high.planes[i] = sum[i * TALL][1];
        const char* at = p.row<char>(row + r);
        p.finish(kind.value(low, at, panel, 0), kind.value(high, at, panel, 1), row + r, panel);
    }
}
#endif

// Panels [first, last).
template <class Kind>
static void multiply_panels(const Kind& kind, const Product& p, const char* panels, int64_t first, int64_t last) {
    const int64_t units = kind.steps * QUADS;
#if defined(MEET)
    if (kind.unit) {
        constexpr int64_t MOST = 2 * TALL / Kind::PLANES;
        const int64_t count = (p.m + MOST - 1) / MOST;
        configure(std::min<int64_t>((p.m + count - 1) / count, TALL));  // as tall as the tallest block
        walk<UNIT>(panels, units, p.m, MOST, first, last,
                   [&](const char* w, const Ahead& ahead, int64_t row, int64_t rows, int64_t panel) {
                       constexpr bool PLANES = Kind::PLANES == 2;
                       (PLANES || rows > TALL ? tiles<Kind, true> : tiles<Kind, PLANES>)(kind, p, w, ahead, row, rows, panel);
                   });
        _tile_release();
        return;
    }
#endif
    constexpr int MOST = ROWS / Kind::PLANES;
    static constexpr auto BLOCKS = blocks<Kind>(std::make_integer_sequence<int, MOST>());
    walk<UNIT>(panels, units, p.m, MOST, first, last,
               [&](const char* w, const Ahead& ahead, int64_t row, int64_t rows, int64_t panel) {
                   BLOCKS[rows - 1](kind, p, w, ahead, row, panel);
               });
}
