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
#include <type_traits>
#include <utility>
#include <vector>

#include "attention.h"
#include "attention_tiles.h"
#include "attention_vectors.h"
#include "numbers.h"
#include "share_out.h"
#include "softmax.h"
#include "xla/ffi/api/ffi.h"

namespace jpaged {

constexpr int GROUP_ROWS = 96;   // rows (queries times heads) that a prefill item aims at
constexpr int MAX_RUN = 8;       // items that a thread does one after the other
constexpr int MIN_SHARED = 256;  // tiles of rows, below which one thread does it all

// Divides by the sum of weights, the sink's included; no weight at all gives zeros.
template <class Q>
NOINLINE void finish(const Call& call, Row row, int64_t place) {
  float total = row.total();
  if (call.sinks != nullptr) {
    const float sink = call.sinks[place / call.C % call.H];
    const float peak = row.peak() > sink ? row.peak() : sink;
    const float decay = exp(row.peak() - peak);
    row.decay(decay, call.padded());
    total = total * decay + exp(sink - peak);
  }
  const float share = total > 0 ? 1 / total : 0;
  Q* out = static_cast<Q*>(call.out) + place;
  for (int64_t c = 0; c < call.C; ++c) narrow(row.value()[c] * share, out + c);
}

void merge_all(float* into, float* from, int64_t num, int64_t padded) {
  for (int64_t at = 0; at < num * Row::size(padded); at += Row::size(padded))
    merge(Row{into + at}, Row{from + at}, padded);
}

template <class Q>
void finish_all(const Call& call, const Item& item, float* rows) {
  for (int64_t r = 0; r < call.num_rows(item); ++r)
    finish<Q>(call, Row{rows + r * Row::size(call.padded())}, call.place(item, r));
}

// The work of an item; `attend` gives the results of a segment.
template <class Q, class F>
void attend_segments(const Call& call, const Item& item, F attend) {
  thread_local std::vector<float> merged_room, segment_room;
  const int64_t padded = call.padded(), num = call.num_rows(item), size = num * Row::size(padded);
  if (item.partials != nullptr) {
    for (int64_t s = item.begin; s < item.end; ++s)
      attend(s, item.partials + (s - item.begin) * size);
    return;
  }
  float* merged = room(merged_room, size);
  float* segment = room(segment_room, size);
  attend(item.begin, merged);
  for (int64_t s = item.begin + 1; s < item.end; ++s) {
    attend(s, segment);
    merge_all(merged, segment, num, padded);
  }
  finish_all<Q>(call, item, merged);
}

template <class Q, class KV>
void attend(const Call& call, const Item& item) {
#if HAS_TILES
  if constexpr (std::is_same_v<Q, BFloat16> && std::is_same_v<KV, BFloat16>) {
    if (tiles::is_allowed()) {
      thread_local tiles::Scratch scratch;
      tiles::pack_queries(call, item, scratch);
      tiles::Shapes shapes;
      attend_segments<Q>(call, item, [&](int64_t s, float* rows) {
        tiles::attend_segment(call, item, s, scratch, shapes, rows);
      });
      return;
    }
  }
#endif
  thread_local vectors::Scratch scratch;
  const float* q = vectors::widen_queries<Q>(call, item, scratch);
  attend_segments<Q>(call, item, [&](int64_t s, float* rows) {
    vectors::attend_segment<KV>(call, item, s, q, scratch, rows);
  });
}

// Merges the results of an item that was cut, in their order, and finishes it.
template <class Q>
void merge_segments(const Call& call, const Item& item) {
  const int64_t padded = call.padded(), num = call.num_rows(item), size = num * Row::size(padded);
  for (int64_t s = 1; s < item.end - item.begin; ++s)
    merge_all(item.partials, item.partials + s * size, num, padded);
  finish_all<Q>(call, item, item.partials);
}

// --- the work list ---

// As many as GROUP_ROWS allow, preferably in whole tiles of 16 rows.
int64_t queries_per_item(int64_t group) {
  const int64_t most = std::max<int64_t>(1, GROUP_ROWS / group);
  for (int64_t num = most; 2 * num > most; --num)
    if (num * group % 16 == 0) return num;
  return most;
}

// Every query that sees anything, in items of neighbours that share their tiles of keys.
std::vector<Item> make_items(const Call& call) {
  std::vector<Item> items;
  const int64_t per_item = queries_per_item(call.group());
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
      const int64_t num_heads = size == 1 ? call.K : 1;
      for (int64_t head = 0; head < call.K; head += num_heads)
        items.push_back({b, first + at, position, size, head, num_heads, begin, end, nullptr, nullptr});
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
  const int64_t row_size = Row::size(call.padded());
  for (const Item& item : items)
    room += is_long(item) ? (item.end - item.begin) * call.num_rows(item) * row_size : 0;
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
    const int64_t size = call.num_rows(item) * row_size;
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
    num_tiles += call.num_rows(item) * (item.end - item.begin) * (SEGMENT / TILE);
  if (num_tiles < MIN_SHARED) num_threads = 1;
  std::vector<float> partials;
  const std::vector<Item> cut = cut_long_items(call, num_threads, items, partials);
  // A prompt's last queries see most: they come first.
  std::reverse(items.begin(), items.end());
  const auto num = static_cast<int64_t>(items.size());
  const int64_t run = std::clamp<int64_t>(num / (8 * num_threads), 1, MAX_RUN);
  for (int64_t i = 0; i + 1 < num; ++i)
    if ((i + 1) % run != 0) items[i].next = &items[i + 1];
  share_out((num + run - 1) / run, num_threads, schedule, [&](int64_t i) {
    for (int64_t j = i * run; j < std::min(num, (i + 1) * run); ++j) attend<Q, KV>(call, items[j]);
  });
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
  call.rule = {scale, soft_cap};
  call.window = window;
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
