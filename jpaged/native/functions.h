// Functions of vectors of float32.

#pragma once

#include "numbers.h"

#if defined(__AVX512DQ__)
#include <immintrin.h>
#endif

namespace jpaged {

// exp, within 2 ulp; 0 below -87, NaN for NaN.
inline Vec exp(Vec x) {
  const Vec shift = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
  const Vec shifted = x * 1.44269504f + shift;
  const Vec n = shifted - shift;
  const Vec r = (x - n * 0.693145752f) - n * 1.42860677e-6f;
  Vec p = splat(1.0f / 5040);
  for (float c : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) p = p * r + c;
  Word power;  // the whole number stands in the low bits of `shifted`
  std::memcpy(&power, &shifted, sizeof power);
  power = (power << 23) + (127 << 23);
  Vec two_to_n;
  std::memcpy(&two_to_n, &power, sizeof power);
  return select(x < -87.0f, Vec{}, p * two_to_n);
}

// 2 to the x, within 2.5 ulp; exactly 1 for 0, 0 or denormal below -126, NaN for NaN. The polynomial,
// for the part of x above a whole number, has the least error (1 ulp) with these terms and constant 1.
inline Vec exp2(Vec x) {
#if defined(__AVX512DQ__)
  constexpr int DOWN = 1, QUIETLY = 8;
  const Vec r = _mm512_reduce_ps(x, DOWN + QUIETLY);  // x less the whole number below
#else
  const Vec shift = splat(12582912.0f);  // as in exp
  const Vec shifted = (x - 0.5f) + shift;
  const Vec r = x - (shifted - shift);
#endif
  Vec p = splat(0.00188530108f);
  for (float c : {0.00897337217f, 0.0558359213f, 0.240152791f, 0.693152487f, 1.0f}) p = p * r + c;
#if defined(__AVX512DQ__)
  return _mm512_scalef_ps(p, x);
#else
  Word power;
  std::memcpy(&power, &shifted, sizeof power);
  power = (power << 23) + (127 << 23);
  Vec two_to_n;
  std::memcpy(&two_to_n, &power, sizeof power);
  return select(x < -126.0f, Vec{}, p * two_to_n);
#endif
}

// tanh, to about 1e-7 of 1. Beyond 20 it is 1.
inline Vec tanh(Vec x) {
  x = select(x > 20.0f, splat(20.0f), select(x < -20.0f, splat(-20.0f), x));
  return 1.0f - 2.0f / (exp(x * 2.0f) + 1.0f);
}

// sqrt(2 / pi) and the cubic part of the usual approximation.
inline Vec gelu_tanh(Vec x) {
  return 0.5f * x * (1.0f + tanh(0.797884561f * (x + 0.044715f * x * x * x)));
}

inline Vec silu(Vec x) {
  const Vec y = select(x < -87.0f, splat(87.0f), -x);  // exp is defined up to 88
  return x / (1.0f + exp(y));
}

}  // namespace jpaged
