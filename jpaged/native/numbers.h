// Vectors of float32, and the types that numbers are stored in.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace jpaged {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

using Vec = float __attribute__((vector_size(4 * LANES)));
using Mask = int32_t __attribute__((vector_size(4 * LANES)));
using Word = uint32_t __attribute__((vector_size(4 * LANES)));
#define NOINLINE __attribute__((noinline))  // one body, so one arithmetic for all who call it
#define UNROLLED _Pragma("GCC unroll 16")   // sums are to be registers from the start

inline Vec load(const float* from) {
  Vec v;
  std::memcpy(&v, from, sizeof v);
  return v;
}
inline void store(float* to, Vec v) { std::memcpy(to, &v, sizeof v); }
inline Vec splat(float x) { return x - Vec{}; }  // less 0 is itself, -0 too: a mere broadcast
inline Vec select(Mask mask, Vec a, Vec b) { return mask ? a : b; }
inline Vec larger(Vec a, Vec b) { return select(a > b, a, b); }

// --- storage: everything is widened to float32 when it is read ---

enum class DType : int64_t { f32 = 0, bf16 = 1, f16 = 2 };
struct BFloat16 { uint16_t bits; };

inline float widen(float x) { return x; }
inline float widen(_Float16 x) { return static_cast<float>(x); }
inline float widen(BFloat16 x) {
  const uint32_t bits = static_cast<uint32_t>(x.bits) << 16;
  float y;
  std::memcpy(&y, &bits, sizeof y);
  return y;
}
inline void narrow(float x, float* to) { *to = x; }
inline void narrow(float x, _Float16* to) { *to = static_cast<_Float16>(x); }
inline void narrow(float x, BFloat16* to) {  // to the nearest, ties to even
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  to->bits = static_cast<uint16_t>(x != x ? 0x7fc0 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// LANES numbers, as float32.
template <class T>
inline Vec read(const T* from) {
  Vec v;
  for (int i = 0; i < LANES; ++i) v[i] = widen(from[i]);
  return v;
}
inline Vec read(const BFloat16* from) {
  using Half = uint16_t __attribute__((vector_size(2 * LANES)));
  Half bits;
  std::memcpy(&bits, from, sizeof bits);
  const Word wide = __builtin_convertvector(bits, Word) << 16;
  Vec v;
  std::memcpy(&v, &wide, sizeof v);
  return v;
}

#if defined(__F16C__)  // what compilers make of the conversion of one number is slow
inline Vec read(const _Float16* from) {
#if defined(__AVX512F__)
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#else
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#endif
}
#endif

// The first `num` of LANES numbers, or all if there are more; zeros behind.
template <class T>
inline Vec read(const T* from, int64_t num) {
  if (num >= LANES) return read(from);
  Vec v{};
  for (int64_t i = 0; i < num; ++i) v[i] = widen(from[i]);
  return v;
}

// Rounds to a type, as `narrow` does.
template <class T>
inline Vec rounded(Vec v) {
  for (int i = 0; i < LANES; ++i) {
    T narrowed;
    narrow(v[i], &narrowed);
    v[i] = widen(narrowed);
  }
  return v;
}
template <>
inline Vec rounded<float>(Vec v) {
  return v;
}
template <>
inline Vec rounded<BFloat16>(Vec v) {
  Word bits;
  std::memcpy(&bits, &v, sizeof bits);
  bits = (bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000u;
  Vec y;
  std::memcpy(&y, &bits, sizeof y);
  return select(v != v, v, y);
}

// Stores what `rounded` gave.
template <class T>
inline void write(Vec v, T* to) {
  for (int i = 0; i < LANES; ++i) narrow(v[i], to + i);
}
inline void write(Vec v, BFloat16* to) {
  using Half = uint16_t __attribute__((vector_size(2 * LANES)));
  Word bits;
  std::memcpy(&bits, &v, sizeof bits);
  const Half half = __builtin_convertvector(bits >> 16, Half);
  std::memcpy(to, &half, sizeof half);
}
#if defined(__F16C__)
inline void write(Vec v, _Float16* to) {
#if defined(__AVX512F__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to),
                      _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#else
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT));
#endif
}
template <>
inline Vec rounded<_Float16>(Vec v) {
  _Float16 narrowed[LANES];
  write(v, narrowed);
  return read(narrowed);
}
#endif

// Calls f with a null pointer of the type that `dtype` names.
template <class F>
void with_type(DType dtype, F f) {
  if (dtype == DType::f32) f(static_cast<float*>(nullptr));
  if (dtype == DType::bf16) f(static_cast<BFloat16*>(nullptr));
  if (dtype == DType::f16) f(static_cast<_Float16*>(nullptr));
}

// Calls f with `num`, from 1 to Most, as a compile-time constant.
template <int Most, class F>
inline void with_constant(int64_t num, F f) {
  if constexpr (Most > 1) {
    if (num < Most) return with_constant<Most - 1>(num, f);
  }
  f(std::integral_constant<int, Most>{});
}

// The first number of a vector that stands at the beginning of a line of the processor's cache.
template <class T>
T* start(std::vector<T>& of) {
  constexpr uintptr_t LINE = 64;
  const uintptr_t past = reinterpret_cast<uintptr_t>(of.data()) % LINE;
  return of.data() + (LINE - past) % LINE / sizeof(T);
}
template <class T>
const T* start(const std::vector<T>& of) {
  return start(const_cast<std::vector<T>&>(of));
}

// Room for `size` numbers, at `start`, in a vector that grows and stays.
template <class T>
T* room(std::vector<T>& of, int64_t size) {
  const size_t needed = size + 64 / sizeof(T);
  if (of.size() < needed) of.resize(needed);
  return start(of);
}

}  // namespace jpaged
