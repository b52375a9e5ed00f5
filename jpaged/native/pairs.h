// Pairs of bfloat16, multiplied and summed in float32 as processors with AVX512-BF16 do it.

#pragma once

#include "numbers.h"

// JPAGED_NO_PAIRS: for tests of the other form, on a processor that has them.
#if defined(__AVX512BF16__) && defined(__AVX512BW__) && !defined(JPAGED_NO_PAIRS)
#include <immintrin.h>
#define HAS_PAIRS 1
#else
#define HAS_PAIRS 0
#endif

#if HAS_PAIRS

namespace jpaged::pairs {

constexpr int SIDE = 16;   // pairs of a vector, and float32 sums
constexpr int DEPTH = 32;  // numbers of a vector

// Rows of which the registers hold the sums, when each has U vectors of them.
template <int U>
constexpr int MAX_ROWS = U > 3 ? 4 : 8;

constexpr int AHEAD = 4096;  // numbers, by which weights are asked for before they are read

// One word for all.
inline __m512bh pair_of(const uint16_t* from) {
  int32_t pair;
  std::memcpy(&pair, from, sizeof pair);
  return (__m512bh)_mm512_set1_epi32(pair);
}

// sums[r][U vectors] get `num_pairs` of each of R rows times as many rows of pairs of y; strides are in
// numbers. Adds: to what they are. Asks: for the y that follow.
template <int R, int U, bool Adds, bool Asks>
NOINLINE void multiply(const uint16_t* x, int64_t x_stride, const uint16_t* y, int64_t y_stride,
                       int64_t num_pairs, float* sums, int64_t stride) {
  __m512 sum[R][U];
  UNROLLED for (int r = 0; r < R; ++r)
    UNROLLED for (int u = 0; u < U; ++u)
      sum[r][u] = Adds ? _mm512_loadu_ps(sums + r * stride + u * SIDE) : _mm512_setzero_ps();
  for (int64_t i = 0; i < num_pairs; ++i, y += y_stride) {
    __m512bh other[U];
    UNROLLED for (int u = 0; u < U; ++u) {
      other[u] = (__m512bh)_mm512_loadu_si512(y + u * DEPTH);
      if (Asks) _mm_prefetch(y + u * DEPTH + AHEAD, _MM_HINT_T0);
    }
    UNROLLED for (int r = 0; r < R; ++r) {
      const __m512bh all = pair_of(x + r * x_stride + 2 * i);
      UNROLLED for (int u = 0; u < U; ++u) sum[r][u] = _mm512_dpbf16_ps(sum[r][u], all, other[u]);
    }
  }
  UNROLLED for (int r = 0; r < R; ++r)
    UNROLLED for (int u = 0; u < U; ++u) _mm512_storeu_ps(sums + r * stride + u * SIDE, sum[r][u]);
}

// The same for any number of rows.
template <int U, bool Adds, bool Asks = false>
inline void multiply_rows(int64_t num, const uint16_t* x, int64_t x_stride, const uint16_t* y,
                          int64_t y_stride, int64_t num_pairs, float* sums, int64_t stride) {
  for (int64_t r = 0; r < num; r += MAX_ROWS<U>)
    with_constant<MAX_ROWS<U>>(num - r, [&](auto R) {
      multiply<R(), U, Adds, Asks>(x + r * x_stride, x_stride, y, y_stride, num_pairs,
                                   sums + r * stride, stride);
    });
}

}  // namespace jpaged::pairs

#endif
