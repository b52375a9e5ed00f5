// A segment of attention on the bfloat16 units of a processor with tiles (AMX): for queries and
// caches in bfloat16. Scores are summed in float32; weights are rounded to bfloat16 for the product
// with the values, as the XLA form rounds them.

#pragma once

#include <algorithm>
#include <vector>

#include "amx.h"
#include "attention.h"

#if HAS_TILES

namespace jpaged::tiles {

constexpr int DEPTH = 32;            // numbers of a row that a tile multiplies
constexpr int KEY_TILES = TILE / SIDE;

struct Scratch {  // a thread's own memory
  std::vector<uint16_t> q;        // [rows][depth], by KV head, and the heads of a query together
  std::vector<uint32_t> keys;     // [depth/2][TILE]: pairs of neighbouring numbers
  std::vector<uint32_t> values;   // [TILE/2][depth]: pairs of neighbouring keys
  std::vector<uint16_t> weights;  // [rows][TILE]
  std::vector<float> scores;      // [rows][TILE]
};

inline int64_t depth_of(const Call& call) { return (call.C + DEPTH - 1) / DEPTH * DEPTH; }

// DEPTH numbers of a row, from the c-th; zeros behind its end.
inline __m512i load_row(const uint16_t* row, int64_t c, int64_t C) {
  const int64_t left = C - c;
  const __mmask32 mask = left >= DEPTH ? 0xffffffffu : (1u << left) - 1;
  return _mm512_maskz_loadu_epi16(mask, row + c);
}

inline void pack_queries(const Call& call, const Item& item, Scratch& scratch) {
  const int64_t depth = depth_of(call), num = item.num * call.group() * item.num_heads;
  uint16_t* to = room(scratch.q, num * depth);
  for (int64_t r = 0; r < num; ++r, to += depth) {
    const auto* from = static_cast<const uint16_t*>(call.q) + call.place(item, r);
    for (int64_t c = 0; c < depth; c += DEPTH) _mm512_store_si512(to + c, load_row(from, c, call.C));
  }
}

// Transposes 16 vectors of 16 words, and stores them.
inline void store_transposed(__m512i (&a)[SIDE], uint32_t* to, int64_t stride) {
  const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
#pragma GCC unroll 4
  for (int step = 0; step < 4; ++step) {  // a perfect shuffle of the rows
    __m512i b[SIDE];
#pragma GCC unroll 8
    for (int i = 0; i < SIDE / 2; ++i) {
      b[2 * i] = _mm512_permutex2var_epi32(a[i], low, a[i + SIDE / 2]);
      b[2 * i + 1] = _mm512_permutex2var_epi32(a[i], high, a[i + SIDE / 2]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < SIDE; ++i) a[i] = b[i];
  }
#pragma GCC unroll 16
  for (int i = 0; i < SIDE; ++i) _mm512_store_si512(to + i * stride, a[i]);
}

// The keys of a tile as pairs; those not live are zeros. Asks for the next tile's.
inline void pack_keys(const Places& places, const Places& next, const uint16_t* pool, int64_t C,
                      int64_t depth, uint32_t* to) {
  for (int first = 0; first < TILE; first += SIDE)
    for (int64_t c = 0; c < depth; c += DEPTH) {
      __m512i rows[SIDE];
#pragma GCC unroll 16
      for (int i = 0; i < SIDE; ++i) {
        const int key = first + i;
        _mm_prefetch(pool + next.at[key] + c, _MM_HINT_T1);
        rows[i] = places.has(key) ? load_row(pool + places.at[key], c, C) : _mm512_setzero_si512();
      }
      store_transposed(rows, to + c / 2 * TILE + first, TILE);
    }
}

// The values of a tile as pairs; those not live are zeros. Asks for the next tile's.
inline void pack_values(const Places& places, const Places& next, const uint16_t* pool, int64_t C,
                        int64_t depth, uint32_t* to) {
  __m512i low = _mm512_setzero_si512(), high = low;
  alignas(64) uint16_t places_low[DEPTH], places_high[DEPTH];
  for (int i = 0; i < SIDE; ++i)
    for (int pair = 0; pair < 2; ++pair) {
      places_low[2 * i + pair] = static_cast<uint16_t>(i + pair * DEPTH);
      places_high[2 * i + pair] = static_cast<uint16_t>(i + SIDE + pair * DEPTH);
    }
  low = _mm512_load_si512(places_low), high = _mm512_load_si512(places_high);
  for (int key = 0; key < TILE; key += 2, to += depth)
    for (int64_t c = 0; c < depth; c += DEPTH) {
      __m512i rows[2];
      for (int i = 0; i < 2; ++i) {
        _mm_prefetch(pool + next.at[key + i] + c, _MM_HINT_T1);
        rows[i] = places.has(key + i) ? load_row(pool + places.at[key + i], c, C)
                                      : _mm512_setzero_si512();
      }
      _mm512_store_si512(to + c, _mm512_permutex2var_epi16(rows[0], low, rows[1]));
      _mm512_store_si512(to + c + SIDE, _mm512_permutex2var_epi16(rows[0], high, rows[1]));
    }
}

// scores[num][TILE] = q[num][depth] times the keys, for at most SIDE rows.
inline void score(const uint16_t* q, const uint32_t* keys, int64_t depth, float* scores) {
  static_assert(KEY_TILES == 4);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t c = 0; c < depth; c += DEPTH) {
    const uint32_t* pairs = keys + c / 2 * TILE;
    _tile_loadd(4, q + c, depth * 2);
    _tile_loadd(5, pairs, TILE * 4);
    _tile_dpbf16ps(0, 4, 5);
    _tile_loadd(6, pairs + SIDE, TILE * 4);
    _tile_dpbf16ps(1, 4, 6);
    _tile_loadd(5, pairs + 2 * SIDE, TILE * 4);
    _tile_dpbf16ps(2, 4, 5);
    _tile_loadd(6, pairs + 3 * SIDE, TILE * 4);
    _tile_dpbf16ps(3, 4, 6);
  }
  _tile_stored(0, scores, TILE * 4);
  _tile_stored(1, scores + SIDE, TILE * 4);
  _tile_stored(2, scores + 2 * SIDE, TILE * 4);
  _tile_stored(3, scores + 3 * SIDE, TILE * 4);
}

// sums[num] += weights[num][TILE] times the values, for at most SIDE rows of `stride` floats.
inline void add_values(const uint16_t* weights, const uint32_t* values, int64_t depth,
                       int64_t padded, float* sums, int64_t stride) {
  for (int64_t c = 0; c < padded; c += SIDE) {
    _tile_loadd(0, sums + c, stride * 4);
    _tile_loadd(4, weights, TILE * 2);
    _tile_loadd(5, values + c, depth * 4);
    _tile_dpbf16ps(0, 4, 5);
    _tile_loadd(4, weights + DEPTH, TILE * 2);
    _tile_loadd(6, values + TILE / 4 * depth + c, depth * 4);
    _tile_dpbf16ps(0, 4, 6);
    _tile_stored(0, sums + c, stride * 4);
  }
}

// Rounds a row's weights; those of keys it does not see are 0.
inline void round_weights(const float* from, uint16_t* to) {
  for (int key = 0; key < TILE; key += SIDE)
    _mm256_store_si256(reinterpret_cast<__m256i*>(to + key),
                       (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(from + key)));
}

// The softmax of the rows of one KV head takes a tile, packed.
inline void add_tile(const Call& call, const Item& item, int64_t start, const uint16_t* q,
                     const uint32_t* keys, const uint32_t* values, Scratch& scratch, float* rows,
                     Shapes& shapes) {
  const int64_t padded = call.padded(), depth = depth_of(call), stride = Row::size(padded);
  const int64_t G = call.group(), num = item.num * G;
  uint16_t* weights = room(scratch.weights, SIDE * TILE);
  float* scores = room(scratch.scores, SIDE * TILE);
  for (int64_t first = 0; first < num; first += SIDE) {
    const auto few = static_cast<uint8_t>(std::min<int64_t>(SIDE, num - first));
    shapes.set({few, few, few, few, few, SIDE, SIDE, SIDE}, {64, 64, 64, 64, 64, 64, 64, 64});
    score(q + first * depth, keys, depth, scores);
    float* upper = rows + first * stride;
    for (int64_t r = 0; r < few; ++r) {
      const auto [lo, hi] = call.visible(item.position + (first + r) / G, start);
      if (lo < hi) {
        weigh(call.rule, scores + r * TILE, lo, hi, Row{upper + r * stride}, padded);
        round_weights(scores + r * TILE, weights + r * TILE);
      } else {
        std::fill_n(weights + r * TILE, TILE, 0);
      }
    }
    add_values(weights, values, depth, padded, Row{upper}.value(), stride);
  }
}

// As `vectors::attend_segment`, after `pack_queries`.
inline void attend_segment(const Call& call, const Item& item, int64_t segment, Scratch& scratch,
                           Shapes& shapes, float* rows) {
  const int64_t C = call.C, padded = call.padded(), depth = depth_of(call);
  const int64_t num = item.num * call.group(), stride = Row::size(padded);
  uint32_t* keys = room(scratch.keys, depth / 2 * TILE);
  uint32_t* values = room(scratch.values, TILE / 2 * depth);
  const auto* k = static_cast<const uint16_t*>(call.k);
  const auto* v = static_cast<const uint16_t*>(call.v);
  for (int64_t r = 0; r < num * item.num_heads; ++r) Row{rows + r * stride}.clear(padded);
  const int64_t end = std::min((segment + 1) * SEGMENT, live(call, item).second);
  for (int64_t start = first_tile(call, item, segment); start < end; start += TILE) {
    const Places places = locate(call, item, start), next = locate_next(call, item, start);
    for (int64_t h = 0; h < item.num_heads; ++h) {
      pack_keys(places, next, k + h * C, C, depth, keys);
      pack_values(places, next, v + h * C, C, depth, values);
      add_tile(call, item, start, jpaged::start(scratch.q) + h * num * depth, keys, values, scratch,
               rows + h * num * stride, shapes);
    }
  }
}

}  // namespace jpaged::tiles

#endif
