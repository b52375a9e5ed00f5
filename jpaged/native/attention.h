// A call of paged attention, an item of its work, and where a tile of keys lies in the pools.

#pragma once

#include "numbers.h"
#include "softmax.h"

namespace jpaged {

constexpr int SEGMENT = 256;  // keys; a multiple of TILE

// Neighbouring queries of one row, for some KV heads, and the segments they are to see; or queries of
// neighbouring rows that share a segment.
struct Item {
  int64_t row, query, position, num;  // the first query's index and position; how many
  int64_t head, num_heads;            // the first KV head; how many
  int64_t begin, end;                 // segments
  float* partials;                    // where the segments' results go; null: they are finished
  float* const* targets;              // of shared segments: where each query's result goes; or null
  const Item* next;                   // whose keys the thread reads after these; or null
};

// A call: its arrays, all C-contiguous.
struct Call {
  const void *q, *k, *v;          // q [T H C]; pools [N S K C]
  const int32_t *block_table;     // [B M]
  const int32_t *context_lens;    // [B]
  const int32_t *query_start_loc; // [B+1]
  const float* sinks;             // [H], or null
  void* out;                      // [T H C], q's type
  int64_t T, H, C, S, K, B, M, num_decode_rows;
  DType q_dtype, kv_dtype;
  ScoreRule rule;
  int64_t window;                 // none: 0

  int64_t group() const { return H / K; }
  int64_t num_rows(const Item& item) const { return item.num * group() * item.num_heads; }
  // Calls f with each row of an item's, counted, and where it begins in q and in out.
  template <class F>
  void for_each_row(const Item& item, F f) const {
    int64_t r = 0;
    for (int64_t head = item.head; head < item.head + item.num_heads; ++head)
      for (int64_t query = item.query; query < item.query + item.num; ++query)
        for (int64_t g = 0; g < group(); ++g) f(r++, ((query * K + head) * group() + g) * C);
  }
  int64_t padded() const { return (C + LANES - 1) / LANES * LANES; }
  int64_t first_visible(int64_t position) const {
    return window > 0 ? std::max<int64_t>(position - window + 1, 0) : 0;
  }
  // The keys, from the first and up to the second, that a position sees of the tile at `start`.
  std::pair<int, int> visible(int64_t position, int64_t start) const {
    const auto clip = [&](int64_t p) { return std::clamp<int64_t>(p - start, 0, TILE); };
    return {clip(first_visible(position)), clip(position + 1)};
  }
};

// Where a tile's keys and values lie in their pools, for an item's first head: those from `begin` to
// `end`. The others' places are the pool's first.
struct Places {
  int begin = 0, end = 0;
  int64_t at[TILE] = {};

  bool has(int key) const { return begin <= key && key < end; }
};

// The positions that an item's queries see, from the first and up to the second.
inline std::pair<int64_t, int64_t> live(const Call& call, const Item& item) {
  return {call.first_visible(item.position), item.position + item.num};
}

// Where an item's tiles of a segment begin.
inline int64_t first_tile(const Call& call, const Item& item, int64_t segment) {
  return std::max(segment * SEGMENT, live(call, item).first / TILE * TILE);
}

// The places of an item's tile at `start`.
inline Places locate(const Call& call, const Item& item, int64_t start) {
  Places places;
  const auto [lo, hi] = live(call, item);
  const int32_t* table = call.block_table + item.row * call.M;
  int64_t position = std::max(start, lo), end = std::min(start + TILE, hi);
  places.begin = static_cast<int>(position - start), places.end = static_cast<int>(end - start);
  int64_t block = position / call.S, offset = position % call.S;
  for (; position < end; ++block, offset = 0) {
    const int64_t stride = call.K * call.C, num = std::min(call.S - offset, end - position);
    const int64_t first = (table[block] * call.S + offset) * stride + item.head * call.C;
    for (int64_t i = 0; i < num; ++i, ++position) places.at[position - start] = first + i * stride;
  }
  return places;
}

// The places of the tile that is read after the one at `start`. Keys lie in blocks here and there,
// where the processor does not guess the next, and waits if it is told late: who reads a tile asks,
// row by row, for as much of this one.
inline Places locate_next(const Call& call, const Item& item, int64_t start) {
  // Behind shared segments the table may have no more entries.
  const int64_t end = std::min(live(call, item).second, item.end * SEGMENT);
  if (start + TILE < end) return locate(call, item, start + TILE);
  if (item.next == nullptr) return {};
  return locate(call, *item.next, first_tile(call, *item.next, item.next->begin));
}

// Where pieces of `size` numbers begin that a tile's tokens of `width` numbers have, in their order in
// memory; the pool's first behind them, until there are `num`.
inline void list_pieces(const Places& places, int64_t width, int64_t size, int64_t num,
                        int64_t* to) {
  const int64_t* end = to + num;
  for (int key = 0; key < TILE; ++key)
    for (int64_t c = 0; c < width; c += size) *to++ = places.at[key] + c;
  while (to < end) *to++ = 0;
}

}  // namespace jpaged
