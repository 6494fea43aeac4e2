// Brings the records of a task into the second-level cache before they are worked on.
//
// Kernels read codes in strides and slowly, which keeps hardware from streaming them: 10 GB/s a core where this was
// measured (Zen 5; 32768 tokens, 8 heads of 128 channels). Two things help. Loads of all lines, front to back, are
// streamed at 40 GB/s, but nothing else is done meanwhile; prefetches between the instructions of a loop reach 18 GB/s
// and cost next to nothing, but slow the loop down if they have to do it all. So records come in batches: while one is
// worked on, loops prefetch lines of the next, one a step, and what they have not come to is loaded at its beginning.
// With AVX-512, attention to most formats then takes 17 to 37 % less time than with loads alone, by one thread.
#pragma once

#include "decode_attention.h"

namespace kvcache {
namespace {  // several translation units compile this for different machines

class RecordFetcher {
 public:
  static constexpr int kLineBytes = 64;
  static constexpr int64_t kBatchBytes = 48 << 10;  // a few records; two batches are small beside a second-level cache

  // A line for every step of a loop.
  struct Lines {
    const uint8_t* first;
    int64_t stride;

    void fetch(int step) const { __builtin_prefetch(first + step * stride, 0, 2); }
  };

  // Has loops prefetch the lines of `bytes` bytes from `first` on, and nothing else.
  void aim(const uint8_t* first, int64_t bytes) {
    next_ = first;
    end_ = first + bytes;
  }

  // Makes sure that `record` is in the cache; a task asks for its records in order. From this one on there are `count`,
  // of `bytes` bytes each.
  void begin(const uint8_t* record, int64_t count, int64_t bytes) {
    if (record < ready_) return;
    if (record > next_) next_ = record;
    const uint8_t* const last = record + count * bytes;
    const int64_t batch = bytes < kBatchBytes ? kBatchBytes / bytes * bytes : bytes;
    ready_ = last - record < batch ? last : record + batch;
    end_ = last - ready_ < batch ? last : ready_ + batch;
    uint8_t any = 0;
    for (; next_ < ready_; next_ += kLineBytes) any |= *next_;
    asm volatile("" ::"r"(any));  // or the compiler would drop the loads
  }

  // The next `count` lines; or one that is there, again and again, if the next batch is.
  Lines take(int count) {
    const Lines lines{next_, next_ < end_ ? kLineBytes : 0};
    next_ += count * lines.stride;  // maybe beyond the end, where prefetches do no harm
    return lines;
  }

 private:
  const uint8_t* ready_ = nullptr;  // what lies before it is in the cache
  const uint8_t* next_ = nullptr;   // the first line that is not, or not on its way
  const uint8_t* end_ = nullptr;    // of the batch after that
};

// Has the outliers of a block that comes soon fetched, and the bounds of those that come after. Lists of one head are
// short and far apart, so that hardware does not foresee them: with AVX-512, attention to what no cache held any more
// took a tenth longer (KVQuant of 4 bits, two threads of a Zen 5).
inline void fetch_outliers(const Side& side, int64_t start) {
  constexpr int64_t kListsAhead = 2 * kBlockTokens, kBoundsAhead = 2 * kListsAhead;
  if (side.outliers == nullptr) return;
  if (start + kBoundsAhead < side.packed_length)
    __builtin_prefetch(side.outlier_starts + (start + kBoundsAhead) / kBlockTokens * side.outlier_stride, 0, 2);
  if (start + kListsAhead >= side.packed_length) return;
  const OutlierList list = outliers_of(side, start + kListsAhead);
  constexpr int kPerLine = RecordFetcher::kLineBytes / sizeof(int32_t);
  for (const int32_t* entry = list.begin; entry < list.end; entry += kPerLine) __builtin_prefetch(entry, 0, 2);
}

// Has the codes of one side fetched for the block after the one at slot `start`: half of attention wants half of every
// record, and whole records are twice the memory. With AVX-512, int8 keys take 1.7 ms so, 3.0 if the block's own codes
// are loaded before they are worked on, and 3.3 without either (32 heads, 8192 tokens, one thread of a Zen 5).
inline void fetch_next(const Side& side, int64_t start, RecordFetcher& fetcher) {
  if (start + kBlockTokens >= side.packed_length) return fetcher.aim(nullptr, 0);
  const uint8_t* const record = side.records + (start / kBlockTokens + 1) * side.record_bytes;
  fetcher.aim(record + side.codes_offset, int64_t(kBlockTokens) * side.padded_dim * side.nbits / 8);
}

// Makes sure that the record of the block at slot `start` is in the cache, if its keys are packed; values that are
// packed further are few.
inline void fetch_records(const Task& task, int64_t start, RecordFetcher& fetcher) {
  fetch_outliers(task.key, start);
  fetch_outliers(task.value, start);
  if (task.logits != nullptr) return fetch_next(task.key, start, fetcher);
  if (task.weights != nullptr) return fetch_next(task.value, start, fetcher);
  const Side& key = task.key;
  const int64_t end = task.end < key.packed_length ? task.end : key.packed_length;
  if (start >= end) return;
  const int64_t blocks = (end - start + kBlockTokens - 1) / kBlockTokens;
  fetcher.begin(key.records + start / kBlockTokens * key.record_bytes, blocks, key.record_bytes);
}

}  // namespace
}  // namespace kvcache
