// A segment of attention in pairs of bfloat16, for queries and caches in bfloat16. Scores are summed in
// float32; weights are rounded to bfloat16 for the product with the values, as the XLA form rounds
// them.

#pragma once

#include <algorithm>
#include <vector>

#include "attention.h"
#include "pairs.h"
#include "softmax_groups.h"

#if HAS_PAIRS

namespace jpaged::pairs {

constexpr int UNROLL = 4;  // vectors of sums that a row has in registers

struct Scratch {  // a thread's own memory
  std::vector<uint16_t> q;        // [rows][depth], by KV head, and the heads of a query together
  std::vector<uint32_t> keys;     // [depth/2][TILE]: pairs of neighbouring numbers
  std::vector<uint32_t> values;   // [TILE/2][depth]: pairs of neighbouring keys
  std::vector<uint16_t> weights;  // [2][SIDE][TILE]: of two groups
  std::vector<float> scores;      // [2][SIDE][TILE]
  std::vector<int64_t> lines;     // of the next tile
};

inline int64_t depth_of(const Call& call) { return (call.C + DEPTH - 1) / DEPTH * DEPTH; }

// DEPTH numbers of a row, from the c-th; zeros behind its end.
inline __m512i load_row(const uint16_t* row, int64_t c, int64_t C) {
  const int64_t left = C - c;
  const __mmask32 mask = left >= DEPTH ? 0xffffffffu : (1u << left) - 1;
  return _mm512_maskz_loadu_epi16(mask, row + c);
}

// A tile's rows in a pool.
struct Rows {
  const Places& places;
  const uint16_t* pool;
  int64_t C;

  // Whether all of the tile's vectors can be read as they stand.
  bool are_whole() const { return places.begin == 0 && places.end == TILE && C % DEPTH == 0; }
  // DEPTH numbers of a row, from the c-th; zeros behind its end, and where it is not live.
  template <bool is_whole>
  __m512i load(int key, int64_t c) const {
    if (is_whole) return _mm512_loadu_si512(pool + places.at[key] + c);
    return places.has(key) ? load_row(pool + places.at[key], c, C) : _mm512_setzero_si512();
  }
};

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

// What is asked for while a tile is packed: the next tile, line by line as it lies in memory, keys and
// values in turns. A head has its share of the lines.
struct Ahead {
  const uint16_t *k, *v;  // the pools
  const int64_t* lines;   // where in the pools they begin

