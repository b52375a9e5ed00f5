// Blocks copied over others within some pools, called by XLA: the contract is
// `jpaged.native.block_copy`'s.

#include <cstdint>
#include <cstring>
#include <vector>

#include "xla/ffi/api/ffi.h"

namespace jpaged {

// All reads come before all writes. A block that is copied over itself stays as it is.
inline void copy_blocks(char* pool, int64_t bytes_per_block, const int32_t* src, const int32_t* dst,
                        int64_t num) {
  thread_local std::vector<char> held;
  held.resize(num * bytes_per_block);
  for (int64_t i = 0; i < num; ++i)
    if (src[i] != dst[i])
      std::memcpy(held.data() + i * bytes_per_block, pool + src[i] * bytes_per_block,
                  bytes_per_block);
  for (int64_t i = 0; i < num; ++i)
    if (src[i] != dst[i])
      std::memcpy(pool + dst[i] * bytes_per_block, held.data() + i * bytes_per_block,
                  bytes_per_block);
}

}  // namespace jpaged

// --- XLA's side ---

namespace ffi = xla::ffi;

static ffi::Error block_copy(ffi::Buffer<ffi::S32> src, ffi::Buffer<ffi::S32> dst,
                             ffi::RemainingArgs, ffi::RemainingRets pools) {
  for (size_t i = 0; i < pools.size(); ++i) {
    auto pool = pools.get<ffi::AnyBuffer>(i);
    if (pool.has_error()) return pool.error();
    ffi::AnyBuffer& blocks = **pool;
    const int64_t num_blocks = blocks.dimensions()[0];
    if (num_blocks == 0) continue;
    jpaged::copy_blocks(static_cast<char*>(blocks.untyped_data()),
                        static_cast<int64_t>(blocks.size_bytes()) / num_blocks, src.typed_data(),
                        dst.typed_data(), static_cast<int64_t>(src.element_count()));
  }
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER_SYMBOL(jpaged_block_copy, block_copy,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .RemainingArgs()
                                  .RemainingRets());
