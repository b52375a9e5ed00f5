// A segment of attention on the bfloat16 units of a processor with tiles (AMX): for queries and
// caches in bfloat16. Scores are summed in float32; weights are rounded to bfloat16 for the product
// with the values, as the XLA form rounds them.

#pragma once

#include <algorithm>
#include <vector>

#include "amx.h"
#include "attention.h"
#include "softmax_tiles.h"

#if HAS_TILES

namespace jpaged::tiles {

constexpr int DEPTH = 32;            // numbers of a row that a tile multiplies

struct Scratch {  // a thread's own memory
  std::vector<uint16_t> q;        // [rows][depth], by KV head, and the heads of a query together
  std::vector<uint32_t> keys;     // [depth/2][TILE]: pairs of neighbouring numbers
  std::vector<uint32_t> values;   // [TILE/2][depth]: pairs of neighbouring keys
  std::vector<uint16_t> weights;  // [2][SIDE][TILE]: of two groups
  std::vector<float> scores;      // [2][SIDE][TILE]
};

inline int64_t depth_of(const Call& call) { return (call.C + DEPTH - 1) / DEPTH * DEPTH; }

// DEPTH numbers of a row, from the c-th; zeros behind its end.
inline __m512i load_row(const uint16_t* row, int64_t c, int64_t C) {
  const int64_t left = C - c;
  const __mmask32 mask = left >= DEPTH ? 0xffffffffu : (1u << left) - 1;
  return _mm512_maskz_loadu_epi16(mask, row + c);
}

inline void pack_queries(const Call& call, const Item& item, Scratch& scratch) {
  const int64_t depth = depth_of(call);
  uint16_t* to = room(scratch.q, call.num_rows(item) * depth);
  call.for_each_row(item, [&](int64_t r, int64_t place) {
    const auto* from = static_cast<const uint16_t*>(call.q) + place;
    for (int64_t c = 0; c < depth; c += DEPTH)
      _mm512_store_si512(to + r * depth + c, load_row(from, c, call.C));
  });
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

// A group of at most SIDE rows of one KV head, and where its scores and weights are.
struct Group {
  const uint16_t* q;  // [num][depth]
  float* rows;
  float* scores;      // [num][TILE]
  uint16_t* weights;  // [num][TILE]
  int num;
};

// Tiles 0, 1 and 3 are sums, 2, 4 and 5 rows, 6 and 7 what these are multiplied with.
inline void set_shapes(Shapes& shapes, int num) {
  const auto few = static_cast<uint8_t>(num);
  shapes.set({few, few, few, few, few, few, SIDE, SIDE}, {64, 64, 64, 64, 64, 64, 64, 64});
}

// A step of a group's scores: half of the keys. What a step has made the next one stores, lest the
// store wait for the products; so there is one more.
constexpr int SCORE_STEPS = 3;
inline void score(const Group& group, const uint32_t* keys, int64_t depth, int step) {
  if (step > 0) {
    float* to = group.scores + (step - 1) * 2 * SIDE;
    _tile_stored(0, to, TILE * 4);
    _tile_stored(1, to + SIDE, TILE * 4);
  }
  if (step == 2) return;
  _tile_zero(0);
  _tile_zero(1);
  for (int64_t c = 0; c < depth; c += DEPTH) {
    const uint32_t* pairs = keys + c / 2 * TILE + step * 2 * SIDE;
    _tile_loadd(2, group.q + c, depth * 2);
    _tile_loadd(6, pairs, TILE * 4);
    _tile_dpbf16ps(0, 2, 6);
    _tile_loadd(7, pairs + SIDE, TILE * 4);
    _tile_dpbf16ps(1, 2, 7);
  }
}

// A step of a group's sums: to SIDE columns of these are added the weights times the values.
inline int value_steps(int64_t padded) { return static_cast<int>(padded / SIDE) + 1; }
inline void add_values(const Group& group, const uint32_t* values, int64_t depth, int64_t padded,
                       int step) {
  const int64_t stride = Row::size(padded) * 4;
  float* sums = Row{group.rows}.value() + step * SIDE;
  values += step * SIDE;
  if (step == 0) {
    finish_stores();
    _tile_loadd(4, group.weights, TILE * 2);
    _tile_loadd(5, group.weights + DEPTH, TILE * 2);
  } else {
    _tile_stored(3, sums - SIDE, stride);
  }
  if (step * SIDE >= padded) return;
  _tile_loadd(3, sums, stride);
  _tile_loadd(6, values, depth * 4);
  _tile_dpbf16ps(3, 4, 6);
  _tile_loadd(7, values + TILE / 4 * depth, depth * 4);
  _tile_dpbf16ps(3, 5, 7);
}

// The keys of the tile at `start` that a group's rows see, from the item's row `first`; whether each
// sees all.
inline bool find_visible(const Call& call, const Item& item, int64_t start, int64_t first, int num,
                         Visible& visible) {
  const auto of = [&](int64_t r) { return call.visible(item.position + r / call.group(), start); };
  const std::pair<int, int> all{0, TILE};
  if (of(first) == all && of(first + num - 1) == all) return true;
  std::fill_n(visible, SIDE, 0);
  for (int r = 0; r < num; ++r)
    if (const auto [lo, hi] = of(first + r); lo < hi)
      visible[r] = ~uint64_t{0} >> (TILE - hi + lo) << lo;
  return false;
}

// The softmax of the rows of one KV head takes a tile, packed. While a group is weighed, the tiles make
// the next one's scores and the last one's sums.
inline void add_tile(const Call& call, const Item& item, int64_t start, const uint16_t* q,
                     const uint32_t* keys, const uint32_t* values, Scratch& scratch, float* rows,
                     Shapes& shapes) {
  const int64_t padded = call.padded(), depth = depth_of(call), stride = Row::size(padded);
  const int64_t num = item.num * call.group();
  uint16_t* weights = room(scratch.weights, 2 * SIDE * TILE);
  float* scores = room(scratch.scores, 2 * SIDE * TILE);
  const auto group_at = [&](int64_t first) {
    const int64_t turn = first / SIDE % 2 * SIDE * TILE;
    return Group{q + first * depth, rows + first * stride, scores + turn, weights + turn,
                 static_cast<int>(std::min<int64_t>(SIDE, num - first))};
  };
  const auto weigh = [&](const Group& group, int64_t first, auto meanwhile) {
    Visible visible;
    if (find_visible(call, item, start, first, group.num, visible))
      weigh_group<true>(call.rule, group.scores, visible, group.num, group.rows, padded,
                        group.weights, meanwhile);
    else
      weigh_group<false>(call.rule, group.scores, visible, group.num, group.rows, padded,
                         group.weights, meanwhile);
  };
  const auto score_all = [&](const Group& group) {
    set_shapes(shapes, group.num);
    for (int step = 0; step < SCORE_STEPS; ++step) score(group, keys, depth, step);
    call.rule.cap(group.scores, group.num * TILE);
  };
  const auto add_all = [&](const Group& group) {
    for (int step = 0; step < value_steps(padded); ++step)
      add_values(group, values, depth, padded, step);
  };
  // Queries before the tile see nothing of it.
  const int64_t num_blind = std::max<int64_t>(start - item.position, 0) * call.group();
  const int64_t begin = num_blind / SIDE * SIDE, full = num / SIDE * SIDE;
  finish_stores();
  if (begin < full) score_all(group_at(begin));
  for (int64_t first = begin; first < full; first += SIDE) {
    const Group group = group_at(first);
    const bool is_first = first == begin, is_last = first + SIDE == full;
    const Group last = group_at(is_first ? first : first - SIDE);
    const Group next = group_at(is_last ? first : first + SIDE);
    const int num_scores = is_last ? 0 : SCORE_STEPS;
    const int num_steps = num_scores + (is_first ? 0 : value_steps(padded));
    weigh(group, first, [&](int r) {
      for (int i = r * num_steps / SIDE; i < (r + 1) * num_steps / SIDE; ++i)
        if (i < num_scores)
          score(next, keys, depth, i);
        else
          add_values(last, values, depth, padded, i - num_scores);
    });
    if (!is_last) call.rule.cap(next.scores, SIDE * TILE);
  }
  if (begin < full) add_all(group_at(full - SIDE));
  if (full < num) {
    const Group group = group_at(full);
    score_all(group);
    weigh(group, full, [](int) {});
    add_all(group);
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
