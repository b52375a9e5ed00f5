// Rows as 15-bit integers with a scale for each step, for weights of 8 and 4 bits.

#pragma once

#include <cmath>

#include "product.h"

namespace jpaged::integers {

constexpr int LARGEST = 127 * 128;  // of a row's integers, which are 128 * high + low

inline void reserve(const Product& p, Rows& rows) {
  room(rows.integers, p.T * 2 * p.padded_depth());
  room(rows.scales, p.T * p.num_steps());
  room(rows.sums, p.T * p.num_steps());
}

inline void make_ready(const Product& p, Rows& rows, int64_t t) {
  thread_local std::vector<float> own;
  const int64_t stride = p.padded_depth();
  float* row = room(own, stride);
  int8_t* high = start(rows.integers) + t * 2 * stride;
  make_row(p, t, row);
  for (int64_t s = 0; s < p.num_steps(); ++s, row += DEPTH, high += DEPTH) {
    float peak = 0, total = 0;  // the total is NaN if any number is not finite, else 0
    for (int d = 0; d < DEPTH; ++d) {
      peak = std::fabs(row[d]) > peak ? std::fabs(row[d]) : peak;
      total += row[d] * 0.0f;
    }
    const bool is_zero = peak < 1e-30f || total != 0;
    const float factor = is_zero ? 0 : LARGEST / peak;
    int sum = 0;
    for (int d = 0; d < DEPTH; ++d) {
      const int number = is_zero ? 0 : static_cast<int>(std::nearbyintf(row[d] * factor));
      const int rounded = (number + 64) >> 7;
      high[d] = static_cast<int8_t>(rounded);
      high[stride + d] = static_cast<int8_t>(number - rounded * 128);
      sum += number;
    }
    const int64_t at = t * p.num_steps() + s;
    start(rows.scales)[at] = is_zero ? total : peak / LARGEST;
    start(rows.sums)[at] = static_cast<float>(sum);
  }
}

}  // namespace jpaged::integers
