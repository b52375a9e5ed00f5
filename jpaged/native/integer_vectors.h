// Products with weights of 8 and 4 bits on a processor that multiplies bytes (AVX512-VNNI) but has no
// tiles.

#pragma once

#include "integers.h"

// JPAGED_NO_PAIRS: for tests of the other form, on a processor that has them.
#if defined(__AVX512VNNI__) && defined(__AVX512BW__) && !defined(JPAGED_NO_PAIRS)
#include <immintrin.h>
#define HAS_BYTES 1
#else
#define HAS_BYTES 0
#endif

#if HAS_BYTES

namespace jpaged::integers {

constexpr int WIDTH = PANEL / LANES;  // vectors of a panel's outputs
constexpr int MAX_ROWS = 4;           // whose sums stay in registers
constexpr int AHEAD = 8192;           // bytes, by which weights are asked for before they are read
constexpr int OFFSET = 128;           // what makes 8-bit weights unsigned, as the processor wants them

// Words of four inputs' weights, from a step's i-th on, as unsigned bytes: one, or of 4 bits two.
inline void take_words(const int8_t* step, int i, int w, __m512i (&words)[1]) {
  const __m512i word = _mm512_loadu_si512(step + (i * PANEL + w * LANES) * 4);
  words[0] = _mm512_xor_si512(word, _mm512_set1_epi8(static_cast<char>(OFFSET)));
}
inline void take_words(const uint8_t* step, int i, int w, __m512i (&words)[2]) {
  const __m512i word = _mm512_loadu_si512(step + (i / 2 * PANEL + w * LANES) * 4);
  const __m512i half = _mm512_set1_epi8(15);
  words[0] = _mm512_and_si512(word, half);
  words[1] = _mm512_and_si512(_mm512_srli_epi16(word, 4), half);
}

inline __m512i four_of(const int8_t* x) {
  int32_t four;
  std::memcpy(&four, x, sizeof four);
  return _mm512_set1_epi32(four);
}

// sums[r][PANEL] of R rows, from the t-th, with a panel.
template <Kind KIND, int R>
NOINLINE void multiply(const Product& p, const Rows& rows, int64_t panel, int64_t t, float* sums) {
  constexpr bool IS_HALF = KIND == Kind::i4;
  constexpr int NUM_WORDS = IS_HALF ? 2 : 1, BYTES = DEPTH * PANEL / NUM_WORDS;
  using Byte = std::conditional_t<IS_HALF, uint8_t, int8_t>;
  const int64_t stride = p.padded_depth(), num_steps = p.num_steps();
  const Byte* step = p.panel<Byte>(panel, NUM_WORDS);
  const int8_t* x = start(rows.integers) + t * 2 * stride;  // high parts, low parts
  Vec sum[R][WIDTH] = {};
  for (int64_t s = 0; s < num_steps; ++s, step += BYTES, x += DEPTH) {
    for (int at = 0; at < BYTES; at += 64) _mm_prefetch(step + AHEAD + at, _MM_HINT_T0);
    __m512i product[R][2][WIDTH];
    UNROLLED for (int r = 0; r < R; ++r)
      UNROLLED for (int w = 0; w < WIDTH; ++w)
        product[r][0][w] = product[r][1][w] = _mm512_setzero_si512();
    UNROLLED for (int i = 0; i < DEPTH / 4; i += NUM_WORDS)
      UNROLLED for (int w = 0; w < WIDTH; ++w) {
        __m512i words[NUM_WORDS];
        take_words(step, i, w, words);
        UNROLLED for (int n = 0; n < NUM_WORDS; ++n)
          UNROLLED for (int r = 0; r < R; ++r)
            UNROLLED for (int part = 0; part < 2; ++part)
              product[r][part][w] = _mm512_dpbusd_epi32(
                  product[r][part][w], words[n], four_of(x + (2 * r + part) * stride + (i + n) * 4));
      }
    const int64_t first = (panel * num_steps + s) * PANEL;
    UNROLLED for (int w = 0; w < WIDTH; ++w) {
      const Vec scale = read(p.scales + first + w * LANES);
      const Vec min = IS_HALF ? read(p.mins + first + w * LANES) : Vec{};
      UNROLLED for (int r = 0; r < R; ++r) {
        const int64_t at = (t + r) * num_steps + s;
        const float total = start(rows.sums)[at];
        __m512i number = _mm512_add_epi32(_mm512_slli_epi32(product[r][0][w], 7), product[r][1][w]);
        if (!IS_HALF)
          number = _mm512_sub_epi32(number, _mm512_set1_epi32(static_cast<int>(total) * OFFSET));
        Vec of_step = _mm512_cvtepi32_ps(number) * scale;
        if (IS_HALF) of_step += total * min;
        sum[r][w] += of_step * start(rows.scales)[at];
      }
    }
  }
  UNROLLED for (int r = 0; r < R; ++r)
    UNROLLED for (int w = 0; w < WIDTH; ++w) store(sums + r * PANEL + w * LANES, sum[r][w]);
}

template <Kind KIND>
void multiply_block(const Product& p, const Rows& rows, int64_t panel, int64_t t, int64_t num,
                    float* sums) {
  for (int64_t r = 0; r < num; r += MAX_ROWS)
    with_constant<MAX_ROWS>(num - r, [&](auto R) {
      multiply<KIND, R()>(p, rows, panel, t + r, sums + r * PANEL);
    });
}

inline void multiply_panels(const Product& p, const Rows& rows, int64_t first, int64_t last,
                            int64_t begin, int64_t end) {
  thread_local std::vector<float> own;
  float* sums = room(own, 2 * SUMS);
  const auto multiply = p.kind == Kind::i8 ? multiply_block<Kind::i8> : multiply_block<Kind::i4>;
  for (int64_t panel = first; panel < last; ++panel)
    for (int64_t t = begin; t < end; t += BLOCK) {
      const int64_t num = std::min<int64_t>(BLOCK, end - t);
      for (int64_t part = 0; part < p.num_parts(); ++part)
        multiply(p, rows, panel + part * p.num_panels(), t, num, sums + part * SUMS);
      put(p, t, num, panel, sums);
    }
}

}  // namespace jpaged::integers

#endif
