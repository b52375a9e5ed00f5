// The online softmax of a row of scores, in float32.

#pragma once

#include <limits>
#include <utility>

#include "functions.h"

namespace jpaged {

constexpr int TILE = 64;          // keys that a row meets at once; a multiple of 4 * LANES
constexpr float LOWEST = -1e30f;  // finite: the difference of two of them is 0, not NaN
constexpr float HIDDEN = -std::numeric_limits<float>::infinity();

// What is done to a score before the softmax.
struct ScoreRule {
  float scale, soft_cap;  // no cap: 0
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
  NOINLINE void decay(float factor, int64_t padded) const {
    for (int64_t c = 0; c < LANES + padded; c += LANES)
      store(totals() + c, load(totals() + c) * factor);
  }
};

// Makes weights of the scores of a tile, of which the keys from lo to hi are visible.
inline NOINLINE void weigh(const ScoreRule& rule, float* scores, int lo, int hi, Row row, int64_t padded) {
  Vec peaks = splat(row.peak());
  for (int at = 0; at < TILE; at += LANES) {
    Vec score = load(scores + at) * rule.scale;
    if (rule.soft_cap > 0) score = rule.soft_cap * tanh(score / rule.soft_cap);
    store(scores + at, score);
  }
  std::fill(scores, scores + lo, HIDDEN);
  std::fill(scores + hi, scores + TILE, HIDDEN);
  for (int at = 0; at < TILE; at += LANES) peaks = larger(load(scores + at), peaks);
  const float peak = largest(peaks);
  if (peak != row.peak()) {
    row.decay(exp(row.peak() - peak), padded);
    row.peak() = peak;
  }
  Vec total = load(row.totals());
  for (int at = 0; at < TILE; at += LANES) {
    const Vec weight = exp(load(scores + at) - peak);
    store(scores + at, weight);
    total += weight;
  }
  store(row.totals(), total);
}

// Takes a later segment's result into an earlier one's.
inline NOINLINE void merge(Row into, Row from, int64_t padded) {
  if (from.total() == 0) return;
  const float peak = into.peak() > from.peak() ? into.peak() : from.peak();
  into.decay(exp(into.peak() - peak), padded);
  from.decay(exp(from.peak() - peak), padded);
  into.peak() = peak;
  for (int64_t c = 0; c < LANES + padded; c += LANES)
    store(into.totals() + c, load(into.totals() + c) + load(from.totals() + c));
}

}  // namespace jpaged
