// Products of a few or many rows with a packed weight on a CPU, called by XLA.
//
// A weight stands in panels of PANEL outputs, each one stream of memory, cut into steps of DEPTH
// inputs; `jpaged.ops.packed` says what stands where. A task multiplies some rows with one panel.
// Where the processor multiplies bfloat16 (AMX, AVX512-BF16) and bytes (AMX, AVX512-VNNI), products run on
// these units, elsewhere as float32 vectors:
//
// - bfloat16 rows and weights are multiplied as they are, and summed in float32.
// - float32 rows and weights, with AMX, are cut into three bfloat16 each, which hold all of their 24
//   bits. Of the nine products the six largest count: what is left out is below 2^-22 of a product.
// - Rows for int8 and int4 weights become 15-bit integers with a scale for each step; two int8 hold
//   one. A step's sum is exact; scaled, it is added up in float32.
//
// A row's bits depend on nothing but the row and the weight: each of its sums is one chain over the
// steps, whatever rows are beside it. Rows of zeros at the end, as the padding of a step is, are not
// multiplied: their products are zeros, also with weights that are not finite.

#include "integer_tiles.h"
#include "integer_vectors.h"
#include "pair_products.h"
#include "product.h"
#include "share_out.h"
#include "tiles.h"
#include "vectors.h"
#include "xla/ffi/api/ffi.h"

namespace jpaged {

constexpr int TASK_ROWS = 256;  // rows of a task; a multiple of BLOCK
constexpr int MADE_ROWS = 8;     // rows that are made ready together
constexpr int64_t MIN_SHARED = 200'000;  // multiplications, below which one thread does it all

// A way to multiply: room for all rows, one row made ready, some rows times some panels.
struct Form {
  void (*reserve)(const Product&, Rows&);
  void (*make_ready)(const Product&, Rows&, int64_t t);
  void (*multiply_panels)(const Product&, const Rows&, int64_t first, int64_t last, int64_t t,
                          int64_t end);
};

Form choose_form([[maybe_unused]] const Product& p) {
  [[maybe_unused]] const bool is_quantized = p.kind == Kind::i8 || p.kind == Kind::i4;
  [[maybe_unused]] const bool is_bf16 = p.kind == Kind::bf16 && p.x_dtype == DType::bf16;
#if HAS_TILES
  if (tiles::is_allowed() && (is_bf16 || p.kind == Kind::f32))
    return {planes::reserve, planes::make_ready, tiles::multiply_panels};
  if (tiles::is_allowed() && is_quantized)
    return {integers::reserve, integers::make_ready, tiles::multiply_panels_of_integers};
#endif
#if HAS_PAIRS
  if (is_bf16) return {planes::reserve, planes::make_ready, pairs::multiply_panels};
#endif
#if HAS_BYTES
  if (is_quantized) return {integers::reserve, integers::make_ready, integers::multiply_panels};
#endif
  return {vectors::reserve, vectors::make_ready, vectors::multiply_panels};
}

// Rows up to the last that is not zeros. Those behind it give zeros.
int64_t num_live(const Product& p) {
  if (p.making != Making::nothing && p.eps <= 0) return p.T;
  int64_t num = p.T;
  with_type(p.x_dtype, [&](auto* type) {
    const auto* x = static_cast<decltype(type)>(const_cast<void*>(p.x));
    const auto is_zero = [](auto number) { return widen(number) == 0; };
    while (num > 0 && std::all_of(x + (num - 1) * p.D, x + num * p.D, is_zero)) --num;
  });
  return num;
}

// The results of rows of zeros, from `begin` on.
void put_zeros(const Product& p, int64_t begin) {
  with_type(p.out_dtype, [&](auto* type) {
    using T = std::remove_pointer_t<decltype(type)>;
    T* to = static_cast<T*>(p.out) + begin * p.F;
    const int64_t num = (p.T - begin) * p.F;
    if (p.residual == nullptr)
      std::fill_n(to, num, T{});
    else  // -0 and 0 are 0, as where they are added
      std::transform(static_cast<const T*>(p.residual) + begin * p.F,
                     static_cast<const T*>(p.residual) + p.T * p.F, to,
                     [](T number) { return widen(number) == 0 ? T{} : number; });
  });
}

void run(const Product& all, int64_t num_threads, const Schedule& schedule) {
  thread_local Rows own;
  Rows& rows = own;  // this thread's, also where others work on them
  Product p = all;
  p.T = num_live(all);
  put_zeros(all, p.T);
  const Form form = choose_form(p);
  form.reserve(p, rows);
  if (p.T * p.D * p.F < MIN_SHARED) num_threads = 1;
  share_out((p.T + MADE_ROWS - 1) / MADE_ROWS, num_threads, schedule, [&](int64_t i) {
    for (int64_t t = i * MADE_ROWS; t < std::min(p.T, (i + 1) * MADE_ROWS); ++t)
      form.make_ready(p, rows, t);
  });
  const int64_t num_parts = (p.T + TASK_ROWS - 1) / TASK_ROWS;
  // Few rows wait for the weights, which come fastest in one stream: a task takes many panels.
  const int64_t run = p.T > BLOCK ? 1 : std::max<int64_t>(1, p.num_panels() / (4 * num_threads));
  const int64_t num_runs = (p.num_panels() + run - 1) / run;
  share_out(num_runs * num_parts, num_threads, schedule, [&](int64_t i) {
    const int64_t t = i / num_runs * TASK_ROWS, end = std::min<int64_t>(t + TASK_ROWS, p.T);
    const int64_t first = i % num_runs * run, last = std::min(first + run, p.num_panels());
    form.multiply_panels(p, rows, first, last, t, end);
    std::atomic_thread_fence(std::memory_order_seq_cst);  // behind what was streamed
  });
}

}  // namespace jpaged

