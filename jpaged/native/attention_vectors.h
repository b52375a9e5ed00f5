// A segment of attention as float32 vectors: for any processor, any type of queries and caches.

#pragma once

#include <algorithm>
#include <type_traits>
#include <utility>
#include <vector>

#include "attention.h"

namespace jpaged::vectors {

#if defined(__AVX__) && !defined(__AVX512F__)
constexpr int MAX_ROWS = 2;
#else
constexpr int MAX_ROWS = 4;
#endif
constexpr int UNROLL = 4;      // vectors a row has in registers

// Widens a row of C; the rest of its place becomes zeros.
template <class T>
inline void widen_row(const T* from, int64_t C, int64_t padded, float* to) {
  int64_t c = 0;
  for (; c + LANES <= C; c += LANES)
    for (int64_t i = 0; i < LANES; ++i) to[c + i] = widen(from[c + i]);
  for (; c < padded; ++c) to[c] = c < C ? widen(from[c]) : 0.0f;
}

// The first (second) half of a perfect shuffle of a and b.
template <int... I>
inline Vec low_pairs(Vec a, Vec b, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(a, b, (I / 2 + I % 2 * LANES)...);
}
template <int... I>
inline Vec high_pairs(Vec a, Vec b, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(a, b, (LANES / 2 + I / 2 + I % 2 * LANES)...);
}

// Transposes a square of LANES x LANES: log2(LANES) perfect shuffles of its rows.
inline void transpose(const float* from, int64_t from_stride, float* to, int64_t to_stride) {
  constexpr std::make_integer_sequence<int, LANES> lanes{};
  Vec a[LANES], b[LANES];
#pragma GCC unroll 16
  for (int i = 0; i < LANES; ++i) a[i] = load(from + i * from_stride);
#pragma GCC unroll 4
  for (int step = 1; step < LANES; step *= 2) {
#pragma GCC unroll 16
    for (int i = 0; i < LANES / 2; ++i) {
      b[2 * i] = low_pairs(a[i], a[i + LANES / 2], lanes);
      b[2 * i + 1] = high_pairs(a[i], a[i + LANES / 2], lanes);
    }
#pragma GCC unroll 16
    for (int i = 0; i < LANES; ++i) a[i] = b[i];
  }
#pragma GCC unroll 16
  for (int i = 0; i < LANES; ++i) store(to + i * to_stride, a[i]);
}

// scores[r][TILE] = q[r][C] times keys[C][TILE], for R rows.
template <int R>
NOINLINE void score_rows(const float* q, int64_t q_stride, const float* keys, int64_t C,
                         float* scores) {
  for (int at = 0; at < TILE; at += UNROLL * LANES) {
    Vec sum[R][UNROLL] = {};
    for (int64_t c = 0; c < C; ++c) {
      Vec key[UNROLL];
      for (int u = 0; u < UNROLL; ++u) key[u] = load(keys + c * TILE + at + u * LANES);
      for (int r = 0; r < R; ++r)
        for (int u = 0; u < UNROLL; ++u) sum[r][u] += q[r * q_stride + c] * key[u];
    }
    for (int r = 0; r < R; ++r)
      for (int u = 0; u < UNROLL; ++u) store(scores + r * TILE + at + u * LANES, sum[r][u]);
  }
}

// out[r][stride] += weights[r][TILE] times values[TILE][stride], over the keys from lo to hi.
// A row of results takes `out_stride` floats.
template <int R>
NOINLINE void add_values(const float* weights, const float* values, int64_t stride, int lo, int hi,
                         float* out, int64_t out_stride) {
  for (int64_t at = 0; at < stride; at += UNROLL * LANES) {
    const int used = static_cast<int>(std::min<int64_t>(UNROLL, (stride - at) / LANES));
    Vec sum[R][UNROLL] = {};
    for (int r = 0; r < R; ++r)
      for (int u = 0; u < used; ++u) sum[r][u] = load(out + r * out_stride + at + u * LANES);
    if (used == UNROLL) {
      for (int key = lo; key < hi; ++key) {
        Vec value[UNROLL];
        for (int u = 0; u < UNROLL; ++u) value[u] = load(values + key * stride + at + u * LANES);
        for (int r = 0; r < R; ++r)
          for (int u = 0; u < UNROLL; ++u) sum[r][u] += weights[r * TILE + key] * value[u];
      }
    } else {
      for (int u = 0; u < used; ++u)
        for (int key = lo; key < hi; ++key)
          for (int r = 0; r < R; ++r)
            sum[r][u] += weights[r * TILE + key] * load(values + key * stride + at + u * LANES);
    }
    for (int r = 0; r < R; ++r)
      for (int u = 0; u < used; ++u) store(out + r * out_stride + at + u * LANES, sum[r][u]);
  }
}

// Calls f with `num`, from 1 to MAX_ROWS, as a compile-time constant.
template <int R = MAX_ROWS, class F>
inline void with_rows(int64_t num, F f) {
  if constexpr (R > 1) {
    if (num < R) return with_rows<R - 1>(num, f);
  }
  f(std::integral_constant<int, R>{});
}

// Widens the rows of a tile; those not live become zeros.
template <class KV>
void read_tile(const Places& places, const Places& next, const KV* pool, int64_t C, int64_t padded,
               float* to) {
  std::fill(to, to + places.begin * padded, 0.0f);
  for (int key = places.begin; key < places.end; ++key) {
    ask_for(pool + next.at[key], C);
    widen_row(pool + places.at[key], C, padded, to + key * padded);
  }
  std::fill(to + places.end * padded, to + TILE * padded, 0.0f);
}

struct Scratch {  // a thread's own memory
  std::vector<float> q, keys, values, scores;
};

// An item's queries as float32, by KV head, and the heads of a query together.
template <class Q>
const float* widen_queries(const Call& call, const Item& item, Scratch& scratch) {
  const int64_t padded = call.padded();
  float* q = room(scratch.q, call.num_rows(item) * padded);
  call.for_each_row(item, [&](int64_t r, int64_t place) {
    widen_row(static_cast<const Q*>(call.q) + place, call.C, padded, q + r * padded);
  });
  return q;
}

// The softmax of the rows of one KV head takes a tile: its keys [C][TILE], its values as read.
inline void add_tile(const Call& call, const Item& item, int64_t start, const float* q,
                     const float* keys, const float* values, float* scores, float* rows) {
  const int64_t padded = call.padded(), G = call.group(), num = item.num * G;
  const auto row = [&](int64_t r) { return Row{rows + r * Row::size(padded)}; };
  const auto visible = [&](int64_t r) { return call.visible(item.position + r / G, start); };
  for (int64_t r = 0; r < num; r += MAX_ROWS)
    with_rows(std::min<int64_t>(num - r, MAX_ROWS), [&](auto R) {
      score_rows<R()>(q + r * padded, padded, keys, call.C, scores + r * TILE);
    });
  for (int64_t r = 0, next; r < num; r = next) {
    const auto [lo, hi] = visible(r);
    for (next = r + 1; next < num && next < r + MAX_ROWS; ++next)
      if (visible(next) != std::pair<int, int>(lo, hi)) break;
    if (lo >= hi) continue;
    for (int64_t i = r; i < next; ++i) weigh(call.rule, scores + i * TILE, lo, hi, row(i), padded);
    with_rows(next - r, [&, lo = lo, hi = hi](auto R) {
      add_values<R()>(scores + r * TILE, values, padded, lo, hi, row(r).value(), Row::size(padded));
    });
  }
}

// A segment: `rows` gets the softmax of each of the item's queries, by KV head. q: these, widened.
template <class KV>
void attend_segment(const Call& call, const Item& item, int64_t segment, const float* q,
                    Scratch& scratch, float* rows) {
  const int64_t C = call.C, padded = call.padded(), num = item.num * call.group();
  float* keys = room(scratch.keys, TILE * padded);
  float* values = room(scratch.values, TILE * padded);
  float* scores = room(scratch.scores, num * TILE);
  for (int64_t r = 0; r < num * item.num_heads; ++r) Row{rows + r * Row::size(padded)}.clear(padded);
  const int64_t end = std::min((segment + 1) * SEGMENT, live(call, item).second);
  for (int64_t start = first_tile(call, item, segment); start < end; start += TILE) {
    const Places places = locate(call, item, start), next = locate_next(call, item, start);
    for (int64_t h = 0; h < item.num_heads; ++h) {
      read_tile(places, next, static_cast<const KV*>(call.k) + h * C, C, padded, values);
      for (int64_t key = 0; key < TILE; key += LANES)
        for (int64_t c = 0; c < padded; c += LANES)
          transpose(values + key * padded + c, padded, keys + c * TILE + key, TILE);
      read_tile(places, next, static_cast<const KV*>(call.v) + h * C, C, padded, values);
      add_tile(call, item, start, q + h * num * padded, keys, values, scores,
               rows + h * num * Row::size(padded));
    }
  }
}

}  // namespace jpaged::vectors
