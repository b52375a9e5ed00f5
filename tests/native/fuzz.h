// What all harnesses share: chance, threads, and a loop. Include it behind the kernel.

#pragma once

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <thread>
#include <vector>

#include "numbers.h"

static std::mt19937 rng;

static int64_t draw(int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(rng);
}

template <class T>
static T pick(std::initializer_list<T> of) {
  return of.begin()[draw(0, static_cast<int64_t>(of.size()) - 1)];
}

template <class T>
static std::vector<T> draw_numbers(int64_t size) {
  std::normal_distribution<float> normal;
  std::vector<T> numbers(size);
  for (auto& x : numbers) jpaged::narrow(normal(rng), &x);
  return numbers;
}

struct Threads {
  std::vector<std::thread> all;
  void run(std::function<void()> task) { all.emplace_back(std::move(task)); }
  ~Threads() {
    for (auto& thread : all) thread.join();
  }
};

template <class Call>
static void run_alone(const Call& call) {
  run(call, 1, [](std::function<void()>) { std::abort(); });
}

template <class Call>
static void run_on_threads(const Call& call) {
  Threads threads;
  run(call, draw(2, 4), [&](std::function<void()> task) { threads.run(task); });
}

template <class T>
static void check_same(const std::vector<T>& one, const std::vector<T>& other) {
  if (one.empty() || std::memcmp(one.data(), other.data(), one.size() * sizeof(T)) == 0) return;
  std::puts("threads change bits");
  std::exit(1);
}

// Makes as many calls as the first argument says, drawn from the seed that the second is.
static int fuzz(int argc, char** argv, const std::function<void()>& call) {
  const int num_calls = argc > 1 ? std::atoi(argv[1]) : 100;
  rng.seed(argc > 2 ? std::atoi(argv[2]) : 0);
  for (int i = 0; i < num_calls; ++i) call();
  std::puts("ok");
  return 0;
}
