// Products of bfloat16 with bfloat16, pair by pair, on a processor with AVX512-BF16 but no tiles.

#pragma once

#include "pairs.h"
#include "planes.h"

#if HAS_PAIRS

namespace jpaged::pairs {

constexpr int CHUNK = 256;  // inputs of a panel that stay in the nearest cache for all rows

inline void multiply_panels(const Product& p, const Rows& rows, int64_t first, int64_t last,
                            int64_t begin, int64_t end) {
  thread_local std::vector<float> own;
  const int64_t depth = p.padded_depth(), block = p.num_parts() * SUMS;
  const int64_t num = (end - begin + BLOCK - 1) / BLOCK * block;
  const uint16_t* x = planes::first(p, rows);
  float* sums = room(own, num);
  for (int64_t panel = first; panel < last; ++panel) {
    std::fill_n(sums, num, 0.0f);
    for (int64_t part = 0; part < p.num_parts(); ++part)
      for (int64_t d = 0; d < depth; d += CHUNK) {
        const auto* weight = p.panel<uint16_t>(panel + part * p.num_panels()) + d * PANEL;
        const int64_t num_pairs = std::min<int64_t>(CHUNK, depth - d) / 2;
        float* to = sums + part * SUMS;
        for (int64_t t = begin; t < end; t += BLOCK, to += block)
          multiply_rows<PANEL / SIDE, true, true>(std::min<int64_t>(BLOCK, end - t),
                                                  x + t * depth + d, depth, weight, 2 * PANEL,
                                                  num_pairs, to, PANEL);
      }
    for (int64_t t = begin; t < end; t += BLOCK)
      put(p, t, std::min<int64_t>(BLOCK, end - t), panel, sums + (t - begin) / BLOCK * block);
  }
}

}  // namespace jpaged::pairs

#endif
