// Paged attention on a CPU, called by XLA: the contract is `jpaged.ops.paged_attention`'s.
//
// A query meets its keys in tiles of TILE, which begin at position 0 and hold the same positions
// for everybody, with an online softmax in float32. SEGMENT keys make a segment, whose result
// stands for itself; a query's segments are merged in their order. A score is one chain of
// multiply-adds over the head, a value one chain over the visible keys of a tile. So a query's bits
// depend on nothing but the query and what it sees, however queries are grouped and however the
// work is shared out.
//
// Compile without -ffast-math: NaN must stay NaN, and sums keep their order.

#include <algorithm>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "numbers.h"
#include "share_out.h"
#include "xla/ffi/api/ffi.h"

namespace jpaged {

#if defined(__AVX__) && !defined(__AVX512F__)
constexpr int MAX_ROWS = 2;
#else
constexpr int MAX_ROWS = 4;
#endif
constexpr int UNROLL = 4;      // vectors a row has in registers
constexpr int TILE = 64;       // keys; a multiple of UNROLL * LANES
constexpr int SEGMENT = 256;   // keys; a multiple of TILE
constexpr int GROUP_ROWS = 64; // rows (queries times heads) that a prefill item aims at
constexpr int MIN_SHARED = 256;  // tiles of rows, below which one thread does it all
constexpr float LOWEST = -1e30f;  // finite: the difference of two of them is 0, not NaN
constexpr float HIDDEN = -std::numeric_limits<float>::infinity();

// Widens a row of C; the rest of its place becomes zeros.
template <class T>
inline void widen_row(const T* from, int64_t C, int64_t padded, float* to) {
  int64_t c = 0;
  for (; c + LANES <= C; c += LANES)
    for (int64_t i = 0; i < LANES; ++i) to[c + i] = widen(from[c + i]);
  for (; c < padded; ++c) to[c] = c < C ? widen(from[c]) : 0.0f;
}

// --- a call: its arrays, all C-contiguous, and its rule ---

struct Call {
  const void *q, *k, *v;          // q [T H C]; pools [N S K C]
  const int32_t *block_table;     // [B M]
  const int32_t *context_lens;    // [B]
  const int32_t *query_start_loc; // [B+1]
  const float* sinks;             // [H], or null
  void* out;                      // [T H C], q's type
  int64_t T, H, C, S, K, B, M, num_decode_rows;
  DType q_dtype, kv_dtype;
  float scale, soft_cap;          // no cap: 0
  int64_t window;                 // none: 0

  int64_t group() const { return H / K; }
  int64_t padded() const { return (C + LANES - 1) / LANES * LANES; }
  int64_t first_visible(int64_t position) const {
    return window > 0 ? std::max<int64_t>(position - window + 1, 0) : 0;
  }
};

// Neighbouring queries of one row, for one KV head, and the segments they are to see.
struct Item {
  int64_t row, query, position, num;  // the first query's index and position; how many
  int64_t head;                       // the KV head
  int64_t begin, end;                 // segments
  float* partials;                    // where the segments' results go; null: they are finished
};

// --- arithmetic ---

// exp, within 2 ulp; 0 below -87, NaN for NaN.
inline Vec exp(Vec x) {
  const Vec shift = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
  const Vec shifted = x * 1.44269504f + shift;
  const Vec n = shifted - shift;
  const Vec r = (x - n * 0.693145752f) - n * 1.42860677e-6f;
  Vec p = splat(1.0f / 5040);
  for (float c : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f}) p = p * r + c;
  Word power;  // the whole number stands in the low bits of `shifted`
  std::memcpy(&power, &shifted, sizeof power);
  power = (power << 23) + (127 << 23);
  Vec two_to_n;
  std::memcpy(&two_to_n, &power, sizeof power);
  return select(x < -87.0f, Vec{}, p * two_to_n);
}
NOINLINE float exp(float x) { return exp(splat(x))[0]; }

