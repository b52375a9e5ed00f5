// Paged attention on a CPU, called by XLA: the contract is `jpaged.ops.paged_attention`'s.
//
// A query meets its keys in tiles of TILE, which begin at position 0 and hold the same positions
// for everybody, with an online softmax in float32. SEGMENT keys make a segment, whose result
// stands for itself; a query's segments are merged in their order. A score is one chain of
// multiply-adds over the head, a value one chain over the visible keys of a tile. So a query's bits
// depend on nothing but the query and what it sees, however queries are grouped and however the
// work is shared out. One thing is excepted: in pairs and tiles, keys that only neighbours in a prompt
// see are summed with weights of 0, so a value of theirs that is not finite makes NaN of the query's.
//
// Compile without -ffast-math: NaN must stay NaN, and sums keep their order.

#include <algorithm>
#include <type_traits>
#include <utility>
#include <vector>

#include "attention.h"
#include "attention_pairs.h"
#include "attention_tiles.h"
#include "attention_vectors.h"
#include "numbers.h"
#include "share_out.h"
#include "softmax.h"
#include "work_list.h"
#include "xla/ffi/api/ffi.h"

namespace jpaged {

constexpr int MAX_RUN = 8;  // items that a thread does one after the other

// Divides by the sum of weights, the sink's included; no weight at all gives zeros.
template <class Q>
NOINLINE void finish(const Call& call, Row row, int64_t place) {
  float total = row.total(), decay = 1;
  if (call.sinks != nullptr) {
    const float sink = call.sinks[place / call.C % call.H] * LOG2_E;
    const float peak = row.peak() > sink ? row.peak() : sink;
    decay = exp2(splat(row.peak() - peak))[0];
    total = total * decay + exp2(splat(sink - peak))[0];
  }
  const float share = total > 0 ? decay / total : 0;
  Q* out = static_cast<Q*>(call.out) + place;
  // A sum that underflows is 0 or -0, which keys without a weight may turn into 0: all are 0.
  for (int64_t c = 0; c < call.C; ++c) narrow((row.value()[c] + 0.0f) * share, out + c);
}

template <class Q>
void finish_all(const Call& call, const Item& item, float* rows) {
  call.for_each_row(item, [&](int64_t r, int64_t place) {
    finish<Q>(call, Row{rows + r * Row::size(call.padded())}, place);
  });
}

// The work of an item; `attend` gives the results of a segment.
template <class Q, class F>
void attend_segments(const Call& call, const Item& item, F attend) {
  thread_local std::vector<float> merged_room, segment_room;
  const int64_t padded = call.padded(), num = call.num_rows(item), size = num * Row::size(padded);
  if (item.targets != nullptr) {
    const int64_t by_target = call.group() * Row::size(padded);
    float* segment = room(segment_room, size);
    attend(item.begin, segment);
    for (int64_t i = 0; i < item.num; ++i)
      std::copy_n(segment + i * by_target, by_target, item.targets[i]);
    return;
  }
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
    merge(merged, segment, num, padded);
  }
  finish_all<Q>(call, item, merged);
}

#if HAS_PAIRS
void attend_in_pairs(const Call& call, const Item& item) {
  thread_local pairs::Scratch scratch;
  pairs::pack_queries(call, item, scratch);
  const auto attend_all = [&](auto add) {
    attend_segments<BFloat16>(call, item, [&](int64_t s, float* rows) {
      pairs::attend_segment(call, item, s, scratch, rows, add);
    });
  };
#if HAS_TILES
  if (tiles::is_allowed()) {
    tiles::Shapes shapes;
    return attend_all([&](const pairs::Tile& tile, const uint16_t* q, float* rows) {
      tiles::add_tile(call, item, tile, q, scratch, rows, shapes);
    });
  }
#endif
  const auto add = item.num * call.group() > pairs::FEW_ROWS ? pairs::add_tile : pairs::add_tile_to_few;
  attend_all([&](const pairs::Tile& tile, const uint16_t* q, float* rows) {
    add(call, item, tile, q, scratch, rows);
  });
}
#endif

template <class Q, class KV>
void attend(const Call& call, const Item& item) {
#if HAS_PAIRS
  if constexpr (std::is_same_v<Q, BFloat16> && std::is_same_v<KV, BFloat16>)
    return attend_in_pairs(call, item);
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
    merge(item.partials, item.partials + s * size, num, padded);
  finish_all<Q>(call, item, item.partials);
}

template <class Q, class KV>
void run_typed(const Call& call, int64_t num_threads, const Schedule& schedule) {
  std::fill_n(static_cast<Q*>(call.out), call.T * call.H * call.C, Q{});
  WorkList list = make_work_list(call, num_threads);
  const auto num = static_cast<int64_t>(list.items.size());
  const int64_t run = std::clamp<int64_t>(num / (8 * num_threads), 1, MAX_RUN);
  for (int64_t i = 0; i < num; ++i) {
    // Threads take runs by turns, mostly: behind a run comes that after the others'.
    const int64_t next = (i + 1) % run == 0 ? i + 1 + (num_threads - 1) * run : i + 1;
    if (next < num) list.items[i].next = &list.items[next];
  }
  share_out((num + run - 1) / run, num_threads, schedule, [&](int64_t i) {
    for (int64_t j = i * run; j < std::min(num, (i + 1) * run); ++j)
      attend<Q, KV>(call, list.items[j]);
  });
  share_out(static_cast<int64_t>(list.cut.size()), num_threads, schedule,
            [&](int64_t i) { merge_segments<Q>(call, list.cut[i]); });
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
  call.rule = jpaged::ScoreRule::in_base_2(scale, soft_cap);
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
