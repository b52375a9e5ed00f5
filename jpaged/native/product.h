// A product of rows with a packed weight: how the weight is stored, what its rows are made of, and
// where its results go.

#pragma once

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#include "functions.h"
#include "norm.h"

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

// What makes a row of x's.
enum class Making : int64_t {
  nothing = 0,
  rms_norm = 1,         // rounded, then times the norm's weight
  offset_rms_norm = 2,  // times 1 + the norm's weight, then rounded
};

// What becomes of the products with a weight of F gates and, behind them, F ups.
enum class Gating : int64_t {
  none = 0,  // it is no such weight
  silu = 1,  // silu(gate) * up
  gelu_tanh = 2,
};

struct Product {
  const void* x;           // [T D]
  const void* weight;      // [panels, PANEL * padded D], by kind
  const _Float16* scales;  // [panels, steps, PANEL], of i8 and i4
  const _Float16* mins;    // the same, of i4: a weight is number * scale + min
  const void* norm;        // [D], of x's type: the norm's weight
  const void* residual;    // [T F], of out's type, to be added to the product; or null
  void* out;               // [T F]
  int64_t T, D, F;
  DType x_dtype, out_dtype;
  Kind kind;
  Making making;
  Gating gating;           // F is a multiple of PANEL then
  float eps;               // of the norm

  int64_t num_panels() const { return (F + PANEL - 1) / PANEL; }  // of results
  int64_t num_parts() const { return gating == Gating::none ? 1 : 2; }  // of the weight
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

// Row t as float32, zeros behind it.
inline void make_row(const Product& p, int64_t t, float* to) {
  std::fill(to + p.D / LANES * LANES, to + p.padded_depth(), 0.0f);
  with_type(p.x_dtype, [&](auto* type) {
    const auto* x = static_cast<decltype(type)>(const_cast<void*>(p.x));
    x += t * p.D;
    if (p.making != Making::nothing) {
      const auto* weight = static_cast<decltype(x)>(p.norm);
      return rms_norm(x, weight, p.D, p.eps, p.making == Making::offset_rms_norm, to);
    }
    for (int64_t d = 0; d < p.D; d += LANES) store(to + d, read(x + d, p.D - d));
  });
}

constexpr int64_t STREAMED = 1 << 20;  // bytes of results, from which they do not stay in the cache

// Writes a panel's row past the cache: it is read again when the cache holds something else.
template <class T>
inline void stream(const T (&row)[PANEL], T* to) {
#if defined(__AVX512F__)
  for (size_t i = 0; i < sizeof row / 64; ++i)
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to) + i,
                        _mm512_load_si512(reinterpret_cast<const char*>(row) + 64 * i));
#else
  std::memcpy(to, row, sizeof row);
#endif
}

constexpr int SUMS = BLOCK * PANEL;  // of a block of rows with a panel

// activation(gate) * up.
template <class T>
inline Vec gate(const Product& p, Vec gate, Vec up) {
  return rounded<T>((p.gating == Gating::silu ? silu(gate) : gelu_tanh(gate)) * up);
}

// Sums [num][PANEL] of rows with a panel go to their place in the result; those with a panel of ups
// stand SUMS behind those with its gates.
inline void put(const Product& p, int64_t t, int64_t num, int64_t panel, const float* sums) {
  const int64_t first = panel * PANEL, width = std::min<int64_t>(PANEL, p.F - first);
  with_type(p.out_dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    T* to = static_cast<T*>(p.out) + t * p.F + first;
    const T* residual = static_cast<const T*>(p.residual);
    if (residual != nullptr) residual += t * p.F + first;
    const bool streams = static_cast<int64_t>(p.T * p.F * sizeof(T)) >= STREAMED &&
                         reinterpret_cast<uintptr_t>(to) % 64 == 0 && p.F * sizeof(T) % 64 == 0;
    for (int64_t r = 0; r < num; ++r, sums += PANEL, to += p.F) {
      alignas(64) T row[PANEL];
      for (int c = 0; c < PANEL; c += LANES) {
        Vec sum = rounded<T>(load(sums + c));
        if (p.gating != Gating::none) sum = gate<T>(p, sum, rounded<T>(load(sums + SUMS + c)));
        if (residual != nullptr) sum = rounded<T>(read(residual + c, width - c) + sum);
        write(sum, row + c);
      }
      if (residual != nullptr) residual += p.F;
      if (width < PANEL)
        std::copy_n(row, width, to);
      else if (streams)
        stream(row, to);
      else
        std::memcpy(to, row, sizeof row);
    }
  });
}

}  // namespace jpaged
