// Products on the bfloat16 units of a processor with tiles (AMX).

#pragma once

#include <algorithm>

#include "amx.h"
#include "product.h"

#if HAS_TILES

namespace jpaged::tiles {

constexpr int PREFETCH = 8192;  // bytes ahead of the weights being read

// Shapes for sums of `num` rows in tiles 0 to 3, rows of `x_bytes` in 4 and 5, weights in 6 and 7.
inline void set_shapes(Shapes& shapes, int num, int x_bytes) {
  const auto upper = static_cast<uint8_t>(std::min(num, SIDE));
  const auto lower = static_cast<uint8_t>(std::max(num - SIDE, 1));
  const auto bytes = static_cast<uint8_t>(x_bytes), full = static_cast<uint8_t>(ROW_BYTES);
  const auto depth = static_cast<uint8_t>(x_bytes / 4);  // a weight's row: four bytes an output
  shapes.set({upper, upper, lower, lower, upper, lower, depth, depth},
             {full, full, full, full, bytes, bytes, full, full});
}

inline void prefetch(const void* from, int64_t bytes) {
  for (int64_t at = 0; at < bytes; at += 64)
    _mm_prefetch(static_cast<const char*>(from) + PREFETCH + at, _MM_HINT_T0);
}

// Which cuts of rows and weights are multiplied, the smallest first.
struct Term { int x, weight; };
constexpr Term ONE[] = {{0, 0}}, SIX[] = {{0, 2}, {1, 1}, {0, 1}, {2, 0}, {1, 0}, {0, 0}};

// sums[num][PANEL] = rows times a panel of pairs. x, weight: their first cut, and from cut to cut.
// asks: for the weights that follow, too.
template <const auto& TERMS>
void multiply_pairs(const uint16_t* x, int64_t x_cut, int64_t stride, const uint16_t* weight,
                    int64_t weight_cut, int64_t num_steps, int num, bool asks, float* sums) {
  const bool is_tall = num > SIDE;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t s = 0; s < num_steps; ++s) {
    int x_loaded = -1, weight_loaded = -1;
#pragma GCC unroll 6
    for (const Term term : TERMS) {
      const uint16_t* a = x + term.x * x_cut + s * DEPTH;
      const uint16_t* b = weight + term.weight * weight_cut + s * DEPTH * PANEL;
      if (weight_loaded != term.weight) _tile_loadd(6, b, 2 * ROW_BYTES);
      if (x_loaded != term.x) _tile_loadd(4, a, stride * 2);
      _tile_dpbf16ps(0, 4, 6);
      if (weight_loaded != term.weight) {
        _tile_loadd(7, b + DEPTH, 2 * ROW_BYTES);
        if (asks) prefetch(b, DEPTH * PANEL * 2);
      }
      _tile_dpbf16ps(1, 4, 7);
      if (is_tall) {
        if (x_loaded != term.x) _tile_loadd(5, a + SIDE * stride, stride * 2);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
      x_loaded = term.x, weight_loaded = term.weight;
    }
  }
  constexpr int STRIDE = PANEL * 4;
  _tile_stored(0, sums, STRIDE);
  _tile_stored(1, sums + SIDE, STRIDE);
  if (is_tall) {
    _tile_stored(2, sums + SIDE * PANEL, STRIDE);
    _tile_stored(3, sums + SIDE * PANEL + SIDE, STRIDE);
  }
}

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

// Whether the rows are as tiles want them.
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

// A float32 panel as three of pairs.
inline void cut_panel(const float* from, int64_t depth, uint16_t* to) {
  const int64_t cut = depth * PANEL;
  for (int64_t d = 0; d < depth; d += 2, from += 2 * PANEL, to += 2 * PANEL)
    for (int c = 0; c < PANEL; ++c)
      for (int i = 0; i < 2; ++i) {
        const float first = from[i * PANEL + c], second = first - high_part(first);
        to[2 * c + i] = static_cast<uint16_t>(bits_of(first) >> 16);
        to[cut + 2 * c + i] = static_cast<uint16_t>(bits_of(second) >> 16);
        to[2 * cut + 2 * c + i] = static_cast<uint16_t>(bits_of(second - high_part(second)) >> 16);
      }
}

// Sums wait for the next ones before they are put in their place: reading tiles right after they were
// stored would wait.
class Waiting {
 public:
  explicit Waiting(const Product& p) : p_(p), sums_{room(rooms_[0]), room(rooms_[1])} {}
  ~Waiting() { put_last(); }
  // Where the next sums go.
  float* next() { return sums_[turn_]; }
  // They are there.
  void add(int64_t t, int num, int64_t panel) {
    put_last();
    t_ = t, num_ = num, panel_ = panel, turn_ = 1 - turn_;
  }

 private:
  static float* room(std::vector<float>& of) { return jpaged::room(of, 2 * SUMS); }
  void put_last() {
    if (num_ > 0) put(p_, t_, num_, panel_, sums_[1 - turn_]);
  }

  static thread_local std::vector<float> rooms_[2];
  const Product& p_;
  float* sums_[2];
  int64_t t_ = 0, panel_ = 0;
  int num_ = 0, turn_ = 0;
};
inline thread_local std::vector<float> Waiting::rooms_[2];

inline void multiply_panels(const Product& p, const Rows& rows, int64_t first, int64_t last,
                            int64_t begin, int64_t end) {
  thread_local std::vector<uint16_t> cuts;
  const int64_t stride = p.padded_depth(), size = stride * PANEL, steps = p.num_steps();
  const bool is_single = p.kind == Kind::bf16;
  const auto* x = are_ready(p) ? static_cast<const uint16_t*>(p.x) : start(rows.planes);
  Shapes shapes;
  Waiting waiting(p);
  for (int64_t panel = first; panel < last; ++panel) {
    const auto number = [&](int64_t part) { return panel + part * p.num_panels(); };
    for (int64_t part = 0; part < p.num_parts() && !is_single; ++part)
      cut_panel(p.panel<float>(number(part)), stride, room(cuts, 6 * size) + 3 * part * size);
    for (int64_t t = begin; t < end; t += BLOCK) {
      const int num = static_cast<int>(std::min<int64_t>(BLOCK, end - t));
      const uint16_t* from = x + t * stride;
      set_shapes(shapes, num, DEPTH * 2);
      for (int64_t part = 0; part < p.num_parts(); ++part) {
        float* sums = waiting.next() + part * SUMS;
        if (is_single)
          multiply_pairs<ONE>(from, 0, stride, p.panel<uint16_t>(number(part)), 0, steps, num,
                              t == begin, sums);
        else
          multiply_pairs<SIX>(from, p.T * stride, stride, start(cuts) + 3 * part * size, size, steps,
                              num, false, sums);
      }
      waiting.add(t, num, panel);
    }
  }
}

}  // namespace jpaged::tiles

#endif
