// The online softmax of up to 16 rows at once: what `weigh` does to one, for products in pairs.

#pragma once

#include "pairs.h"
#include "softmax.h"

#if HAS_PAIRS

namespace jpaged::pairs {

constexpr int KEY_TILES = TILE / SIDE;
static_assert(KEY_TILES == 4 && LANES == SIDE);

// Joins vectors of which a row has 4 neighbouring numbers in the end: their larger halves side by side,
// then those of what that gives.
inline __m512 join(__m512 a, __m512 b) {
  return _mm512_max_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
}
inline __m512 join_again(__m512 a, __m512 b) {
  return _mm512_max_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
}

// Number i of the result is the largest of vector i.
inline __m512 largest_of_each(const __m512 (&x)[SIDE]) {
  __m512 fours[4];  // of rows i, 4 + i, 8 + i and 12 + i: the largest of each by its fourth numbers
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i)
    fours[i] = join_again(join(x[i], x[4 + i]), join(x[8 + i], x[12 + i]));
  __m512 twos[2];
  for (int i = 0; i < 2; ++i)
    twos[i] = _mm512_max_ps(_mm512_unpacklo_ps(fours[2 * i], fours[2 * i + 1]),
                            _mm512_unpackhi_ps(fours[2 * i], fours[2 * i + 1]));
  return _mm512_max_ps(_mm512_shuffle_ps(twos[0], twos[1], 0x44),
                       _mm512_shuffle_ps(twos[0], twos[1], 0xee));
}

// Which keys of a tile each row of a group sees, as bits.
using Visible = uint64_t[SIDE];

// Has rows follow their largest scores where these leave their peaks; gives all rows' peaks.
inline void follow(__m512 largest, int num, float* rows, int64_t padded, float* peaks) {
  const int64_t stride = Row::size(padded);
  const __m512i places = _mm512_mullo_epi32(
      _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
      _mm512_set1_epi32(static_cast<int>(stride)));
  const auto used = static_cast<__mmask16>((1u << num) - 1);
  const __m512 old = _mm512_mask_i32gather_ps(_mm512_setzero_ps(), used, places, rows, 4);
  const __mmask16 leave = _mm512_mask_cmp_ps_mask(used, largest, old + SLACK, _CMP_NLE_UQ);
  _mm512_store_ps(peaks, _mm512_mask_mov_ps(old, leave, largest));
  for (uint32_t left = leave; left != 0; left &= left - 1) {
    const int r = __builtin_ctz(left);
    Row{rows + r * stride}.follow(peaks[r], padded);
  }
}

// Makes the weights of a group's scores [num][TILE]. is_whole: all rows see all keys. Calls
// `meanwhile` after each row.
template <bool is_whole, class F>
inline void weigh_group(const ScoreRule& rule, const float* scores, const Visible& visible, int num,
                        float* rows, int64_t padded, uint16_t* weights, F meanwhile) {
  const auto mask = [&](int r, int i) { return static_cast<__mmask16>(visible[r] >> (i * SIDE)); };
  __m512 largest[SIDE];
#pragma GCC unroll 16
  for (int r = 0; r < SIDE; ++r) {
    const float* from = scores + r * TILE;
    if constexpr (is_whole) {
      largest[r] = _mm512_max_ps(_mm512_max_ps(_mm512_load_ps(from), _mm512_load_ps(from + SIDE)),
                                 _mm512_max_ps(_mm512_load_ps(from + 2 * SIDE),
                                               _mm512_load_ps(from + 3 * SIDE)));
    } else {
      largest[r] = _mm512_set1_ps(HIDDEN);
      for (int i = 0; i < KEY_TILES; ++i)
        largest[r] = _mm512_mask_max_ps(largest[r], mask(r, i), _mm512_load_ps(from + i * SIDE),
                                        largest[r]);
    }
  }
  alignas(64) float peaks[SIDE];
  follow(largest_of_each(largest) * rule.factor, num, rows, padded, peaks);
  const __m512 factor = _mm512_set1_ps(rule.factor);
  for (int r = 0; r < num; ++r) {
    __m512 weight[KEY_TILES];
#pragma GCC unroll 4
    for (int i = 0; i < KEY_TILES; ++i) {
      const __m512 score = _mm512_load_ps(scores + r * TILE + i * SIDE);
      weight[i] = exp2(_mm512_fmsub_ps(score, factor, _mm512_set1_ps(peaks[r])));
      if constexpr (!is_whole) weight[i] = _mm512_maskz_mov_ps(mask(r, i), weight[i]);
    }
    const Row row{rows + r * Row::size(padded)};
    store(row.totals(), load(row.totals()) + ((weight[0] + weight[1]) + (weight[2] + weight[3])));
    auto* to = reinterpret_cast<__m512i*>(weights + r * TILE);
    _mm512_store_si512(to, (__m512i)_mm512_cvtne2ps_pbh(weight[1], weight[0]));
    _mm512_store_si512(to + 1, (__m512i)_mm512_cvtne2ps_pbh(weight[3], weight[2]));
    meanwhile(r);
  }
}

}  // namespace jpaged::pairs

#endif
