// Random heads with buffers of the exact size, for the sanitizers to watch: shapes, types, norms, pairs
// that turn, padding. Each runs on one thread and on several: the bits must be the same.

#include "kv_write.cpp"

#include "fuzz.h"

using jpaged::DType;

template <class T, class KV>
static void fuzz_call(DType dtype, DType kv_dtype) {
  jpaged::Call call{};
  call.dtype = dtype, call.kv_dtype = kv_dtype, call.eps = 1e-5f, call.is_offset = draw(0, 1);
  call.T = pick<int64_t>({0, 1, 7, 8, 9, 70}), call.C = pick<int64_t>({1, 5, 16, 33, 64, 80});
  call.H = pick<int64_t>({1, 3, 12}), call.K = pick<int64_t>({1, 3}), call.S = pick<int64_t>({1, 4, 16});
  call.X = draw(0, call.C / 2);
  const int64_t N = 1 + (call.T + call.S - 1) / call.S, size = N * call.S * call.K * call.C;
  const auto heads = draw_numbers<T>(call.T * (call.H + 2 * call.K) * call.C);
  const auto norm = draw_numbers<T>(call.C);
  const auto cos = draw_numbers<float>(call.T * call.X), sin = draw_numbers<float>(call.T * call.X);
  std::vector<int32_t> slots(call.T);
  for (int64_t t = 0; t < call.T; ++t)
    slots[t] = draw(0, 3) ? static_cast<int32_t>(call.S + call.T - 1 - t) : 0;
  call.heads = heads.data(), call.cos = cos.data(), call.sin = sin.data();
  call.q_norm = draw(0, 1) ? norm.data() : nullptr, call.k_norm = draw(0, 1) ? norm.data() : nullptr;
  call.slot_mapping = slots.data();
  std::vector<T> q(call.T * call.H * call.C), shared_q(q.size());
  std::vector<KV> k(size), v(size), shared_k(size), shared_v(size);
  call.q = q.data(), call.k = k.data(), call.v = v.data();
  run_alone(call);
  call.q = shared_q.data(), call.k = shared_k.data(), call.v = shared_v.data();
  run_on_threads(call);
  check_same(q, shared_q);
  check_same(k, shared_k);
  check_same(v, shared_v);
}

int main(int argc, char** argv) {
  return fuzz(argc, argv, [] {
    using jpaged::BFloat16;
    fuzz_call<float, float>(DType::f32, DType::f32);
    fuzz_call<BFloat16, BFloat16>(DType::bf16, DType::bf16);
    fuzz_call<BFloat16, float>(DType::bf16, DType::f32);
    fuzz_call<_Float16, _Float16>(DType::f16, DType::f16);
  });
}
