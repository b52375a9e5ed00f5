// What `pairs::add_tile` does, on the bfloat16 units of a processor with tiles (AMX).

#pragma once

#include <algorithm>

#include "amx.h"
#include "attention_pairs.h"

#if HAS_TILES

namespace jpaged::tiles {

using pairs::DEPTH;  // numbers of a row that a tile multiplies

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

// The softmax of the rows of one KV head takes a tile. While a group is weighed, the tiles make
// the next one's scores and the last one's sums.
inline void add_tile(const Call& call, const Item& item, const pairs::Tile& tile, const uint16_t* q,
                     pairs::Scratch& scratch, float* rows, Shapes& shapes) {
  const uint32_t *keys = tile.paired_keys, *values = tile.paired_values;
  const int64_t padded = call.padded(), depth = pairs::depth_of(call), stride = Row::size(padded);
  const int64_t num = item.num * call.group();
  uint16_t* weights = room(scratch.weights, 2 * SIDE * TILE);
  float* scores = room(scratch.scores, 2 * SIDE * TILE);
  const auto group_at = [&](int64_t first) {
    const int64_t turn = first / SIDE % 2 * SIDE * TILE;
    return Group{q + first * depth, rows + first * stride, scores + turn, weights + turn,
                 static_cast<int>(std::min<int64_t>(SIDE, num - first))};
  };
  const auto weigh = [&](const Group& group, int64_t first, auto meanwhile) {
    pairs::weigh(call, item, tile.start, first, group.num, group.scores, group.rows, group.weights,
                 meanwhile);
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
  tile.pack(depth);
  // Queries before the tile see nothing of it.
  const int64_t num_blind = std::max<int64_t>(tile.start - item.position, 0) * call.group();
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

}  // namespace jpaged::tiles

#endif
