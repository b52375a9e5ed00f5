// A segment of attention as float32 vectors: for any processor, any type of queries and caches.

#pragma once

#include <algorithm>
#include <type_traits>
#include <utility>
#include <vector>

#include "attention.h"
#include "key_panels.h"

namespace jpaged::vectors {

// Rows whose sums, UNROLL vectors each, stay in registers.
#if defined(__x86_64__) && !defined(__AVX512F__)
constexpr int MAX_ROWS = 3;
#else
constexpr int MAX_ROWS = 4;
#endif
// Rows, up to which a tile's values are read where they stand; more have them widened once, or packed.
template <class KV>
constexpr int FEW_ROWS = std::is_same_v<KV, float> ? 16 : 2 * MAX_ROWS;

// A vector that several products are to take from one register, not each from memory.
inline Vec in_register(Vec v) {
#if defined(__x86_64__)
  asm("" : "+v"(v));
#endif
  return v;
}

// Widens a row of C; the rest of its place becomes zeros.
template <class T>
inline void widen_row(const T* from, int64_t C, int64_t padded, float* to) {
  int64_t c = 0;
  for (; c + LANES <= C; c += LANES) store(to + c, read(from + c));
  for (; c < padded; ++c) to[c] = c < C ? widen(from[c]) : 0.0f;
}

// scores[r][TILE] = q[r][C] times a panel of keys, for R rows.
template <int R>
NOINLINE void score_rows(const float* q, int64_t q_stride, const float* keys, int64_t C,
                         float* scores) {
  Vec sum[R][UNROLL];
  UNROLLED for (int r = 0; r < R; ++r)
    UNROLLED for (int u = 0; u < UNROLL; ++u) sum[r][u] = Vec{};
  int64_t c = 0;
  do {
    Vec number[R];
    UNROLLED for (int r = 0; r < R; ++r) number[r] = splat(q[r * q_stride + c]);
    UNROLLED for (int u = 0; u < UNROLL; ++u) {
      const Vec key = in_register(load(keys + c * PANEL + u * LANES));
      UNROLLED for (int r = 0; r < R; ++r) sum[r][u] += number[r] * key;
    }
  } while (++c < C);
  UNROLLED for (int r = 0; r < R; ++r)
    UNROLLED for (int u = 0; u < UNROLL; ++u) store(scores + r * TILE + u * LANES, sum[r][u]);
}

// What is asked for while a tile is attended: the next tile, in the order in which it lies in memory,
// all heads of a token one after the other. Else the processor gets to it at two thirds of the speed.
template <class KV>
struct Ahead {
  const KV *k, *v;        // the pools
  const int64_t* pieces;  // where in the pools they begin; a head's share, one for each key and panel

  void ask(int64_t i) const {
    constexpr int64_t LINE = 64 / sizeof(KV);
    const int64_t piece = pieces[i];
    // A line of keys and one of values in turns: one pool's lines before the other's were slower.
    UNROLLED for (int64_t c = 0; c < PANEL; c += LINE) {
      __builtin_prefetch(k + piece + c, 0, 2);
      __builtin_prefetch(v + piece + c, 0, 2);
    }
  }
};

// A tile's values, widened.
struct Widened {
  const float* rows[TILE];

  void ask(int64_t, int64_t) const {}
};

// A tile's values where they stand. Who adds them asks for the next tile meanwhile.
template <class KV>
struct InPlace {
  const KV* rows[TILE];
  Ahead<KV> ahead;

