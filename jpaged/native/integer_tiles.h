// Products with weights of 8 and 4 bits on the int8 units of a processor with tiles (AMX).

#pragma once

#include "integers.h"
#include "tiles.h"

#if HAS_TILES

namespace jpaged::tiles {

constexpr int INT_ROWS = BLOCK / 2;  // rows that are multiplied together: each is two

// A step of 4-bit numbers as one of 8 bits.
inline void unpack(const uint8_t* from, int8_t* to) {
  for (int i = 0; i < DEPTH / 8; ++i, from += 4 * PANEL, to += 8 * PANEL)
    for (int at = 0; at < 4 * PANEL; ++at) {
      to[at] = static_cast<int8_t>(from[at] & 15);
      to[4 * PANEL + at] = static_cast<int8_t>(from[at] >> 4);
    }
}

// sums[num][PANEL] of `num` rows, at most INT_ROWS, with a panel.
template <Kind KIND>
void multiply_integers(const Product& p, const Rows& rows, int64_t panel, int64_t t, int num,
                       float* sums) {
  constexpr bool IS_HALF = KIND == Kind::i4;
  constexpr int BYTES = DEPTH * PANEL / (IS_HALF ? 2 : 1);
  alignas(64) static thread_local int32_t products[2][BLOCK * PANEL];
  alignas(64) static thread_local int8_t unpacked[DEPTH * PANEL];
  const int64_t stride = p.padded_depth(), num_steps = p.num_steps();
  const bool is_tall = 2 * num > SIDE;
  const int8_t* x = start(rows.integers) + t * 2 * stride;
  const int8_t* weight = p.panel<int8_t>(panel, IS_HALF ? 2 : 1);
  std::fill_n(sums, num * PANEL, 0.0f);
  for (int64_t s = 0; s < num_steps; ++s, weight += BYTES) {
    prefetch(weight, BYTES);
    if (IS_HALF) unpack(reinterpret_cast<const uint8_t*>(weight), unpacked);
    const int8_t* numbers = IS_HALF ? unpacked : weight;
    int32_t* product = products[s % 2];
    _tile_loadd(6, numbers, 4 * PANEL);
    _tile_loadd(7, numbers + ROW_BYTES, 4 * PANEL);
    _tile_loadd(4, x + s * DEPTH, stride);
    _tile_zero(0);
    _tile_zero(1);
    _tile_dpbssd(0, 4, 6);
    _tile_dpbssd(1, 4, 7);
    _tile_stored(0, product, 4 * PANEL);
    _tile_stored(1, product + SIDE, 4 * PANEL);
    if (is_tall) {
      _tile_loadd(5, x + SIDE * stride + s * DEPTH, stride);
      _tile_zero(2);
      _tile_zero(3);
      _tile_dpbssd(2, 5, 6);
      _tile_dpbssd(3, 5, 7);
      _tile_stored(2, product + SIDE * PANEL, 4 * PANEL);
      _tile_stored(3, product + SIDE * PANEL + SIDE, 4 * PANEL);
    }
    const int64_t first = (panel * num_steps + s) * PANEL;
    for (int c = 0; c < PANEL; c += LANES) {
      const Vec scale = read(p.scales + first + c);
      const Vec min = IS_HALF ? read(p.mins + first + c) : Vec{};
      for (int r = 0; r < num; ++r) {
        const int64_t at = (t + r) * num_steps + s;
        Mask high, low;
        std::memcpy(&high, product + 2 * r * PANEL + c, sizeof high);
        std::memcpy(&low, product + (2 * r + 1) * PANEL + c, sizeof low);
        Vec sum = __builtin_convertvector(high * 128 + low, Vec) * scale;
        if (IS_HALF) sum += start(rows.sums)[at] * min;
        float* to = sums + r * PANEL + c;
        store(to, load(to) + sum * start(rows.scales)[at]);
      }
    }
  }
}

inline void multiply_panels_of_integers(const Product& p, const Rows& rows, int64_t first,
                                        int64_t last, int64_t begin, int64_t end) {
  thread_local std::vector<float> own;
  float* sums = room(own, 2 * SUMS);
  Shapes shapes;
  for (int64_t panel = first; panel < last; ++panel)
    for (int64_t t = begin; t < end; t += INT_ROWS) {
      const int num = static_cast<int>(std::min<int64_t>(INT_ROWS, end - t));
      set_shapes(shapes, 2 * num, DEPTH);
      for (int64_t part = 0; part < p.num_parts(); ++part) {
        const int64_t number = panel + part * p.num_panels();
        if (p.kind == Kind::i8)
          multiply_integers<Kind::i8>(p, rows, number, t, num, sums + part * SUMS);
        else
          multiply_integers<Kind::i4>(p, rows, number, t, num, sums + part * SUMS);
      }
      put(p, t, num, panel, sums);
    }
}

}  // namespace jpaged::tiles

#endif
