// Sharing the work of a call out to XLA's own threads.

#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>

namespace jpaged {

using Schedule = std::function<void(std::function<void()>)>;  // has a task run by some thread

// Looks, some 50 ns apart, at what others have done, before the thread sleeps: it takes longer to wake
// than others mostly take.
constexpr int SPINS = 2000;

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Runs work(i) for every i below num, here and on threads that come to help. Waits for what others
// have begun, not for a helper that has not come: the pool may be full of callers like this one.
inline void share_out(int64_t num, int64_t num_threads, const Schedule& schedule,
                      const std::function<void(int64_t)>& work) {
  struct Shared {
    std::atomic<int64_t> next{0}, done{0};
    std::mutex mutex;
    std::condition_variable is_done;
  };
  const auto shared = std::make_shared<Shared>();
  const auto help = [shared, num, &work] {  // who comes too late does not touch `work`
    for (int64_t i; (i = shared->next.fetch_add(1)) < num;) {
      work(i);
      if (shared->done.fetch_add(1) + 1 == num) {
        const std::lock_guard lock(shared->mutex);
        shared->is_done.notify_all();
      }
    }
  };
  for (int64_t i = 1; i < std::min(num, num_threads); ++i) schedule(help);
  help();
  for (int i = 0; i < SPINS; ++i, pause())
    if (shared->done.load() == num) return;
  std::unique_lock lock(shared->mutex);
  shared->is_done.wait(lock, [&] { return shared->done.load() == num; });
}

}  // namespace jpaged
