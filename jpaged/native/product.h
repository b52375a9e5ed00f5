// A product of rows with a packed weight: how the weight is stored, and its rows and results.

#pragma once

#include "numbers.h"

namespace jpaged {

constexpr int PANEL = 32;       // outputs of a panel
constexpr int DEPTH = 32;       // inputs of a step, and the group of a quantized weight
constexpr int BLOCK = 32;       // rows that are multiplied together

// How a panel is stored, c being an output and d an input; the numbers stand in `packed` as well.
enum class Kind : int64_t {
  f32 = 0,   // [d][c]
  bf16 = 1,  // [d/2][c][d%2]
  f16 = 2,   // [d][c]
  i8 = 3,    // [d/4][c][d%4]
  i4 = 4,    // [d/8][c][d%4]: the low half of a byte is the input d with d/4%2 == 0
};

struct Product {
  const void* x;           // [T D]
  const void* weight;      // [panels, PANEL * padded D], by kind
  const _Float16* scales;  // [panels, steps, PANEL], of i8 and i4
  const _Float16* mins;    // the same, of i4: a weight is number * scale + min
  void* out;               // [T F]
  int64_t T, D, F;
  DType x_dtype, out_dtype;
  Kind kind;

  int64_t num_panels() const { return (F + PANEL - 1) / PANEL; }
  int64_t num_steps() const { return (D + DEPTH - 1) / DEPTH; }
  int64_t padded_depth() const { return num_steps() * DEPTH; }
  template <class W>
  const W* panel(int64_t i, int per_number = 1) const {
    return static_cast<const W*>(weight) + i * padded_depth() * PANEL / per_number;
  }
};

// The rows, made ready for multiplication once for all panels.
struct Rows {
  std::vector<float> numbers;       // [T, padded D]
  std::vector<uint16_t> planes;     // [3, T, padded D]: bits of bfloat16
  std::vector<int8_t> integers;     // [2, T, padded D]: high parts, low parts
  std::vector<float> scales, sums;  // [T, steps]: of the integers, and theirs
};

// A row as float32, zeros behind it.
inline void widen_row(const Product& p, int64_t t, float* to) {
  with_type(p.x_dtype, [&](auto* type) {
    const auto* from = static_cast<decltype(type)>(const_cast<void*>(p.x)) + t * p.D;
    for (int64_t d = 0; d < p.D; ++d) to[d] = widen(from[d]);
  });
  std::fill(to + p.D, to + p.padded_depth(), 0.0f);
}

// Sums [num][PANEL] of rows with a panel go to their place in the result.
inline void put(const Product& p, int64_t t, int64_t num, int64_t panel, const float* sums) {
  const int64_t first = panel * PANEL, width = std::min<int64_t>(PANEL, p.F - first);
  with_type(p.out_dtype, [&](auto* type) {
    auto* to = static_cast<decltype(type)>(p.out) + t * p.F + first;
    for (int64_t r = 0; r < num; ++r, sums += PANEL, to += p.F) {
      if (width == PANEL)  // a length the compiler knows
        for (int c = 0; c < PANEL; ++c) narrow(sums[c], to + c);
      else
        for (int c = 0; c < width; ++c) narrow(sums[c], to + c);
    }
  });
}

}  // namespace jpaged
