// A segment of attention in pairs of bfloat16, for queries and caches in bfloat16. Scores are summed in
// float32; weights are rounded to bfloat16 for the product with the values, as the XLA form rounds
// them.

#pragma once

#include <algorithm>
#include <vector>

#include "attention.h"
#include "pair_panels.h"
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

inline void pack_queries(const Call& call, const Item& item, Scratch& scratch) {
  const int64_t depth = depth_of(call);
  uint16_t* to = room(scratch.q, call.num_rows(item) * depth);
  call.for_each_row(item, [&](int64_t r, int64_t place) {
    const auto* from = static_cast<const uint16_t*>(call.q) + place;
    for (int64_t c = 0; c < depth; c += DEPTH)
      _mm512_store_si512(to + r * depth + c, load_row(from, c, call.C));
  });
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

// A tile of keys and values of one KV head, and the thread's room for them as pairs.
struct Tile {
  int64_t start;
  Rows keys, values;
  uint32_t *paired_keys, *paired_values;

  template <bool is_whole>
  void pack(int64_t depth) const {
    pack_keys<is_whole>(keys, depth, paired_keys);
    pack_values<is_whole>(values, depth, paired_values);
  }
  void pack(int64_t depth) const { keys.are_whole() ? pack<true>(depth) : pack<false>(depth); }
};

inline const uint16_t* halves(const uint32_t* pairs) {
  return reinterpret_cast<const uint16_t*>(pairs);
}

// The softmax of the rows of one KV head takes a tile.
inline void add_tile(const Call& call, const Item& item, const Tile& tile, const uint16_t* q,
                     Scratch& scratch, float* rows) {
  const int64_t padded = call.padded(), depth = depth_of(call), stride = Row::size(padded);
  const int64_t num_rows = item.num * call.group();
  uint16_t* weights = room(scratch.weights, SIDE * TILE);
  float* scores = room(scratch.scores, SIDE * TILE);
  tile.pack(depth);
  // Queries before the tile see nothing of it.
  const int64_t num_blind = std::max<int64_t>(tile.start - item.position, 0) * call.group();
  for (int64_t first = num_blind / SIDE * SIDE; first < num_rows; first += SIDE) {
    const int num = static_cast<int>(std::min<int64_t>(SIDE, num_rows - first));
    float* group = rows + first * stride;
    multiply_rows<TILE / SIDE, false>(num, q + first * depth, depth, halves(tile.paired_keys),
                                      2 * TILE, depth / 2, scores, TILE);
    call.rule.cap(scores, num * TILE);
    weigh(call, item, tile.start, first, num, scores, group, weights, [](int) {});
    for (int64_t c = 0; c < padded; c += UNROLL * SIDE)
      with_constant<UNROLL>((padded - c) / SIDE, [&](auto U) {
        multiply_rows<U(), true>(num, weights, TILE, halves(tile.paired_values + c), 2 * depth,
                                 TILE / 2, Row{group}.value() + c, stride);
      });
  }
}

constexpr int FEW_ROWS = 4;  // up to which rows take keys and values as they are turned

// The same for R rows, a decoding row's, with the same sums.
template <int R, bool is_whole>
NOINLINE void add_tile_to(const Call& call, const Item& item, const Tile& tile, const uint16_t* q,
                          Scratch& scratch, float* rows) {
  const int64_t padded = call.padded(), depth = depth_of(call), stride = Row::size(padded);
  uint16_t* weights = room(scratch.weights, SIDE * TILE);
  float* scores = room(scratch.scores, SIDE * TILE);
  const int begin = tile.keys.places.begin, end = tile.keys.places.end;  // others' weights are zero
  for (int first = begin / SIDE * SIDE; first < end; first += SIDE)
    score_turned<R, is_whole>(tile.keys, first, depth, q, scores);
  call.rule.cap(scores, R * TILE);
  weigh(call, item, tile.start, 0, R, scores, rows, weights, [](int) {});
  for (int64_t c = 0; c < padded; c += UNROLL * SIDE)
    with_constant<UNROLL>((padded - c) / SIDE, [&](auto U) {
      add_turned<R, U(), is_whole>(tile.values, begin / 2 * 2, end, c, depth, weights,
                                   Row{rows}.value() + c, stride);
    });
}

inline void add_tile_to_few(const Call& call, const Item& item, const Tile& tile, const uint16_t* q,
                            Scratch& scratch, float* rows) {
  with_constant<FEW_ROWS>(item.num * call.group(), [&](auto R) {
    if (tile.keys.are_whole())
      add_tile_to<R(), true>(call, item, tile, q, scratch, rows);
    else
      add_tile_to<R(), false>(call, item, tile, q, scratch, rows);
  });
}

// As `vectors::attend_segment`, after `pack_queries`. add: has the rows of a KV head take a tile.
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
    list_pieces(locate_next(call, item, start), item.num_heads * C, DEPTH, item.num_heads * share,
                lines);
    for (int64_t h = 0; h < item.num_heads; ++h) {
      const int64_t* own = lines + h * share;
      const Tile tile{start, {places, k + h * C, C, {k, own}}, {places, v + h * C, C, {v, own}},
                      keys, values};
      add(tile, jpaged::start(scratch.q) + h * num * depth, rows + h * num * stride);
    }
  }
}

}  // namespace jpaged::pairs

#endif