  void ask(int64_t key, int64_t at) const { ahead.ask(at / PANEL * TILE + key); }
};

// out[r][U * LANES] += weights[r][TILE] times the values' columns from `at`, over the keys from lo to
// hi, at least one. A row of results takes `out_stride` floats.
template <int R, int U, class V>
NOINLINE void add_values(const float* weights, const V& values, int64_t at, int lo, int hi,
                         float* out, int64_t out_stride) {
  Vec sum[R][U];
  UNROLLED for (int r = 0; r < R; ++r)
    UNROLLED for (int u = 0; u < U; ++u) sum[r][u] = load(out + r * out_stride + u * LANES);
  int64_t key = lo;
  do {
    const auto* from = values.rows[key] + at;
    values.ask(key, at);
    Vec weight[R];
    UNROLLED for (int r = 0; r < R; ++r) weight[r] = splat(weights[r * TILE + key]);
    UNROLLED for (int u = 0; u < U; ++u) {
      const Vec value = in_register(read(from + u * LANES));
      UNROLLED for (int r = 0; r < R; ++r) sum[r][u] += weight[r] * value;
    }
  } while (++key < hi);
  UNROLLED for (int r = 0; r < R; ++r)
    UNROLLED for (int u = 0; u < U; ++u) store(out + r * out_stride + u * LANES, sum[r][u]);
}

struct Scratch {  // a thread's own memory
  std::vector<float> q, keys, values, scores;
  std::vector<int64_t> pieces;
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

// What the rows of one KV head see of a tile.
struct Sight {
  const Call& call;
  const Item& item;
  int64_t start;
  bool is_whole;  // all of them see all of it

  Sight(const Call& call, const Item& item, int64_t start) : call(call), item(item), start(start) {
    const std::pair<int, int> all{0, TILE};
    is_whole = call.visible(item.position, start) == all &&
               call.visible(item.position + item.num - 1, start) == all;
  }
  std::pair<int, int> of(int64_t r) const {
    if (is_whole) return {0, TILE};
    return call.visible(item.position + r / call.group(), start);
  }
};

// The scores of a tile's keys, in panels. Queries before a panel see nothing of it.
inline void score_tile(const Call& call, const Item& item, int64_t start, const float* q,
                       const float* keys, float* scores) {
  const int64_t padded = call.padded(), G = call.group(), num = item.num * G;
  for (int at = 0; at < TILE; at += PANEL) {
    const float* panel = keys + at * panel_depth(call.C);
    for (int64_t r = std::max<int64_t>(start + at - item.position, 0) * G; r < num; r += MAX_ROWS)
      with_constant<MAX_ROWS>(num - r, [&](auto R) {
        score_rows<R()>(q + r * padded, padded, panel, call.C, scores + r * TILE + at);
      });
  }
}

// Makes weights of a tile's scores.
inline NOINLINE void weigh_tile(const Sight& sight, float* scores, float* rows) {
  const ScoreRule rule = sight.call.rule;
  const int64_t padded = sight.call.padded(), num = sight.item.num * sight.call.group();
  for (int64_t r = 0; r < num; ++r, scores += TILE, rows += Row::size(padded))
    if (const auto [lo, hi] = sight.of(r); lo < hi) weigh(rule, scores, lo, hi, Row{rows}, padded);
}

// Adds U vectors of the values' columns to R rows: over the keys that all of these see at once, and
// over those before and behind row by row, so that each row takes its keys in order.
template <int R, int U, class V>
inline void add_to_rows(const Sight& sight, int64_t first, const float* weights,
                        const V& values, int64_t at, float* out, int64_t out_stride) {
  std::pair<int, int> seen[R];
  int lo = 0, hi = TILE;
  for (int r = 0; r < R; ++r) {
    seen[r] = sight.of(first + r);
    lo = std::max(lo, seen[r].first), hi = std::min(hi, seen[r].second);
  }
  if (lo >= hi) lo = hi = TILE;
  const auto add_alone = [&](int r, int from, int to) {
    if (from < to)
      add_values<1, U>(weights + r * TILE, values, at, from, to, out + r * out_stride, out_stride);
  };
  for (int r = 0; r < R; ++r) add_alone(r, seen[r].first, std::min(seen[r].second, lo));
  if (lo < hi) add_values<R, U>(weights, values, at, lo, hi, out, out_stride);
  for (int r = 0; r < R; ++r) add_alone(r, std::max(seen[r].first, hi), seen[r].second);
}

// The rows' weighted values, in panels of columns.
template <class V>
void add_tile(const Sight& sight, const float* weights, const V& values, float* rows) {
  const Call& call = sight.call;
  const int64_t padded = call.padded(), num = sight.item.num * call.group();
  const int64_t stride = Row::size(padded);
  for (int64_t at = 0; at < padded; at += PANEL)
    with_constant<UNROLL>((padded - at) / LANES, [&](auto U) {
      for (int64_t r = 0; r < num; r += MAX_ROWS)
        with_constant<MAX_ROWS>(num - r, [&](auto R) {
          add_to_rows<R(), U()>(sight, r, weights + r * TILE, values, at,
                                Row{rows + r * stride}.value() + at, stride);
        });
    });
}

// Where a tile's keys and values are, and those of the tile that is read next.
struct Tile {
  Places places, next;
  Sight sight;

