// A call of paged attention, an item of its work, and where a tile of keys lies in the pools.

#pragma once

#include "numbers.h"
#include "softmax.h"

namespace jpaged {

constexpr int SEGMENT = 256;  // keys; a multiple of TILE

// Neighbouring queries of one row, for some KV heads, and the segments they are to see.
struct Item {
  int64_t row, query, position, num;  // the first query's index and position; how many
  int64_t head, num_heads;            // the first KV head; how many
  int64_t begin, end;                 // segments
  float* partials;                    // where the segments' results go; null: they are finished
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
  // Where row r of an item's begins in q and in out.
  int64_t place(const Item& item, int64_t r) const {
    const int64_t G = group(), by_head = item.num * G, at = r % by_head;
    return ((item.query + at / G) * H + (item.head + r / by_head) * G + at % G) * C;
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

// Where a tile's keys and values lie in their pools, for one head: those from `begin` to `end`.
struct Places {
  int begin = 0, end = 0;
  int64_t at[TILE];

  bool has(int key) const { return begin <= key && key < end; }
};

// The places of the tile at `start`, of which the positions from lo to hi are live.
inline Places locate(const Call& call, const Item& item, int64_t head, int64_t start, int64_t lo,
                     int64_t hi) {
  Places places;
  const int32_t* table = call.block_table + item.row * call.M;
  int64_t position = std::max(start, lo), end = std::min(start + TILE, hi);
  places.begin = static_cast<int>(position - start), places.end = static_cast<int>(end - start);
  int64_t block = position / call.S, offset = position % call.S;
  for (; position < end; ++block, offset = 0) {
    const int64_t stride = call.K * call.C, num = std::min(call.S - offset, end - position);
    const int64_t first = (table[block] * call.S + offset) * stride + head * call.C;
    for (int64_t i = 0; i < num; ++i, ++position) places.at[position - start] = first + i * stride;
  }
  return places;
}

// Asks for a tile's keys and values, those of all the item's heads, ahead of their use: they lie in
// blocks here and there, where the processor does not guess the next.
template <class KV>
void prefetch(const Places& places, const KV* k, const KV* v, int64_t size) {
  const auto bytes = static_cast<int64_t>(size * sizeof(KV));
  for (int key = places.begin; key < places.end; ++key)
    for (int64_t at = 0; at < bytes; at += 64) {
      __builtin_prefetch(reinterpret_cast<const char*>(k + places.at[key]) + at, 0, 2);
      __builtin_prefetch(reinterpret_cast<const char*>(v + places.at[key]) + at, 0, 2);
    }
}

}  // namespace jpaged
