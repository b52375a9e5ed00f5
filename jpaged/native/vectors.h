// Products as float32 vectors, for any processor and every kind of weight.

#pragma once

#include "product.h"

namespace jpaged {

namespace vectors {

constexpr int WIDTH = PANEL / LANES;                            // vectors of a panel's outputs
constexpr int MAX_ROWS = LANES == 16 ? 8 : LANES == 8 ? 2 : 1;  // whose sums fit the registers

inline void reserve(const Product& p, Rows& rows) { room(rows.numbers, p.T * p.padded_depth()); }

inline void make_ready(const Product& p, Rows& rows, int64_t t) {
  make_row(p, t, start(rows.numbers) + t * p.padded_depth());
}

// sums[r][PANEL] = x[r] times a panel [D][PANEL], for R rows.
template <int R>
NOINLINE void multiply(const float* x, int64_t stride, const float* panel, int64_t D, float* sums) {
  Vec sum[R][WIDTH] = {};
  for (int64_t d = 0; d < D; ++d)
    for (int w = 0; w < WIDTH; ++w) {
      const Vec weight = load(panel + d * PANEL + w * LANES);
      for (int r = 0; r < R; ++r) sum[r][w] += x[r * stride + d] * weight;
    }
  for (int r = 0; r < R; ++r)
    for (int w = 0; w < WIDTH; ++w) store(sums + r * PANEL + w * LANES, sum[r][w]);
}

template <int R = MAX_ROWS>
void multiply_all(int64_t num, const float* x, int64_t stride, const float* panel, int64_t D,
                  float* sums) {
  for (; num >= R; num -= R, x += R * stride, sums += R * PANEL)
    multiply<R>(x, stride, panel, D, sums);
  if constexpr (R > 1) {
    if (num > 0) multiply_all<R / 2>(num, x, stride, panel, D, sums);
  }
}

// A panel as float32 [padded D][PANEL].
inline const float* widen_panel(const Product& p, int64_t panel, std::vector<float>& scratch) {
  if (p.kind == Kind::f32) return p.panel<float>(panel);
  float* to = room(scratch, p.padded_depth() * PANEL);
  const auto fill = [&](auto number) {
    for (int64_t d = 0; d < p.padded_depth(); ++d)
      for (int64_t c = 0; c < PANEL; ++c) to[d * PANEL + c] = number(d, c);
  };
  const auto at = [&](int64_t d, int64_t c) {
    return (panel * p.num_steps() + d / DEPTH) * PANEL + c;
  };
  switch (p.kind) {
    case Kind::f32: break;
    case Kind::f16:
      fill([w = p.panel<_Float16>(panel)](auto d, auto c) { return widen(w[d * PANEL + c]); });
      break;
    case Kind::bf16:
      fill([w = p.panel<BFloat16>(panel)](auto d, auto c) {
        return widen(w[(d / 2 * PANEL + c) * 2 + d % 2]);
      });
      break;
    case Kind::i8:
      fill([&, w = p.panel<int8_t>(panel)](auto d, auto c) {
        return w[(d / 4 * PANEL + c) * 4 + d % 4] * widen(p.scales[at(d, c)]);
      });
      break;
    case Kind::i4:
      fill([&, w = p.panel<uint8_t>(panel, 2)](auto d, auto c) {
        const int both = w[(d / 8 * PANEL + c) * 4 + d % 4];
        const int number = d / 4 % 2 == 0 ? both & 15 : both >> 4;
        return number * widen(p.scales[at(d, c)]) + widen(p.mins[at(d, c)]);
      });
      break;
  }
  return to;
}

inline void multiply_panels(const Product& p, const Rows& rows, int64_t first, int64_t last,
                            int64_t begin, int64_t end) {
  thread_local std::vector<float> scratch[2], own;
  float* sums = room(own, 2 * SUMS);
  const int64_t stride = p.padded_depth();
  for (int64_t panel = first; panel < last; ++panel) {
    const float* weights[2];
    for (int64_t part = 0; part < p.num_parts(); ++part)
      weights[part] = widen_panel(p, panel + part * p.num_panels(), scratch[part]);
    for (int64_t t = begin; t < end; t += BLOCK) {
      const int64_t num = std::min<int64_t>(BLOCK, end - t);
      const float* x = start(rows.numbers) + t * stride;
      for (int64_t part = 0; part < p.num_parts(); ++part)
        multiply_all(num, x, stride, weights[part], stride, sums + part * SUMS);
      put(p, t, num, panel, sums);
    }
  }
}

}  // namespace vectors

}  // namespace jpaged