  Tile(const Call& call, const Item& item, int64_t start)
      : places(locate(call, item, start)), next(locate_next(call, item, start)),
        sight(call, item, start) {}
};

// Adds the values of the head at `v`.
template <class KV>
void add_in_place(const Tile& tile, const KV* v, const Ahead<KV>& ahead, const float* weights,
                  float* rows) {
  InPlace<KV> values;
  values.ahead = ahead;
  for (int key = 0; key < TILE; ++key) {
    values.rows[key] = v + tile.places.at[key];
    if (tile.places.has(key)) continue;
    for (int64_t at = 0; at < tile.sight.call.padded(); at += PANEL) values.ask(key, at);
  }
  add_tile(tile.sight, weights, values, rows);
}

template <class KV>
void add_widened(const Tile& tile, const KV* v, const Ahead<KV>& ahead, const float* weights,
                 float* room, float* rows) {
  const int64_t C = tile.sight.call.C, padded = tile.sight.call.padded();
  const int64_t num_panels = (padded + PANEL - 1) / PANEL;
  Widened values;
  for (int key = 0; key < TILE; ++key) {
    for (int64_t i = 0; i < num_panels; ++i) ahead.ask(key * num_panels + i);
    values.rows[key] = room + key * padded;
    if (tile.places.has(key)) widen_row(v + tile.places.at[key], C, padded, room + key * padded);
  }
  add_tile(tile.sight, weights, values, rows);
}

// A segment: `rows` gets the softmax of each of the item's queries, by KV head. q: these, widened.
template <class KV>
void attend_segment(const Call& call, const Item& item, int64_t segment, const float* q,
                    Scratch& scratch, float* rows) {
  const int64_t C = call.C, padded = call.padded(), num = item.num * call.group();
  const int64_t stride = Row::size(padded);
  const int64_t share = (padded + PANEL - 1) / PANEL * TILE;  // of a head, in pieces
  const bool is_in_place = num <= FEW_ROWS<KV> && C == padded;
  float* keys = room(scratch.keys, TILE * panel_depth(C));
  float* values = room(scratch.values, TILE * padded);
  float* scores = room(scratch.scores, num * TILE);
  int64_t* pieces = room(scratch.pieces, item.num_heads * share);
  const auto *k = static_cast<const KV*>(call.k), *v = static_cast<const KV*>(call.v);
  for (int64_t r = 0; r < num * item.num_heads; ++r) Row{rows + r * stride}.clear(padded);
  const int64_t end = std::min((segment + 1) * SEGMENT, live(call, item).second);
  for (int64_t start = first_tile(call, item, segment); start < end; start += TILE) {
    const Tile tile(call, item, start);
    list_pieces(tile.next, item.num_heads * C, PANEL, item.num_heads * share, pieces);
    for (int64_t h = 0; h < item.num_heads; ++h) {
      float* head = rows + h * num * stride;
      const Ahead<KV> ahead{k, v, pieces + h * share};
      pack_keys(tile.places, k + h * C, C, keys);
      score_tile(call, item, start, q + h * num * padded, keys, scores);
      weigh_tile(tile.sight, scores, head);
      if (is_in_place)
        add_in_place(tile, v + h * C, ahead, scores, head);
      else
        add_widened(tile, v + h * C, ahead, scores, values, head);
    }
  }
}

}  // namespace jpaged::vectors
