// RMS norms of rows.

#pragma once

#include <cmath>

#include "numbers.h"

namespace jpaged {

// As `jpaged.ops.norm` rounds them: x normalized and rounded, then times the weight; `is_offset`:
// times 1 + the weight, then rounded. from, weight: D numbers; to: whole vectors.
template <class T>
inline void rms_norm(const T* from, const T* weight, int64_t D, float eps, bool is_offset,
                     float* to) {
  Vec squares{};
  for (int64_t d = 0; d < D; d += LANES) {
    const Vec v = read(from + d, D - d);
    squares += v * v;
  }
  float total = 0;
  for (int i = 0; i < LANES; ++i) total += squares[i];
  const float scale = 1 / std::sqrt(total / static_cast<float>(D) + eps);
  for (int64_t d = 0; d < D; d += LANES) {
    const Vec v = read(from + d, D - d) * scale, w = read(weight + d, D - d);
    store(to + d, rounded<T>(is_offset ? v * (1.0f + w) : rounded<T>(v) * w));
  }
}

}  // namespace jpaged