  void ask(int64_t i) const {
    _mm_prefetch(k + lines[i], _MM_HINT_T1);
    _mm_prefetch(v + lines[i], _MM_HINT_T1);
  }
};

// The lines of a tile's tokens of `width` numbers, and pads until there are `num`.
inline void list_lines(const Places& places, int64_t width, int64_t num, int64_t* to) {
  const int64_t* end = to + num;
  for (int key = 0; key < TILE; ++key)
    for (int64_t c = 0; c < width; c += DEPTH) *to++ = places.at[key] + c;
  while (to < end) *to++ = 0;
}

// The keys of a tile as pairs; those not live are zeros.
template <bool is_whole>
inline void pack_keys(const Rows& from, int64_t depth, const Ahead& ahead, uint32_t* to) {
  for (int first = 0; first < TILE; first += SIDE)
    for (int64_t c = 0; c < depth; c += DEPTH) {
      __m512i rows[SIDE];
#pragma GCC unroll 16
      for (int i = 0; i < SIDE; ++i) {
        const int key = first + i;
        ahead.ask((first * depth + c * SIDE) / DEPTH + i);
        rows[i] = from.load<is_whole>(key, c);
      }
      store_transposed(rows, to + c / 2 * TILE + first, TILE);
    }
}

// The values of a tile as pairs; those not live are zeros.
template <bool is_whole>
inline void pack_values(const Rows& from, int64_t depth, uint32_t* to) {
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
      for (int i = 0; i < 2; ++i) rows[i] = from.load<is_whole>(key + i, c);
      _mm512_store_si512(to + c, _mm512_permutex2var_epi16(rows[0], low, rows[1]));
      _mm512_store_si512(to + c + SIDE, _mm512_permutex2var_epi16(rows[0], high, rows[1]));
    }
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

// Makes the weights of a group's scores: of the item's rows of one KV head, from `first` on.
template <class F>
inline void weigh(const Call& call, const Item& item, int64_t start, int64_t first, int num,
                  const float* scores, float* rows, uint16_t* weights, F meanwhile) {
  const int64_t padded = call.padded();
  Visible visible;
  if (find_visible(call, item, start, first, num, visible))
    weigh_group<true>(call.rule, scores, visible, num, rows, padded, weights, meanwhile);
  else
    weigh_group<false>(call.rule, scores, visible, num, rows, padded, weights, meanwhile);
}

inline const uint16_t* halves(const uint32_t* pairs) {
  return reinterpret_cast<const uint16_t*>(pairs);
}

// The softmax of the rows of one KV head takes a tile, packed.
inline void add_tile(const Call& call, const Item& item, int64_t start, const uint16_t* q,
                     const uint32_t* keys, const uint32_t* values, Scratch& scratch, float* rows) {
  const int64_t padded = call.padded(), depth = depth_of(call), stride = Row::size(padded);
  const int64_t num_rows = item.num * call.group();
  uint16_t* weights = room(scratch.weights, SIDE * TILE);
  float* scores = room(scratch.scores, SIDE * TILE);
  // Queries before the tile see nothing of it.
  const int64_t num_blind = std::max<int64_t>(start - item.position, 0) * call.group();
  for (int64_t first = num_blind / SIDE * SIDE; first < num_rows; first += SIDE) {
    const int num = static_cast<int>(std::min<int64_t>(SIDE, num_rows - first));
    float* group = rows + first * stride;
    multiply_rows<TILE / SIDE, false>(num, q + first * depth, depth, halves(keys), 2 * TILE,
                                      depth / 2, scores, TILE);
    call.rule.cap(scores, num * TILE);
    weigh(call, item, start, first, num, scores, group, weights, [](int) {});
    for (int64_t c = 0; c < padded; c += UNROLL * SIDE)
      with_constant<UNROLL>((padded - c) / SIDE, [&](auto U) {
        multiply_rows<U(), true>(num, weights, TILE, halves(values + c), 2 * depth, TILE / 2,
                                 Row{group}.value() + c, stride);
      });
  }
}

// As `vectors::attend_segment`, after `pack_queries`. add: `add_tile`, or who takes its place.
template <class F>
inline void attend_segment(const Call& call, const Item& item, int64_t segment, Scratch& scratch,
                           float* rows, F add) {
  const int64_t C = call.C, padded = call.padded(), depth = depth_of(call);
  const int64_t num = item.num * call.group(), stride = Row::size(padded);
  const int64_t share = TILE * depth / DEPTH;  // of a head, in lines
  uint32_t* keys = room(scratch.keys, depth / 2 * TILE);
  uint32_t* values = room(scratch.values, TILE / 2 * depth);
  int64_t* lines = room(scratch.lines, item.num_heads * share);
  const auto* k = static_cast<const uint16_t*>(call.k);
  const auto* v = static_cast<const uint16_t*>(call.v);
  for (int64_t r = 0; r < num * item.num_heads; ++r) Row{rows + r * stride}.clear(padded);
  const int64_t end = std::min((segment + 1) * SEGMENT, live(call, item).second);
  for (int64_t start = first_tile(call, item, segment); start < end; start += TILE) {
    const Places places = locate(call, item, start);
    list_lines(locate_next(call, item, start), item.num_heads * C, item.num_heads * share, lines);
    for (int64_t h = 0; h < item.num_heads; ++h) {
      const Ahead ahead{k, v, lines + h * share};
      const Rows head_keys{places, k + h * C, C}, head_values{places, v + h * C, C};
      if (head_keys.are_whole()) {
        pack_keys<true>(head_keys, depth, ahead, keys);
        pack_values<true>(head_values, depth, values);
      } else {
        pack_keys<false>(head_keys, depth, ahead, keys);
        pack_values<false>(head_values, depth, values);
      }
      add(start, jpaged::start(scratch.q) + h * num * depth, keys, values, rows + h * num * stride);
    }
  }
}

}  // namespace jpaged::pairs

#endif
