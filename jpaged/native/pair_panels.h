// A tile's keys and values turned into pairs: of neighbouring numbers of a key, and of neighbouring keys'
// values.

#pragma once

#include "attention.h"
#include "pairs.h"

#if HAS_PAIRS

namespace jpaged::pairs {

// DEPTH numbers of a row, from the c-th; zeros behind its end.
inline __m512i load_row(const uint16_t* row, int64_t c, int64_t C) {
  const int64_t left = C - c;
  const __mmask32 mask = left >= DEPTH ? 0xffffffffu : (1u << left) - 1;
  return _mm512_maskz_loadu_epi16(mask, row + c);
}

// What is asked for while a tile is read, keys with keys and values with values: the next tile, line by
// line as it lies in memory. A head has its share of the lines.
struct Ahead {
  const uint16_t* pool;
  const int64_t* lines;  // where in the pool they begin

  void ask(int64_t i) const { _mm_prefetch(pool + lines[i], _MM_HINT_T1); }
};

// A tile's rows in a pool.
struct Rows {
  const Places& places;
  const uint16_t* pool;
  int64_t C;
  Ahead ahead;

  // Whether all of the tile's vectors can be read as they stand.
  bool are_whole() const { return places.begin == 0 && places.end == TILE && C % DEPTH == 0; }
  // DEPTH numbers of a row, from the c-th; zeros behind its end, and where it is not live.
  template <bool is_whole>
  __m512i load(int key, int64_t c) const {
    if (is_whole) return _mm512_loadu_si512(pool + places.at[key] + c);
    return places.has(key) ? load_row(pool + places.at[key], c, C) : _mm512_setzero_si512();
  }
};

// Transposes 16 vectors of 16 words.
inline void transpose(__m512i (&a)[SIDE]) {
  const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
  UNROLLED for (int step = 0; step < 4; ++step) {  // a perfect shuffle of the rows
    __m512i b[SIDE];
    UNROLLED for (int i = 0; i < SIDE / 2; ++i) {
      b[2 * i] = _mm512_permutex2var_epi32(a[i], low, a[i + SIDE / 2]);
      b[2 * i + 1] = _mm512_permutex2var_epi32(a[i], high, a[i + SIDE / 2]);
    }
    UNROLLED for (int i = 0; i < SIDE; ++i) a[i] = b[i];
  }
}

// DEPTH numbers, from the c-th, of SIDE keys: pair i of all of them is words[i].
template <bool is_whole>
inline void turn_keys(const Rows& keys, int first, int64_t c, int64_t depth,
                      __m512i (&words)[SIDE]) {
  UNROLLED for (int i = 0; i < SIDE; ++i) {
    keys.ahead.ask((first * depth + c * SIDE) / DEPTH + i);
    words[i] = keys.load<is_whole>(first + i, c);
  }
  transpose(words);
}

// DEPTH columns of the values of two keys, from the c-th, as pairs: the first SIDE and the others.
template <bool is_whole>
inline void pair_values(const Rows& values, int key, int64_t c, int64_t depth,
                        __m512i (&pairs)[2]) {
  alignas(64) static constexpr uint16_t LOW[DEPTH] = {
      0, 32, 1, 33, 2,  34, 3,  35, 4,  36, 5,  37, 6,  38, 7,  39,
      8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47};
  const __m512i low = _mm512_load_si512(LOW);
  const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(SIDE));
  values.ahead.ask((key * depth + 2 * c) / DEPTH);
  values.ahead.ask((key * depth + 2 * c) / DEPTH + 1);
  const __m512i even = values.load<is_whole>(key, c), odd = values.load<is_whole>(key + 1, c);
  pairs[0] = _mm512_permutex2var_epi16(even, low, odd);
  pairs[1] = _mm512_permutex2var_epi16(even, high, odd);
}

// The keys of a tile; those not live are zeros.
template <bool is_whole>
inline void pack_keys(const Rows& from, int64_t depth, uint32_t* to) {
  for (int first = 0; first < TILE; first += SIDE)
    for (int64_t c = 0; c < depth; c += DEPTH) {
      __m512i words[SIDE];
      turn_keys<is_whole>(from, first, c, depth, words);
      UNROLLED for (int i = 0; i < SIDE; ++i)
        _mm512_store_si512(to + (c / 2 + i) * TILE + first, words[i]);
    }
}

// The values of a tile; those not live are zeros.
template <bool is_whole>
inline void pack_values(const Rows& from, int64_t depth, uint32_t* to) {
  for (int key = 0; key < TILE; key += 2, to += depth)
    for (int64_t c = 0; c < depth; c += DEPTH) {
      __m512i pairs[2];
      pair_values<is_whole>(from, key, c, depth, pairs);
      _mm512_store_si512(to + c, pairs[0]);
      _mm512_store_si512(to + c + SIDE, pairs[1]);
    }
}

// --- for a few rows, which meet keys and values as they are turned: the same sums ---

// scores[r][TILE] of R rows with SIDE keys.
template <int R, bool is_whole>
inline void score_turned(const Rows& keys, int first, int64_t depth, const uint16_t* q,
                         float* scores) {
  __m512 sum[R];
  UNROLLED for (int r = 0; r < R; ++r) sum[r] = _mm512_setzero_ps();
  for (int64_t c = 0; c < depth; c += DEPTH) {
    __m512i words[SIDE];
    turn_keys<is_whole>(keys, first, c, depth, words);
    UNROLLED for (int i = 0; i < SIDE; ++i)
      UNROLLED for (int r = 0; r < R; ++r)
        sum[r] = _mm512_dpbf16_ps(sum[r], pair_of(q + r * depth + c + 2 * i), (__m512bh)words[i]);
  }
  UNROLLED for (int r = 0; r < R; ++r) _mm512_store_ps(scores + r * TILE + first, sum[r]);
}

// Adds U vectors of columns, from the c-th, of the values from key `begin` to `end`, which are even.
template <int R, int U, bool is_whole>
inline void add_turned(const Rows& values, int begin, int end, int64_t c, int64_t depth,
                       const uint16_t* weights, float* sums, int64_t stride) {
  __m512 sum[R][U];
  UNROLLED for (int r = 0; r < R; ++r)
    UNROLLED for (int u = 0; u < U; ++u) sum[r][u] = _mm512_loadu_ps(sums + r * stride + u * SIDE);
  for (int key = begin; key < end; key += 2)
    UNROLLED for (int u = 0; u < U; u += 2) {
      __m512i pairs[2];
      pair_values<is_whole>(values, key, c + u * SIDE, depth, pairs);
      UNROLLED for (int r = 0; r < R; ++r)
        UNROLLED for (int i = u; i < std::min(u + 2, U); ++i)
          sum[r][i] = _mm512_dpbf16_ps(sum[r][i], pair_of(weights + r * TILE + key),
                                       (__m512bh)pairs[i - u]);
    }
  UNROLLED for (int r = 0; r < R; ++r)
    UNROLLED for (int u = 0; u < U; ++u) _mm512_storeu_ps(sums + r * stride + u * SIDE, sum[r][u]);
}

}  // namespace jpaged::pairs

#endif
