// Random products with buffers of the exact size, for the sanitizers to watch: shapes, kinds of weights,
// what rows are made of, gates, residuals, zeros. Each runs on one thread and on several, and some of its
// rows alone: the bits must be the same.

#include "matmul.cpp"

#include "fuzz.h"

using jpaged::DType;
using jpaged::Gating;
using jpaged::Kind;
using jpaged::Making;
using jpaged::Product;

// Bytes of a packed weight's numbers: of floats, or any.
static std::vector<uint8_t> draw_weight(Kind kind, int64_t size) {
  const auto bytes = [](const auto& numbers) {
    const auto* from = reinterpret_cast<const uint8_t*>(numbers.data());
    return std::vector<uint8_t>(from, from + numbers.size() * sizeof numbers[0]);
  };
  if (kind == Kind::f32) return bytes(draw_numbers<float>(size));
  if (kind == Kind::bf16) return bytes(draw_numbers<jpaged::BFloat16>(size));
  if (kind == Kind::f16) return bytes(draw_numbers<_Float16>(size));
  std::vector<uint8_t> any(kind == Kind::i8 ? size : size / 2);
  for (auto& x : any) x = static_cast<uint8_t>(draw(0, 255));
  return any;
}

template <class X, class Out>
static void check_alone(const Product& p, const std::vector<Out>& out) {
  for (int i = 0; i < 3 && p.T > 0; ++i) {
    const int64_t t = draw(0, p.T - 1);
    std::vector<Out> own(p.F);
    Product alone = p;
    alone.T = 1, alone.x = static_cast<const X*>(p.x) + t * p.D, alone.out = own.data();
    if (p.residual != nullptr) alone.residual = static_cast<const Out*>(p.residual) + t * p.F;
    run_alone(alone);
    if (std::memcmp(own.data(), out.data() + t * p.F, p.F * sizeof(Out)) == 0) continue;
    std::puts("others change a row's bits");
    std::exit(1);
  }
}

template <class X, class Out>
static void fuzz_call(DType x_dtype, DType out_dtype, std::initializer_list<Kind> kinds) {
  Product p{};
  p.x_dtype = x_dtype, p.out_dtype = out_dtype, p.kind = pick(kinds), p.eps = 1e-5f;
  p.making = static_cast<Making>(draw(0, 2));
  p.T = pick<int64_t>({0, 1, 2, 15, 33, 70, 300}), p.D = pick<int64_t>({1, 31, 32, 64, 75, 160});
  p.F = pick<int64_t>({1, 31, 32, 64, 90, 200});
  if (p.F % jpaged::PANEL == 0) p.gating = static_cast<Gating>(draw(0, 2));
  const int64_t num_panels = p.num_panels() * p.num_parts();
  const int64_t groups = num_panels * p.num_steps() * jpaged::PANEL;
  auto x = draw_numbers<X>(p.T * p.D);
  if (draw(0, 1))  // rows of zeros, also at the end
    for (int64_t t = 0; t < p.T; ++t)
      if (draw(0, 3) == 0 || t >= p.T / 2)
        for (int64_t d = 0; d < p.D; ++d) jpaged::narrow(draw(0, 1) ? 0.0f : -0.0f, &x[t * p.D + d]);
  const auto norm = draw_numbers<X>(p.D);
  auto residual = draw_numbers<Out>(p.T * p.F);
  for (auto& number : residual)
    if (draw(0, 9) == 0) jpaged::narrow(-0.0f, &number);
  const auto weight = draw_weight(p.kind, num_panels * jpaged::PANEL * p.padded_depth());
  const auto scales = draw_numbers<_Float16>(groups), mins = draw_numbers<_Float16>(groups);
  std::vector<Out> out(p.T * p.F), shared(out.size());
  p.x = x.data(), p.norm = norm.data(), p.weight = weight.data();
  p.scales = scales.data(), p.mins = mins.data();
  p.residual = draw(0, 1) ? residual.data() : nullptr;
  p.out = out.data();
  run_alone(p);
  p.out = shared.data();
  run_on_threads(p);
  check_same(out, shared);
  check_alone<X>(p, out);
}

int main(int argc, char** argv) {
  return fuzz(argc, argv, [] {
    using jpaged::BFloat16;
    fuzz_call<float, float>(DType::f32, DType::f32, {Kind::f32, Kind::i8, Kind::i4});
    fuzz_call<BFloat16, BFloat16>(DType::bf16, DType::bf16, {Kind::bf16, Kind::i8, Kind::i4});
    fuzz_call<BFloat16, float>(DType::bf16, DType::f32, {Kind::bf16});
    fuzz_call<_Float16, _Float16>(DType::f16, DType::f16, {Kind::f16, Kind::i8});
  });
}
