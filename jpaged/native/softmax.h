// The online softmax of a row of scores, in float32, to the base 2: scores come times log2(e).

#pragma once

#include <limits>
#include <utility>

#include "functions.h"

namespace jpaged {

constexpr int TILE = 64;          // keys that a row meets at once; a multiple of 4 * LANES
constexpr float LOWEST = -1e30f;  // finite: the difference of two of them is 0, not NaN
constexpr float HIDDEN = -std::numeric_limits<float>::infinity();
constexpr float LOG2_E = 1.44269504f;
// How far scores may rise above a row's peak before it follows: as it seldom has to, what is summed
// seldom decays. Weights are 2^8 at most.
constexpr float SLACK = 8;

// What is done to a score before the softmax: the cap, if there is one, then the factor.
struct ScoreRule {
  float factor;     // above 0
  float cap_scale;  // tanh is taken of scores times this; no cap: 0

  // For weights that are exp(score * scale), or with a cap exp(cap * tanh(score * scale / cap)).
  static ScoreRule in_base_2(float scale, float soft_cap) {
    if (soft_cap > 0) return {soft_cap * LOG2_E, scale / soft_cap};
    return {scale * LOG2_E, 0};
  }
  void cap(float* scores, int64_t num) const {
    if (cap_scale == 0) return;
    for (int64_t i = 0; i < num; i += LANES) store(scores + i, tanh(load(scores + i) * cap_scale));
  }
};

// Lane i of the result is lane i ^ Distance of v.
template <int Distance, int... I>
inline Vec swap_lanes(Vec v, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(v, v, (I ^ Distance)...);
}
template <int Distance = LANES / 2>
inline float largest(Vec v) {
  v = larger(v, swap_lanes<Distance>(v, std::make_integer_sequence<int, LANES>{}));
  if constexpr (Distance > 1) return largest<Distance / 2>(v);
  return v[0];
}

// One row: its peak, the sums of its weights by lane, and its weighted values.
struct Row {
  float* data;

  static int64_t size(int64_t padded) { return LANES + LANES + padded; }
  float& peak() const { return data[0]; }
  float* totals() const { return data + LANES; }
  float* value() const { return data + 2 * LANES; }
  float total() const {
    float sum = 0;
    for (int i = 0; i < LANES; ++i) sum += totals()[i];
    return sum;
  }
  void clear(int64_t padded) const {
    std::fill(data, data + size(padded), 0.0f);
    peak() = LOWEST;
  }
  // Whether the peak has to follow a score; NaN makes it NaN.
  bool is_left_by(float score) const { return !(score <= peak() + SLACK); }
  // Measures what there is from another peak.
  NOINLINE void follow(float to, int64_t padded) const {
    const float from = peak();
    peak() = to;
    if (from == LOWEST) return;  // there is nothing
    const Vec decay = exp2(splat(from - to));
    for (int64_t c = 0; c < LANES + padded; c += LANES)
      store(totals() + c, load(totals() + c) * decay);
  }
};

// Makes weights of the scores of a tile, of which the keys from lo to hi are visible.
inline void weigh(const ScoreRule& rule, float* scores, int lo, int hi, Row row, int64_t padded) {
  rule.cap(scores, TILE);
  if (lo > 0) std::fill(scores, scores + lo, HIDDEN);
  if (hi < TILE) std::fill(scores + hi, scores + TILE, HIDDEN);
  Vec largest_of = splat(HIDDEN);
  for (int i = 0; i < TILE; i += LANES) largest_of = larger(load(scores + i), largest_of);
  const float largest_score = largest(largest_of) * rule.factor;
  if (row.is_left_by(largest_score)) row.follow(largest_score, padded);
  const Vec factor = splat(rule.factor), peak = splat(row.peak());
  Vec total = load(row.totals());
  for (int i = 0; i < TILE; i += LANES) {
    const Vec weight = exp2(load(scores + i) * factor - peak);
    store(scores + i, weight);
    total += weight;
  }
  store(row.totals(), total);
}

// Takes later segments' results into earlier ones', row by row.
inline NOINLINE void merge(float* into, float* from, int64_t num, int64_t padded) {
  const int64_t size = Row::size(padded);
  for (const float* end = into + num * size; into < end; into += size, from += size) {
    const Row row{into}, later{from};
    const float peak = row.peak() > later.peak() ? row.peak() : later.peak();
    const Vec decay = exp2(splat(row.peak() - peak)), later_decay = exp2(splat(later.peak() - peak));
    row.peak() = peak;
    for (int64_t c = 0; c < LANES + padded; c += LANES)
      store(row.totals() + c, load(row.totals() + c) * decay + load(later.totals() + c) * later_decay);
  }
}

}  // namespace jpaged
