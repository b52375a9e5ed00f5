// Random calls of the kernel with buffers of the exact size, for the sanitizers to watch: shapes,
// tables, lengths, types. The unused slots hold NaN, and table entries that nobody may follow point
// far outside. Each call runs on one thread and on several, and some of its queries alone: the bits
// must be the same.

#include <algorithm>

#include "attention.cpp"
#include "fuzz.h"

using jpaged::Call;
using jpaged::DType;

// Some queries, each as the only row of a call, which decodes.
template <class Q>
static void check_alone(const Call& call, const std::vector<Q>& out) {
  const int64_t size = call.H * call.C;
  for (int64_t b = 0; b < call.B; ++b) {
    const bool decodes = b < call.num_decode_rows;
    const int64_t first = decodes ? b : call.query_start_loc[b];
    const int64_t num = decodes ? 1 : call.query_start_loc[b + 1] - first;
    if (call.context_lens[b] < num || num == 0) continue;
    const int64_t at = draw(0, num - 1);
    const auto context_len = static_cast<int32_t>(call.context_lens[b] - num + at + 1);
    const int32_t starts[] = {0, 1};
    std::vector<Q> own(size);
    Call alone = call;
    alone.B = alone.T = alone.num_decode_rows = 1;
    alone.q = static_cast<const Q*>(call.q) + (first + at) * size;
    alone.block_table = call.block_table + b * call.M;
    alone.context_lens = &context_len, alone.query_start_loc = starts, alone.out = own.data();
    run_alone(alone);
    if (std::memcmp(own.data(), out.data() + (first + at) * size, size * sizeof(Q)) == 0) continue;
    std::puts("others change a query's bits");
    std::exit(1);
  }
}

template <class Q, class KV>
static void fuzz_call(DType q_dtype, DType kv_dtype) {
  Call call{};
  call.q_dtype = q_dtype, call.kv_dtype = kv_dtype;
  call.K = draw(1, 3), call.H = call.K * pick<int64_t>({1, 2, 3, 4, 5, 8, 9, 16});
  call.C = pick<int64_t>({1, 7, 16, 24, 40, 64, 72, 80, 96});
  call.S = pick<int64_t>({1, 3, 16, 24, 32, 128}), call.B = draw(0, 8);
  call.num_decode_rows = draw(0, 2) == 0 ? call.B : draw(0, call.B);
  call.window = pick<int64_t>({0, 0, 1, 50, 300});
  call.rule = jpaged::ScoreRule::in_base_2(0.3f, pick<float>({0.0f, 5.0f}));
  int64_t longest = pick<int64_t>({1, 40, 64, 65, 255, 256, 257, 300, 512, 900});
  const bool are_long = draw(0, 3) == 0, are_same = draw(0, 5) == 0;
  if (are_same) {  // rows share whole segments and see no more, the last in an item of its own
    call.H = call.K * 16, call.B = call.num_decode_rows = 7;
    longest = pick({256, 512}), call.window = 0;
  }
  call.M = (longest + call.S - 1) / call.S;

  std::vector<int32_t> context_lens(call.B), starts(call.B + 1);
  for (int64_t b = 0; b < call.B; ++b) {
    context_lens[b] = draw(0, 4) == 0 ? 0 : static_cast<int32_t>(draw(1, longest));
    if (are_long || are_same) context_lens[b] = static_cast<int32_t>(longest);
    const int64_t most = std::min<int64_t>(context_lens[b], 90);
    starts[b + 1] = starts[b] + static_cast<int32_t>(b < call.num_decode_rows ? 1 : draw(0, most));
  }
  call.T = starts[call.B] + draw(0, 5);
  const int64_t N = call.B * call.M + 1, size = N * call.S * call.K * call.C;

  std::normal_distribution<float> normal;
  const float k_size = pick<float>({0.01f, 1.0f, 30.0f});
  const float v_size = pick<float>({1.0f, 1.0f, 1e-36f, 1e-38f});  // the least, whose sums underflow
  std::vector<KV> k(size), v(size);
  for (auto* pool : {&k, &v})
    for (auto& x : *pool) jpaged::narrow(std::numeric_limits<float>::quiet_NaN(), &x);
  std::vector<int32_t> table(call.B * call.M, 1 << 30);
  std::vector<int32_t> blocks(N);
  for (int64_t i = 0; i < N; ++i) blocks[i] = static_cast<int32_t>(i);
  std::shuffle(blocks.begin(), blocks.end(), rng);
  // Some begin with the first row's blocks.
  const int64_t num_common = are_same ? call.M : draw(0, 1) ? draw(0, call.M) : 0;
  for (int64_t b = 1; b < call.B; ++b)
    std::copy_n(blocks.begin(), num_common, blocks.begin() + b * call.M);
  for (int64_t b = 0; b < call.B; ++b)
    for (int64_t p = 0; p < context_lens[b]; ++p) {
      const int64_t entry = b * call.M + p / call.S;
      const int64_t num_new = b < call.num_decode_rows ? 1 : starts[b + 1] - starts[b];
      if (call.window > 0 && p <= context_lens[b] - num_new - call.window) continue;
      table[entry] = blocks[entry];
      const int64_t at = (table[entry] * call.S + p % call.S) * call.K * call.C;
      for (int64_t i = at; i < at + call.K * call.C; ++i) {
        jpaged::narrow(k_size * normal(rng), &k[i]);
        jpaged::narrow(v_size * normal(rng), &v[i]);
      }
    }
  std::vector<Q> q(call.T * call.H * call.C), out(q.size()), shared(q.size());
  for (auto& x : q) jpaged::narrow(normal(rng), &x);
  std::vector<float> sinks(call.H, 0.5f);

  call.q = q.data(), call.k = k.data(), call.v = v.data();
  call.block_table = table.data(), call.context_lens = context_lens.data();
  call.query_start_loc = starts.data(), call.sinks = draw(0, 1) ? sinks.data() : nullptr;
  call.out = out.data();
  run_alone(call);
  call.out = shared.data();
  run_on_threads(call);
  check_same(out, shared);
  check_alone(call, out);
  for (const Q& x : out)
    if (!(std::abs(jpaged::widen(x)) < 100)) {
      std::puts("a slot that nobody sees was used");
      std::exit(1);
    }
}

int main(int argc, char** argv) {
  return fuzz(argc, argv, [] {
    fuzz_call<float, float>(DType::f32, DType::f32);
    fuzz_call<jpaged::BFloat16, jpaged::BFloat16>(DType::bf16, DType::bf16);
    fuzz_call<_Float16, _Float16>(DType::f16, DType::f16);
    fuzz_call<float, jpaged::BFloat16>(DType::f32, DType::bf16);
  });
}
