// Rows as bfloat16: one number of a row is one, or a float32 three that hold all of its bits.

#pragma once

#include "product.h"

namespace jpaged::planes {

inline uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}
inline float high_part(float x) {
  const uint32_t bits = bits_of(x) & 0xffff0000u;
  float y;
  std::memcpy(&y, &bits, sizeof y);
  return y;
}

// Whether the rows are bfloat16 as they stand, in whole steps.
inline bool are_ready(const Product& p) {
  return p.kind == Kind::bf16 && p.D % DEPTH == 0 && p.making == Making::nothing;
}

inline void reserve(const Product& p, Rows& rows) {
  if (!are_ready(p)) room(rows.planes, p.T * p.padded_depth() * (p.kind == Kind::f32 ? 3 : 1));
}

// Cuts a row into bfloat16.
inline void make_ready(const Product& p, Rows& rows, int64_t t) {
  if (are_ready(p)) return;
  thread_local std::vector<float> own;
  const int64_t stride = p.padded_depth(), cut = p.T * stride;
  float* row = room(own, stride);
  uint16_t* to = start(rows.planes) + t * stride;
  make_row(p, t, row);
  for (int64_t d = 0; d < stride; ++d) to[d] = static_cast<uint16_t>(bits_of(row[d]) >> 16);
  if (p.kind != Kind::f32) return;
  for (int64_t d = 0; d < stride; ++d) {
    const float second = row[d] - high_part(row[d]), third = second - high_part(second);
    to[cut + d] = static_cast<uint16_t>(bits_of(second) >> 16);
    to[2 * cut + d] = static_cast<uint16_t>(bits_of(third) >> 16);
  }
}

// The first plane.
inline const uint16_t* first(const Product& p, const Rows& rows) {
  return are_ready(p) ? static_cast<const uint16_t*>(p.x) : start(rows.planes);
}

}  // namespace jpaged::planes
