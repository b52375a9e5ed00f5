// Products as float32 vectors, for any processor and every kind of weight.

#pragma once

#include "product.h"

namespace jpaged {

namespace vectors {

constexpr int WIDTH = PANEL / LANES;  // vectors of a panel's outputs
// Vectors of sums that the registers hold, beside the numbers they are made of.
#if defined(__AVX512F__)
constexpr int MAX_SUMS = 16;
#elif defined(__aarch64__)
constexpr int MAX_SUMS = 24;
#else
constexpr int MAX_SUMS = 12;
#endif
constexpr int MAX_ROWS = LANES == 16 ? 8 : 6;
constexpr int CHUNK = 128;  // inputs of a panel that stay in the nearest cache; whole steps

inline void reserve(const Product& p, Rows& rows) { room(rows.numbers, p.T * p.padded_depth()); }

inline void make_ready(const Product& p, Rows& rows, int64_t t) {
  make_row(p, t, start(rows.numbers) + t * p.padded_depth());
}

// Vectors of a panel that R rows take at a time.
constexpr int width_for(int R) {
  int width = WIDTH;
  while (width * R > MAX_SUMS) width /= 2;
  return width;
}

// sums[r][PANEL] += x[r] times `depth` inputs of a panel, for R rows.
template <int R>
NOINLINE void multiply(const float* x, int64_t stride, const float* panel, int64_t depth,
                       float* sums) {
  constexpr int W = width_for(R);
  for (int c = 0; c < PANEL; c += W * LANES) {
    Vec sum[R][W];
    for (int r = 0; r < R; ++r)
      for (int w = 0; w < W; ++w) sum[r][w] = load(sums + r * PANEL + c + w * LANES);
    for (int64_t d = 0; d < depth; ++d) {
      Vec weight[W];
      for (int w = 0; w < W; ++w) weight[w] = load(panel + d * PANEL + c + w * LANES);
      for (int r = 0; r < R; ++r)
        for (int w = 0; w < W; ++w) sum[r][w] += x[r * stride + d] * weight[w];
    }
    for (int r = 0; r < R; ++r)
      for (int w = 0; w < W; ++w) store(sums + r * PANEL + c + w * LANES, sum[r][w]);
  }
}

template <int R = MAX_ROWS>
void multiply_all(int64_t num, const float* x, int64_t stride, const float* panel, int64_t depth,
                  float* sums) {
  for (; num >= R; num -= R, x += R * stride, sums += R * PANEL)
    multiply<R>(x, stride, panel, depth, sums);
  if constexpr (R > 1) {
    if (num > 0) multiply_all<(R + 1) / 2>(num, x, stride, panel, depth, sums);
  }
}

// --- panels as float32 [d][PANEL]; from: where their first input stands ---

inline Word load_words(const void* from) {
  Word words;
  std::memcpy(&words, from, sizeof words);
  return words;
}
inline Vec to_floats(Mask numbers) { return __builtin_convertvector(numbers, Vec); }

inline void widen_panel(const _Float16* from, int64_t depth, float* to) {
  for (int64_t i = 0; i < depth * PANEL; i += LANES) store(to + i, read(from + i));
}

inline void widen_panel(const BFloat16* from, int64_t depth, float* to) {
  for (int64_t d = 0; d < depth; d += 2)
    for (int c = 0; c < PANEL; c += LANES) {
      const Word pairs = load_words(from + d * PANEL + 2 * c);
      store(to + d * PANEL + c, (Vec)(pairs << 16));
      store(to + (d + 1) * PANEL + c, (Vec)(pairs & 0xffff0000u));
    }
}

inline void widen_panel(const int8_t* from, const _Float16* scales, int64_t depth, float* to) {
  for (int64_t s = 0; s < depth; s += DEPTH, scales += PANEL)
    for (int c = 0; c < PANEL; c += LANES) {
      const Vec scale = read(scales + c);
      for (int64_t d = s; d < s + DEPTH; d += 4) {
        const Word fours = load_words(from + d * PANEL + 4 * c);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
          const Mask number = (Mask)(fours << (24 - 8 * i)) >> 24;
          store(to + (d + i) * PANEL + c, to_floats(number) * scale);
        }
      }
    }
}

inline void widen_panel(const uint8_t* from, const _Float16* scales, const _Float16* mins,
                        int64_t depth, float* to) {
  for (int64_t s = 0; s < depth; s += DEPTH, scales += PANEL, mins += PANEL)
    for (int c = 0; c < PANEL; c += LANES) {
      const Vec scale = read(scales + c), min = read(mins + c);
      for (int64_t d = s; d < s + DEPTH; d += 8) {
        const Word eights = load_words(from + d / 2 * PANEL + 4 * c);
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) {
          const Mask number = (Mask)(eights >> (8 * (i % 4) + i / 4 * 4) & 15);
          store(to + (d + i) * PANEL + c, to_floats(number) * scale + min);
        }
      }
    }
}

// `depth` inputs of a panel from the first-th on; whole steps.
inline const float* widen_panel(const Product& p, int64_t panel, int64_t first, int64_t depth,
                                float* to) {
  const int64_t at = first * PANEL, group = (panel * p.num_steps() + first / DEPTH) * PANEL;
  switch (p.kind) {
    case Kind::f32: return p.panel<float>(panel) + at;
    case Kind::f16: widen_panel(p.panel<_Float16>(panel) + at, depth, to); break;
    case Kind::bf16: widen_panel(p.panel<BFloat16>(panel) + at, depth, to); break;
    case Kind::i8: widen_panel(p.panel<int8_t>(panel) + at, p.scales + group, depth, to); break;
    case Kind::i4:
      widen_panel(p.panel<uint8_t>(panel, 2) + at / 2, p.scales + group, p.mins + group, depth, to);
      break;
  }
  return to;
}

// The panel's part of the sums of the rows from `begin` to `end`, by blocks: a block's part stands
// SUMS behind the part before.
inline void add_panel(const Product& p, const Rows& rows, int64_t panel, int64_t begin, int64_t end,
                      float* sums) {
  thread_local std::vector<float> own;
  float* scratch = room(own, CHUNK * PANEL);
  const int64_t stride = p.padded_depth();
  for (int64_t d = 0; d < stride; d += CHUNK) {
    const int64_t depth = std::min<int64_t>(CHUNK, stride - d);
    const float* weights = widen_panel(p, panel, d, depth, scratch);
    float* to = sums;
    for (int64_t t = begin; t < end; t += BLOCK, to += p.num_parts() * SUMS)
      multiply_all(std::min<int64_t>(BLOCK, end - t), start(rows.numbers) + t * stride + d, stride,
                   weights, depth, to);
  }
}

inline void multiply_panels(const Product& p, const Rows& rows, int64_t first, int64_t last,
                            int64_t begin, int64_t end) {
  thread_local std::vector<float> own;
  const int64_t block = p.num_parts() * SUMS, num = (end - begin + BLOCK - 1) / BLOCK * block;
  float* sums = room(own, num);
  for (int64_t panel = first; panel < last; ++panel) {
    std::fill(sums, sums + num, 0.0f);
    for (int64_t part = 0; part < p.num_parts(); ++part)
      add_panel(p, rows, panel + part * p.num_panels(), begin, end, sums + part * SUMS);
    for (int64_t t = begin; t < end; t += BLOCK)
      put(p, t, std::min<int64_t>(BLOCK, end - t), panel, sums + (t - begin) / BLOCK * block);
  }
}

}  // namespace vectors

}  // namespace jpaged