// --- XLA's side ---

namespace ffi = xla::ffi;

static jpaged::DType dtype_of(ffi::DataType dtype) {
  if (dtype == ffi::DataType::BF16) return jpaged::DType::bf16;
  return dtype == ffi::DataType::F16 ? jpaged::DType::f16 : jpaged::DType::f32;
}

static ffi::Error multiply(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer weight,
                           ffi::Buffer<ffi::F16> scales, ffi::Buffer<ffi::F16> mins,
                           ffi::AnyBuffer norm, ffi::AnyBuffer residual,
                           ffi::Result<ffi::AnyBuffer> out, int64_t kind, int64_t making,
                           int64_t gating, float eps) {
  jpaged::Product p{};
  p.x = x.untyped_data(), p.weight = weight.untyped_data(), p.out = out->untyped_data();
  p.scales = reinterpret_cast<const _Float16*>(scales.typed_data());
  p.mins = reinterpret_cast<const _Float16*>(mins.typed_data());
  p.norm = norm.untyped_data();
  p.residual = residual.element_count() > 0 ? residual.untyped_data() : nullptr;
  p.making = static_cast<jpaged::Making>(making), p.eps = eps;
  p.gating = static_cast<jpaged::Gating>(gating);
  p.T = x.dimensions()[0], p.D = x.dimensions()[1], p.F = out->dimensions()[1];
  p.x_dtype = dtype_of(x.element_type()), p.out_dtype = dtype_of(out->element_type());
  p.kind = static_cast<jpaged::Kind>(kind);
  jpaged::run(p, pool.num_threads(),
              [&](std::function<void()> task) { pool.Schedule(std::move(task)); });
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(jpaged_matmul, multiply,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::F16>>()
                                  .Arg<ffi::Buffer<ffi::F16>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<int64_t>("kind")
                                  .Attr<int64_t>("making")
                                  .Attr<int64_t>("gating")
                                  .Attr<float>("eps"));
