// Products on the bfloat16 units of a processor with tiles (AMX).

#pragma once

#include <algorithm>

#include "amx.h"
#include "planes.h"

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

inline void clear_sums() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

// Takes rows times some steps of a panel of pairs into the sums. x, weight: their first cut, and from
// cut to cut. asks: for the weights that follow, too.
template <const auto& TERMS>
inline void add_pairs(const uint16_t* x, int64_t x_cut, int64_t stride, const uint16_t* weight,
                      int64_t weight_cut, int64_t num_steps, bool is_tall, bool asks) {
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
}

// [num][PANEL].
inline void store_sums(bool is_tall, float* sums) {
  constexpr int STRIDE = PANEL * 4;
  _tile_stored(0, sums, STRIDE);
  _tile_stored(1, sums + SIDE, STRIDE);
  if (is_tall) {
    _tile_stored(2, sums + SIDE * PANEL, STRIDE);
    _tile_stored(3, sums + SIDE * PANEL + SIDE, STRIDE);
  }
}

// `depth` inputs of a float32 panel as three of pairs. Asks for the weights that follow.
inline void cut_panel(const float* from, int64_t depth, uint16_t* to) {
  const int64_t cut = depth * PANEL;
  const __m512i high_bits = _mm512_set1_epi32(static_cast<int>(0xffff0000u));
  for (int64_t d = 0; d < depth; d += 2, from += PANEL)
    for (int c = 0; c < PANEL; c += LANES, from += LANES, to += 2 * LANES) {
      prefetch(from, 64);
      prefetch(from + PANEL, 64);
      __m512 even = _mm512_loadu_ps(from), odd = _mm512_loadu_ps(from + PANEL);
      for (int i = 0; i < 3; ++i) {
        const __m512i high_even = _mm512_and_si512(_mm512_castps_si512(even), high_bits);
        const __m512i high_odd = _mm512_and_si512(_mm512_castps_si512(odd), high_bits);
        _mm512_store_si512(to + i * cut,
                           _mm512_or_si512(_mm512_srli_epi32(high_even, 16), high_odd));
        even = _mm512_sub_ps(even, _mm512_castsi512_ps(high_even));
        odd = _mm512_sub_ps(odd, _mm512_castsi512_ps(high_odd));
      }
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

// A panel of pairs as it stands in memory.
inline void multiply_paired(const Product& p, const uint16_t* x, int64_t panel, bool is_tall,
                            bool asks, float* sums) {
  clear_sums();
  add_pairs<ONE>(x, 0, p.padded_depth(), p.panel<uint16_t>(panel), 0, p.num_steps(), is_tall, asks);
  store_sums(is_tall, sums);
}

// A float32 panel that was cut.
inline void multiply_cut(const Product& p, const uint16_t* x, const uint16_t* weight, bool is_tall,
                         float* sums) {
  const int64_t stride = p.padded_depth();
  clear_sums();
  add_pairs<SIX>(x, p.T * stride, stride, weight, stride * PANEL, p.num_steps(), is_tall, false);
  store_sums(is_tall, sums);
}

constexpr int CUT_STEPS = 4;  // whose cuts stay in the first cache

// A float32 panel that is cut while it is multiplied.
inline void multiply_cutting(const Product& p, const uint16_t* x, int64_t panel, bool is_tall,
                             float* sums) {
  constexpr int64_t MOST = CUT_STEPS * DEPTH;
  alignas(64) static thread_local uint16_t cuts[3 * MOST * PANEL];
  const int64_t stride = p.padded_depth();
  const float* weight = p.panel<float>(panel);
  clear_sums();
  for (int64_t d = 0; d < stride; d += MOST) {
    const int64_t depth = std::min(MOST, stride - d);
    cut_panel(weight + d * PANEL, depth, cuts);
    add_pairs<SIX>(x + d, p.T * stride, stride, cuts, depth * PANEL, depth / DEPTH, is_tall, false);
  }
  store_sums(is_tall, sums);
}

inline void multiply_panels(const Product& p, const Rows& rows, int64_t first, int64_t last,
                            int64_t begin, int64_t end) {
  thread_local std::vector<uint16_t> own;
  const int64_t stride = p.padded_depth(), size = 3 * stride * PANEL;
  const bool is_paired = p.kind == Kind::bf16, is_cut = !is_paired && end - begin > BLOCK;
  const uint16_t* x = planes::first(p, rows);
  uint16_t* cuts = room(own, is_cut ? 2 * size : 0);
  Shapes shapes;
  Waiting waiting(p);
  for (int64_t panel = first; panel < last; ++panel) {
    const auto number = [&](int64_t part) { return panel + part * p.num_panels(); };
    for (int64_t part = 0; part < p.num_parts() && is_cut; ++part)
      cut_panel(p.panel<float>(number(part)), stride, cuts + part * size);
    for (int64_t t = begin; t < end; t += BLOCK) {
      const int num = static_cast<int>(std::min<int64_t>(BLOCK, end - t));
      const bool is_tall = num > SIDE;
      set_shapes(shapes, num, DEPTH * 2);
      for (int64_t part = 0; part < p.num_parts(); ++part) {
        float* sums = waiting.next() + part * SUMS;
        if (is_paired)
          multiply_paired(p, x + t * stride, number(part), is_tall, t == begin, sums);
        else if (is_cut)
          multiply_cut(p, x + t * stride, cuts + part * size, is_tall, sums);
        else
          multiply_cutting(p, x + t * stride, number(part), is_tall, sums);
      }
      waiting.add(t, num, panel);
    }
  }
}

}  // namespace jpaged::tiles

#endif