// tanh, to about 1e-7 of 1. Beyond 20 it is 1.
inline Vec tanh(Vec x) {
  x = select(x > 20.0f, splat(20.0f), select(x < -20.0f, splat(-20.0f), x));
  return 1.0f - 2.0f / (exp(x * 2.0f) + 1.0f);
}

// Lane i of the result is lane i ^ Distance of v.
template <int Distance, int... I>
inline Vec swap_lanes(Vec v, std::integer_sequence<int, I...>) {
  return __builtin_shufflevector(v, v, (I ^ Distance)...);
}
template <int Distance = LANES / 2>
inline float largest(Vec v) {
  v = larger(v, swap_lanes<Distance>(v, std::make_integer_sequence<int, LANES>{}));
  if constexpr (Distance > 1) return largest<Distance / 2>(v);
  return v[0];
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

// --- the online softmax of one row: peak, sums of weights by lane, weighted values ---

struct Row {
  float* data;

  static int64_t size(int64_t padded) { return LANES + LANES + padded; }
  float& peak() const { return data[0]; }
  float* totals() const { return data + LANES; }
  float* value() const { return data + 2 * LANES; }
  float total() const {
    float sum = 0;
    for (int i = 0; i < LANES; ++i) sum += totals()[i];
    return sum;
  }
  void clear(int64_t padded) const {
    std::fill(data, data + size(padded), 0.0f);
    peak() = LOWEST;
  }
  NOINLINE void decay(float factor, int64_t padded) const {
    for (int64_t c = 0; c < LANES + padded; c += LANES)
      store(totals() + c, load(totals() + c) * factor);
  }
};

// Makes weights of the scores of a tile, of which the keys from lo to hi are visible.
NOINLINE void weigh(const Call& call, float* scores, int lo, int hi, Row row, int64_t padded) {
  Vec peaks = splat(row.peak());
  for (int at = 0; at < TILE; at += LANES) {
    Vec score = load(scores + at) * call.scale;
    if (call.soft_cap > 0) score = call.soft_cap * tanh(score / call.soft_cap);
    store(scores + at, score);
  }
  std::fill(scores, scores + lo, HIDDEN);
  std::fill(scores + hi, scores + TILE, HIDDEN);
  for (int at = 0; at < TILE; at += LANES) peaks = larger(load(scores + at), peaks);
  const float peak = largest(peaks);
  if (peak != row.peak()) {
    row.decay(exp(row.peak() - peak), padded);
    row.peak() = peak;
  }
  Vec total = load(row.totals());
  for (int at = 0; at < TILE; at += LANES) {
    const Vec weight = exp(load(scores + at) - peak);
    store(scores + at, weight);
    total += weight;
  }
  store(row.totals(), total);
}

// Takes a later segment's result into an earlier one's.
NOINLINE void merge(Row into, Row from, int64_t padded) {
  if (from.total() == 0) return;
  const float peak = into.peak() > from.peak() ? into.peak() : from.peak();
  into.decay(exp(into.peak() - peak), padded);
  from.decay(exp(from.peak() - peak), padded);
  into.peak() = peak;
  for (int64_t c = 0; c < LANES + padded; c += LANES)
    store(into.totals() + c, load(into.totals() + c) + load(from.totals() + c));
}

// Divides by the sum of weights, the sink's included; no weight at all gives zeros.
template <class Q>
NOINLINE void finish(const Call& call, Row row, int64_t query, int64_t head) {
  float total = row.total();
  if (call.sinks != nullptr) {
    const float sink = call.sinks[head];
    const float peak = row.peak() > sink ? row.peak() : sink;
    const float decay = exp(row.peak() - peak);
    row.decay(decay, call.padded());
    total = total * decay + exp(sink - peak);
  }
  const float share = total > 0 ? 1 / total : 0;
  Q* out = static_cast<Q*>(call.out) + (query * call.H + head) * call.C;
  for (int64_t c = 0; c < call.C; ++c) narrow(row.value()[c] * share, out + c);
}

void merge_all(float* into, float* from, int64_t num, int64_t padded) {
  for (int64_t at = 0; at < num * Row::size(padded); at += Row::size(padded))
    merge(Row{into + at}, Row{from + at}, padded);
}

template <class Q>
void finish_all(const Call& call, const Item& item, float* rows) {
  const int64_t G = call.group();
  for (int64_t r = 0; r < item.num * G; ++r)
    finish<Q>(call, Row{rows + r * Row::size(call.padded())}, item.query + r / G,
              item.head * G + r % G);
}

// --- an item of work ---

// A thread's own memory.
struct Scratch {
  std::vector<float> q, keys, values, scores, segment, merged;
};

// Where a tile's keys and values lie in their pools, for one head: those from `begin` to `end`.
struct Places {
  int begin = 0, end = 0;
  int64_t at[TILE];
};

// The places of the tile at `start`, of which the positions from lo to hi are live.
Places locate(const Call& call, const Item& item, int64_t start, int64_t lo, int64_t hi) {
  Places places;
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

// Widens the rows of a tile; those not live become zeros.
template <class KV>
void read_tile(const Places& places, const KV* pool, int64_t C, int64_t padded, float* to) {
  std::fill(to, to + places.begin * padded, 0.0f);
  for (int key = places.begin; key < places.end; ++key)
    widen_row(pool + places.at[key], C, padded, to + key * padded);
  std::fill(to + places.end * padded, to + TILE * padded, 0.0f);
}

// One segment: `rows` gets the softmax of each of the item's queries, the heads of one together.
template <class KV>
void attend_segment(const Call& call, const Item& item, int64_t segment, const float* q,
                    Scratch& scratch, float* rows) {
  const int64_t C = call.C, padded = call.padded(), G = call.group(), num = item.num * G;
  float* keys = room(scratch.keys, TILE * padded);
  float* values = room(scratch.values, TILE * padded);
  float* scores = room(scratch.scores, num * TILE);
  const auto row = [&](int64_t r) { return Row{rows + r * Row::size(padded)}; };
  for (int64_t r = 0; r < num; ++r) row(r).clear(padded);
  const int64_t live_lo = call.first_visible(item.position), live_hi = item.position + item.num;
  const int64_t begin = std::max(segment * SEGMENT, live_lo / TILE * TILE);
  const int64_t end = std::min((segment + 1) * SEGMENT, live_hi);
  const KV* k = static_cast<const KV*>(call.k);
  const KV* v = static_cast<const KV*>(call.v);
  for (int64_t start = begin; start < end; start += TILE) {
    const Places places = locate(call, item, start, live_lo, live_hi);
    read_tile(places, k, C, padded, values);
    for (int64_t key = 0; key < TILE; key += LANES)
      for (int64_t c = 0; c < padded; c += LANES)
        transpose(values + key * padded + c, padded, keys + c * TILE + key, TILE);
    for (int64_t r = 0; r < num; r += MAX_ROWS)
      with_rows(std::min<int64_t>(num - r, MAX_ROWS), [&](auto R) {
        score_rows<R()>(q + r * padded, padded, keys, C, scores + r * TILE);
      });
    read_tile(places, v, C, padded, values);
    const auto visible = [&](int64_t r) {
      const int64_t position = item.position + r / G;
      const auto clip = [&](int64_t p) { return std::clamp<int64_t>(p - start, 0, TILE); };
      return std::pair<int, int>(clip(call.first_visible(position)), clip(position + 1));
    };
    for (int64_t r = 0, next; r < num; r = next) {
      const auto [lo, hi] = visible(r);
      for (next = r + 1; next < num && next < r + MAX_ROWS; ++next)
        if (visible(next) != std::pair<int, int>(lo, hi)) break;
      if (lo >= hi) continue;
      for (int64_t i = r; i < next; ++i) weigh(call, scores + i * TILE, lo, hi, row(i), padded);
      with_rows(next - r, [&, lo = lo, hi = hi](auto R) {
        add_values<R()>(scores + r * TILE, values, padded, lo, hi, row(r).value(),
                        Row::size(padded));
      });
    }
  }
}

template <class Q, class KV>
void attend(const Call& call, const Item& item) {
  thread_local Scratch scratch;
  const int64_t padded = call.padded(), G = call.group(), num = item.num * G;
  const int64_t size = num * Row::size(padded);
  float* q = room(scratch.q, num * padded);
  for (int64_t r = 0; r < num; ++r) {
    const int64_t head = (item.query + r / G) * call.H + item.head * G + r % G;
    const Q* from = static_cast<const Q*>(call.q) + head * call.C;
    widen_row(from, call.C, padded, q + r * padded);
  }
  if (item.partials != nullptr) {
    for (int64_t s = item.begin; s < item.end; ++s)
      attend_segment<KV>(call, item, s, q, scratch, item.partials + (s - item.begin) * size);
    return;
  }
  float* merged = room(scratch.merged, size);
  float* segment = room(scratch.segment, size);
  attend_segment<KV>(call, item, item.begin, q, scratch, merged);
  for (int64_t s = item.begin + 1; s < item.end; ++s) {
    attend_segment<KV>(call, item, s, q, scratch, segment);
    merge_all(merged, segment, num, padded);
  }
  finish_all<Q>(call, item, merged);
}

// Merges the results of an item that was cut, in their order, and finishes it.
template <class Q>
void merge_segments(const Call& call, const Item& item) {
  const int64_t padded = call.padded(), num = item.num * call.group();
  const int64_t size = num * Row::size(padded);
  for (int64_t s = 1; s < item.end - item.begin; ++s)
    merge_all(item.partials, item.partials + s * size, num, padded);
  finish_all<Q>(call, item, item.partials);
}

// --- the work list ---

// Every query that sees anything, in items of neighbours that share their tiles of keys.
std::vector<Item> make_items(const Call& call) {
  std::vector<Item> items;
  const int64_t per_item = std::max<int64_t>(1, GROUP_ROWS / call.group());
  for (int64_t b = 0; b < call.B; ++b) {
    const bool decodes = b < call.num_decode_rows;
    const int64_t first = decodes ? b : call.query_start_loc[b];
    const int64_t num = decodes ? 1 : call.query_start_loc[b + 1] - first;
    if (call.context_lens[b] < num) continue;  // a row that sees nothing
    for (int64_t at = 0; at < num; at += per_item) {
      const int64_t size = std::min(per_item, num - at);
      const int64_t position = call.context_lens[b] - num + at;
      const int64_t begin = call.first_visible(position) / SEGMENT;
      const int64_t end = (position + size + SEGMENT - 1) / SEGMENT;
      for (int64_t head = 0; head < call.K; ++head)
        items.push_back({b, first + at, position, size, head, begin, end, nullptr});
    }
  }
  return items;
}

// Cuts what is longer than a fair share for a thread into pieces of segments. Takes the cut items
// out of `items` and gives them back with room in `partials`, to be merged once their pieces are
// done.
std::vector<Item> cut_long_items(const Call& call, int64_t num_threads, std::vector<Item>& items,
                                 std::vector<float>& partials) {
  int64_t num_segments = 0, room = 0;
  for (const Item& item : items) num_segments += item.end - item.begin;
  const int64_t fair = std::max<int64_t>(1, num_segments / (4 * num_threads));
  const auto is_long = [&](const Item& item) {
    return num_threads > 1 && item.num == 1 && item.end - item.begin > fair;
  };
  const int64_t size = call.group() * Row::size(call.padded());
  for (const Item& item : items) room += is_long(item) ? (item.end - item.begin) * size : 0;
  partials.resize(room);
  std::vector<Item> pieces, cut;
  float* free = partials.data();
  for (Item item : items) {
    if (!is_long(item)) {
      pieces.push_back(item);
      continue;
    }
    item.partials = free;
    cut.push_back(item);
    for (const int64_t end = item.end; item.begin < end; item.begin = item.end) {
      item.end = std::min(item.begin + fair, end);
      item.partials = free;
      pieces.push_back(item);
      free += (item.end - item.begin) * size;
    }
  }
  items = std::move(pieces);
  return cut;
}

template <class Q, class KV>
void run_typed(const Call& call, int64_t num_threads, const Schedule& schedule) {
  std::fill_n(static_cast<Q*>(call.out), call.T * call.H * call.C, Q{});
  std::vector<Item> items = make_items(call);
  int64_t num_tiles = 0;  // of keys, as often as a row meets them
  for (const Item& item : items)
    num_tiles += item.num * call.group() * (item.end - item.begin) * (SEGMENT / TILE);
  if (num_tiles < MIN_SHARED) num_threads = 1;
  std::vector<float> partials;
  const std::vector<Item> cut = cut_long_items(call, num_threads, items, partials);
  const auto num = static_cast<int64_t>(items.size());
  // A prompt's last queries see most: they come first.
  share_out(num, num_threads, schedule,
            [&](int64_t i) { attend<Q, KV>(call, items[num - 1 - i]); });
  share_out(static_cast<int64_t>(cut.size()), num_threads, schedule,
            [&](int64_t i) { merge_segments<Q>(call, cut[i]); });
}

void run(const Call& call, int64_t num_threads, const Schedule& schedule) {
  with_type(call.q_dtype, [&](auto* q) {
    with_type(call.kv_dtype, [&](auto* kv) {
      run_typed<std::remove_pointer_t<decltype(q)>, std::remove_pointer_t<decltype(kv)>>(
          call, num_threads, schedule);
    });
  });
}

}  // namespace jpaged

// --- XLA's side ---

namespace ffi = xla::ffi;

static ffi::Error paged_attention(ffi::ThreadPool pool, ffi::AnyBuffer q, ffi::AnyBuffer k,
                                  ffi::AnyBuffer v, ffi::Buffer<ffi::S32> block_table,
                                  ffi::Buffer<ffi::S32> context_lens,
                                  ffi::Buffer<ffi::S32> query_start_loc,
                                  ffi::Buffer<ffi::F32> sinks, ffi::Result<ffi::AnyBuffer> out,
                                  int64_t num_decode_rows,
                                  int64_t q_dtype, int64_t kv_dtype, float scale, float soft_cap,
                                  int64_t window) {
  const auto q_shape = q.dimensions(), pool_shape = k.dimensions();
  jpaged::Call call{};
  call.q = q.untyped_data(), call.k = k.untyped_data(), call.v = v.untyped_data();
  call.block_table = block_table.typed_data();
  call.context_lens = context_lens.typed_data();
  call.query_start_loc = query_start_loc.typed_data();
  call.sinks = sinks.element_count() > 0 ? sinks.typed_data() : nullptr;
  call.out = out->untyped_data();
  call.T = q_shape[0], call.H = q_shape[1], call.C = q_shape[2];
  call.S = pool_shape[1], call.K = pool_shape[2];
  call.B = block_table.dimensions()[0], call.M = block_table.dimensions()[1];
  call.num_decode_rows = num_decode_rows;
  call.q_dtype = static_cast<jpaged::DType>(q_dtype);
  call.kv_dtype = static_cast<jpaged::DType>(kv_dtype);
  call.scale = scale, call.soft_cap = soft_cap, call.window = window;
  jpaged::run(call, pool.num_threads(),
              [&](std::function<void()> task) { pool.Schedule(std::move(task)); });
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(jpaged_attention, paged_attention,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int64_t>("num_decode_rows")
                                  .Attr<int64_t>("q_dtype")
                                  .Attr<int64_t>("kv_dtype")
                                  .Attr<float>("scale")
                                  .Attr<float>("soft_cap")
                                  .Attr<int64_t>("window"));
