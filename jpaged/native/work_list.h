// The work of a call of attention, in items for threads to take.
//
// A prompt's queries go in items of neighbours, which share their tiles of keys. A decoding row is one
// item, but for two kinds, which are cut into segments and merged in the end: a long one that several
// threads are to share, and neighbours whose tables begin with the same blocks (samples of a prompt,
// prompts with a common prefix). What these share is read once for all of them.

#pragma once

#include <algorithm>
#include <vector>

#include "attention.h"

namespace jpaged {

// Rows (queries times heads) that an item of several queries aims at: many share the reading of keys,
// but each thread is to find ITEMS_A_THREAD. What is shared by rows is in the smallest.
constexpr int FEWEST_ROWS = 96, MOST_ROWS = 384;
constexpr int ITEMS_A_THREAD = 8;
constexpr int MIN_SHARED = 256;  // tiles of rows, below which one thread does it all
constexpr int MIN_SHARERS = 4;   // rows for which reading once pays for the merge

struct WorkList {
  std::vector<Item> items;      // the first take longest
  std::vector<Item> cut;        // whose results in `partials` are to be merged once all items are done
  std::vector<float> partials;  // of cut items, by segment
  std::vector<float*> targets;  // of shared segments, by query
};

// As many as `rows` allow, preferably in whole tiles of 16 rows.
inline int64_t queries_per_item(int64_t rows, int64_t group) {
  const int64_t most = std::max<int64_t>(1, rows / group);
  for (int64_t num = most; 2 * num > most; --num)
    if (num * group % 16 == 0) return num;
  return most;
}

// Every query that sees anything.
inline std::vector<Item> whole_items(const Call& call, int64_t num_threads) {
  std::vector<Item> items;
  const int64_t fair = call.query_start_loc[call.B] * call.H / (ITEMS_A_THREAD * num_threads);
  const int64_t per_item =
      queries_per_item(std::clamp<int64_t>(fair, FEWEST_ROWS, MOST_ROWS), call.group());
  for (int64_t b = 0; b < call.B; ++b) {
    const bool decodes = b < call.num_decode_rows;
    const int64_t first = decodes ? b : call.query_start_loc[b];
    const int64_t num = decodes ? 1 : call.query_start_loc[b + 1] - first;
    if (call.context_lens[b] < num) continue;  // a row that sees nothing
    for (int64_t at = 0; at < num; at += per_item) {
      const int64_t size = std::min(per_item, num - at);
      const int64_t position = call.context_lens[b] - num + at;
      const int64_t begin = call.first_visible(position) / SEGMENT;
      const int64_t end = (position + size + SEGMENT - 1) / SEGMENT;
      const int64_t num_heads = size == 1 ? call.K : 1;
      for (int64_t head = 0; head < call.K; head += num_heads)
        items.push_back({b, first + at, position, size, head, num_heads, begin, end, nullptr,
                         nullptr, nullptr});
    }
  }
  return items;
}

// Neighbouring decoding rows, and how many segments their tables have in common from the beginning.
struct Sharers {
  int64_t first, num, num_segments;
};

// The whole segments that two rows see and read from the same blocks.
inline int64_t num_common(const Call& call, int64_t row, int64_t other) {
  const int64_t most = std::min(call.context_lens[row], call.context_lens[other]) / SEGMENT;
  const int32_t *a = call.block_table + row * call.M, *b = call.block_table + other * call.M;
  int64_t num = 0;
  for (int64_t block = 0; num < most; ++num)
    for (; block * call.S < (num + 1) * SEGMENT; ++block)
      if (a[block] != b[block]) return num;
  return num;
}

inline std::vector<Sharers> find_sharers(const Call& call) {
  std::vector<Sharers> found;
  if (call.window > 0) return found;  // rows see different parts of a segment
  for (int64_t first = 0, next; first < call.num_decode_rows; first = next) {
    next = first + 1;
    const int64_t num = next < call.num_decode_rows ? num_common(call, first, next) : 0;
    if (num == 0) continue;
    while (next < call.num_decode_rows && num_common(call, first, next) >= num) ++next;
    if (next - first >= MIN_SHARERS) found.push_back({first, next - first, num});
  }
  return found;
}

// Items for what rows share. partials: each row's, by segment.
inline void add_shared(const Call& call, const Sharers& sharers,
                       const std::vector<float*>& partials, WorkList& list) {
  const int64_t row_size = Row::size(call.padded());
  const int64_t per_item = queries_per_item(FEWEST_ROWS, call.group());
  for (int64_t segment = 0; segment < sharers.num_segments; ++segment)
    for (int64_t at = 0; at < sharers.num; at += per_item)
      for (int64_t head = 0; head < call.K; ++head) {
        const int64_t row = sharers.first + at, num = std::min(per_item, sharers.num - at);
        float* const* targets = list.targets.data() + list.targets.size();
        for (int64_t i = 0; i < num; ++i)
          list.targets.push_back(partials[row + i] +
                                 (segment * call.H + head * call.group()) * row_size);
        // A position behind the segment: all of it is visible to all.
        list.items.push_back({row, row, (segment + 1) * SEGMENT, num, head, 1, segment,
                              segment + 1, nullptr, targets, nullptr});
      }
}

// num_threads becomes 1 where more do not pay.
inline WorkList make_work_list(const Call& call, int64_t& num_threads) {
  const std::vector<Item> whole = whole_items(call, num_threads);
  const std::vector<Sharers> sharers = find_sharers(call);
  int64_t num_segments = 0, num_tiles = 0, room = 0, num_targets = 0;
  for (const Item& item : whole) {
    num_segments += item.end - item.begin;
    num_tiles += call.num_rows(item) * (item.end - item.begin) * (SEGMENT / TILE);
  }
  if (num_tiles < MIN_SHARED) num_threads = 1;
  std::vector<int64_t> num_shared(call.num_decode_rows);  // segments, by row
  for (const Sharers& one : sharers) {
    std::fill_n(num_shared.begin() + one.first, one.num, one.num_segments);
    num_targets += one.num * one.num_segments * call.K;
  }
  const int64_t fair = std::max<int64_t>(1, num_segments / (4 * num_threads));
  const auto shared_of = [&](const Item& item) {
    return item.row < call.num_decode_rows ? num_shared[item.row] : 0;
  };
  const auto is_cut = [&](const Item& item) {
    const bool is_long = num_threads > 1 && item.num == 1 && item.end - item.begin > fair;
    return is_long || shared_of(item) > 0;
  };
  const int64_t row_size = Row::size(call.padded());
  for (const Item& item : whole)
    if (is_cut(item)) room += (item.end - item.begin) * call.num_rows(item) * row_size;
  WorkList list;
  list.partials.resize(room);
  list.targets.reserve(num_targets);  // items point into it
  std::vector<float*> by_row(call.num_decode_rows);
  float* free = list.partials.data();
  for (Item item : whole) {
    if (!is_cut(item)) {
      list.items.push_back(item);
      continue;
    }
    item.partials = free;
    list.cut.push_back(item);
    if (item.row < call.num_decode_rows) by_row[item.row] = free;
    const int64_t size = call.num_rows(item) * row_size, end = item.end;
    free += (end - item.begin) * size;
    const int64_t first = item.begin;
    for (item.begin += shared_of(item); item.begin < end; item.begin = item.end) {
      item.end = std::min(item.begin + fair, end);
      item.partials = list.cut.back().partials + (item.begin - first) * size;
      list.items.push_back(item);
    }
  }
  for (const Sharers& one : sharers) add_shared(call, one, by_row, list);
  // A prompt's last queries see most, and what is shared is seen by most: they come first.
  std::reverse(list.items.begin(), list.items.end());
  return list;
}

}  // namespace jpaged
