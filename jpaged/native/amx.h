// The tiles (AMX) of a processor that has them: asking for them, and their shapes.

#pragma once

#include "pairs.h"

// JPAGED_NO_TILES: for tests of the other forms, on a processor that has them.
#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AMX_INT8__) && HAS_PAIRS && \
    defined(__linux__) && !defined(JPAGED_NO_TILES)
#include <sys/syscall.h>
#include <unistd.h>
#define HAS_TILES 1
#else
#define HAS_TILES 0
#endif

#include <array>
#include <cstdint>

#if HAS_TILES

namespace jpaged::tiles {

using pairs::SIDE;  // rows of a tile, and its float32 or int32 columns
constexpr int ROW_BYTES = 64;

// Linux lets a process use tiles once it has asked.
inline bool is_allowed() {
  constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
  static const bool allowed = syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
  return allowed;
}

// Keeps what was stored before tile loads, of which the compiler does not know that they read.
inline void finish_stores() { asm volatile("" ::: "memory"); }

// The shapes of this thread's tiles, until the end of the scope.
class Shapes {
 public:
  using Sizes = std::array<uint8_t, 8>;  // of the eight tiles

  // A change of shapes empties the tiles.
  void set(const Sizes& rows, const Sizes& row_bytes) {
    if (rows == rows_ && row_bytes == bytes_) return;
    rows_ = rows, bytes_ = row_bytes;
    struct alignas(64) Config {
      uint8_t palette, start, reserved[14];
      uint16_t bytes[16];
      uint8_t rows[16];
    } config{};
    config.palette = 1;
    for (int i = 0; i < 8; ++i) config.rows[i] = rows[i], config.bytes[i] = row_bytes[i];
    _tile_loadconfig(&config);
  }
  ~Shapes() { _tile_release(); }

 private:
  Sizes rows_{}, bytes_{};
};

}  // namespace jpaged::tiles

#endif
