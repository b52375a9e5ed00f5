// Random copies within pools of the exact size, for the sanitizers to watch, beside copies that go through
// a second pool: any sources, no destination twice, blocks over themselves, padding.

#include "block_copy.cpp"

#include <algorithm>
#include <numeric>

#include "fuzz.h"

static void fuzz_call() {
  const int64_t N = draw(1, 9), bytes = pick<int64_t>({1, 2, 24, 64, 1000}), num = draw(0, N);
  std::vector<char> pool(N * bytes);
  for (auto& x : pool) x = static_cast<char>(draw(0, 255));
  std::vector<int32_t> src(num), dst(N);
  std::iota(dst.begin(), dst.end(), 0);
  std::shuffle(dst.begin(), dst.end(), rng);
  dst.resize(num);
  for (int64_t i = 0; i < num; ++i)
    src[i] = draw(0, 3) ? static_cast<int32_t>(draw(0, N - 1)) : dst[i];
  std::vector<char> wanted = pool;
  for (int64_t i = 0; i < num; ++i)
    std::copy_n(pool.begin() + src[i] * bytes, bytes, wanted.begin() + dst[i] * bytes);
  jpaged::copy_blocks(pool.data(), bytes, src.data(), dst.data(), num);
  if (pool == wanted) return;
  std::puts("a block is not the one it was copied from");
  std::exit(1);
}

int main(int argc, char** argv) { return fuzz(argc, argv, fuzz_call); }
