// Keys turned for products with vectors: each vector has a number of LANES keys.

#pragma once

#include <type_traits>
#include <utility>

#include "attention.h"

namespace jpaged::vectors {

constexpr int UNROLL = 4;               // vectors a row has in registers
constexpr int PANEL = UNROLL * LANES;   // keys, or columns of values, that a row meets at once
static_assert(TILE % PANEL == 0);

using Quad = float __attribute__((vector_size(16)));
using Oct = float __attribute__((vector_size(32)));

// Columns of keys that are turned at once: of four words.
template <class KV>
constexpr int CHUNK = std::is_same_v<KV, BFloat16> ? 8 : 4;

// A panel's rows are these, and some that nobody reads.
inline int64_t panel_depth(int64_t C) { return (C + 7) / 8 * 8; }

inline Quad read_words(const void* from) {
  Quad words;
  std::memcpy(&words, from, sizeof words);
  return words;
}
inline Quad read_quad(const float* from) { return read_words(from); }
inline Quad read_quad(const BFloat16* from) { return read_words(from); }  // pairs
inline Quad read_quad(const _Float16* from) {
#if defined(__F16C__)
  return _mm_cvtph_ps(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
#endif
  return Quad{widen(from[0]), widen(from[1]), widen(from[2]), widen(from[3])};
}

// As many quads side by side as a vector takes.
template <class V>
inline V side_by_side(const Quad* of) {
  if constexpr (sizeof(V) == sizeof(Quad)) {
    return of[0];
  } else {
    const Oct low = __builtin_shufflevector(of[0], of[1], 0, 1, 2, 3, 4, 5, 6, 7);
    if constexpr (sizeof(V) == sizeof(Oct)) {
      return low;
    } else {
      const Oct high = side_by_side<Oct>(of + 2);
      return __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14,
                                     15);
    }
  }
}

// Of each quad of a and of b, the numbers `First` and the next: in turns, or a's before b's.
template <int First, int... I>
inline Vec in_turns(Vec a, Vec b, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(a, b, (I / 4 * 4 + First + I % 4 / 2 + I % 2 * LANES)...);
}
template <int First, int... I>
inline Vec in_pairs(Vec a, Vec b, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(a, b, (I / 4 * 4 + First + I % 2 + I % 4 / 2 * LANES)...);
}

// Turns four words of each of LANES rows: word i of all of them becomes a vector.
template <class KV>
inline void turn(const KV* const* rows, int64_t c, Vec (&to)[4]) {
  constexpr std::make_integer_sequence<int, LANES> lanes{};
  Vec row[4];  // rows i, 4 + i, ...
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    Quad quads[LANES / 4];
#pragma GCC unroll 4
    for (int j = 0; j < LANES / 4; ++j) quads[j] = read_quad(rows[4 * j + i] + c);
    row[i] = side_by_side<Vec>(quads);
  }
  const Vec low = in_turns<0>(row[0], row[1], lanes), high = in_turns<2>(row[0], row[1], lanes);
  const Vec other_low = in_turns<0>(row[2], row[3], lanes);
  const Vec other_high = in_turns<2>(row[2], row[3], lanes);
  to[0] = in_pairs<0>(low, other_low, lanes), to[1] = in_pairs<2>(low, other_low, lanes);
  to[2] = in_pairs<0>(high, other_high, lanes), to[3] = in_pairs<2>(high, other_high, lanes);
}

// CHUNK columns of LANES rows into a panel, as float32.
template <class KV>
inline void turn_chunk(const KV* const* rows, int64_t c, float* to) {
  Vec words[4];
  turn(rows, c, words);
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    if constexpr (std::is_same_v<KV, BFloat16>) {
      Word pair;
      std::memcpy(&pair, &words[i], sizeof pair);
      const Word first = pair << 16, second = pair & 0xffff0000u;
      std::memcpy(to + 2 * i * PANEL, &first, sizeof first);
      std::memcpy(to + (2 * i + 1) * PANEL, &second, sizeof second);
    } else {
      store(to + i * PANEL, words[i]);
    }
  }
}

// LANES rows of C into a panel.
template <class KV>
inline void turn_rows(const KV* const* rows, int64_t C, float* to) {
  constexpr int WIDTH = CHUNK<KV>;
  int64_t c = 0;
  for (; c + WIDTH <= C; c += WIDTH) turn_chunk(rows, c, to + c * PANEL);
  if (c == C) return;
  KV rest[LANES][WIDTH] = {};
  const KV* copies[LANES];
  for (int i = 0; i < LANES; ++i)
    copies[i] = std::copy_n(rows[i] + c, C - c, rest[i]) - (C - c);
  turn_chunk(copies, 0, to + c * PANEL);
}

// A tile's keys, as panels: [TILE / PANEL][depth][PANEL]. Those not live are anything.
template <class KV>
void pack_keys(const Places& places, const KV* pool, int64_t C, float* to) {
  const int64_t depth = panel_depth(C);
  for (int key = 0; key < TILE; key += LANES) {
    const KV* rows[LANES];
    for (int i = 0; i < LANES; ++i) rows[i] = pool + places.at[key + i];
    turn_rows(rows, C, to + key / PANEL * PANEL * depth + key % PANEL);
  }
}

}  // namespace jpaged::vectors
