// From the heads that a projection gives to queries, and to keys and values in their pools, called by
// XLA: RMS norms of queries and keys, RoPE, and the write, each number read and written once. The
// contract is `jpaged.native.kv_write`'s.

#include <algorithm>
#include <vector>

#include "norm.h"
#include "numbers.h"
#include "share_out.h"
#include "xla/ffi/api/ffi.h"

namespace jpaged {

constexpr int TOKENS = 8;               // that a thread takes at once
constexpr int64_t MIN_SHARED = 50'000;  // numbers, below which one thread does it all

struct Call {
  const void* heads;             // [T H+2K C]: queries, keys, values
  const void *q_norm, *k_norm;   // [C], of the heads' type, or null
  const float *cos, *sin;        // [T X]; X is 0 where nothing turns
  const int32_t* slot_mapping;   // [T]; a slot of the null block is not written
  void* q;                       // [T H C], of the heads' type
  void *k, *v;                   // [N S K C]
  int64_t T, H, K, C, X, S;
  float eps;                     // of the norms
  bool is_offset;                // theirs, see `rms_norm`
  DType dtype, kv_dtype;
};

// Turns the pairs (i, i + X), in float32, and rounds them.
template <class T>
void turn(const float* cos, const float* sin, int64_t X, float* head) {
  float *first = head, *second = head + X;
  int64_t i = 0;
  for (; i + LANES <= X; i += LANES) {
    const Vec a = load(first + i), b = load(second + i), c = load(cos + i), s = load(sin + i);
    store(first + i, rounded<T>(a * c - b * s));
    store(second + i, rounded<T>(b * c + a * s));
  }
  const auto round = [](float x) {
    T narrowed;
    narrow(x, &narrowed);
    return widen(narrowed);
  };
  for (; i < X; ++i) {
    const float a = first[i], b = second[i];
    first[i] = round(a * cos[i] - b * sin[i]);
    second[i] = round(b * cos[i] + a * sin[i]);
  }
}

// A head of token t, normalized and turned.
template <class T>
void make_head(const Call& call, const T* from, const void* norm, int64_t t, float* to) {
  if (norm != nullptr) {
    rms_norm(from, static_cast<const T*>(norm), call.C, call.eps, call.is_offset, to);
  } else {
    for (int64_t c = 0; c < call.C; c += LANES) store(to + c, read(from + c, call.C - c));
  }
  turn<T>(call.cos + t * call.X, call.sin + t * call.X, call.X, to);
}

template <class T>
void put(const float* from, int64_t C, T* to) {
  int64_t c = 0;
  for (; c + LANES <= C; c += LANES) write(rounded<T>(load(from + c)), to + c);
  for (; c < C; ++c) narrow(from[c], to + c);
}

template <class T, class KV>
void take_token(const Call& call, int64_t t) {
  thread_local std::vector<float> own;
  const int64_t C = call.C, H = call.H, K = call.K;
  float* head = room(own, C + LANES);
  const T* from = static_cast<const T*>(call.heads) + t * (H + 2 * K) * C;
  for (int64_t h = 0; h < H; ++h) {
    make_head(call, from + h * C, call.q_norm, t, head);
    put(head, C, static_cast<T*>(call.q) + (t * H + h) * C);
  }
  const int64_t slot = call.slot_mapping[t];
  if (slot < call.S) return;
  for (int64_t h = 0; h < K; ++h) {
    const int64_t place = (slot * K + h) * C;
    make_head(call, from + (H + h) * C, call.k_norm, t, head);
    put(head, C, static_cast<KV*>(call.k) + place);
    for (int64_t c = 0; c < C; c += LANES) store(head + c, read(from + (H + K + h) * C + c, C - c));
    put(head, C, static_cast<KV*>(call.v) + place);
  }
}

void run(const Call& call, int64_t num_threads, const Schedule& schedule) {
  if (call.T * (call.H + 2 * call.K) * call.C < MIN_SHARED) num_threads = 1;
  with_type(call.dtype, [&](auto* type) {
    with_type(call.kv_dtype, [&](auto* kv_type) {
      using T = std::remove_pointer_t<decltype(type)>;
      using KV = std::remove_pointer_t<decltype(kv_type)>;
      share_out((call.T + TOKENS - 1) / TOKENS, num_threads, schedule, [&](int64_t i) {
        for (int64_t t = i * TOKENS; t < std::min(call.T, (i + 1) * TOKENS); ++t)
          take_token<T, KV>(call, t);
      });
    });
  });
}

}  // namespace jpaged

// --- XLA's side ---

namespace ffi = xla::ffi;

static ffi::Error kv_write(ffi::ThreadPool pool, ffi::AnyBuffer heads, ffi::AnyBuffer q_norm,
                           ffi::AnyBuffer k_norm, ffi::Buffer<ffi::F32> cos,
                           ffi::Buffer<ffi::F32> sin, ffi::Buffer<ffi::S32> slot_mapping,
                           ffi::AnyBuffer, ffi::AnyBuffer, ffi::Result<ffi::AnyBuffer> q,
                           ffi::Result<ffi::AnyBuffer> k, ffi::Result<ffi::AnyBuffer> v,
                           int64_t dtype, int64_t kv_dtype, float eps, bool is_offset) {
  const auto q_shape = q->dimensions(), pool_shape = k->dimensions();
  const auto or_null = [](ffi::AnyBuffer x) {
    return x.element_count() > 0 ? x.untyped_data() : nullptr;
  };
  jpaged::Call call{};
  call.heads = heads.untyped_data();
  call.q_norm = or_null(q_norm), call.k_norm = or_null(k_norm);
  call.cos = cos.typed_data(), call.sin = sin.typed_data();
  call.slot_mapping = slot_mapping.typed_data();
  call.q = q->untyped_data(), call.k = k->untyped_data(), call.v = v->untyped_data();
  call.T = q_shape[0], call.H = q_shape[1], call.C = q_shape[2];
  call.S = pool_shape[1], call.K = pool_shape[2], call.X = cos.dimensions()[1];
  call.eps = eps, call.is_offset = is_offset;
  call.dtype = static_cast<jpaged::DType>(dtype);
  call.kv_dtype = static_cast<jpaged::DType>(kv_dtype);
  jpaged::run(call, pool.num_threads(),
              [&](std::function<void()> task) { pool.Schedule(std::move(task)); });
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(jpaged_kv_write, kv_write,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int64_t>("dtype")
                                  .Attr<int64_t>("kv_dtype")
                                  .Attr<float>("eps")
                                  .Attr<bool>("is_offset"));
