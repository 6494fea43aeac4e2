// The kernels of decode attention and their launches. One launch attends, its thread blocks sharing the slots of every
// row and head; a second merges what they found.
#pragma once

#include "launches.h"
#include "level_attention.cuh"

namespace kvcache {

// Up to `8 kColumns` query rows, values of up to `16 kTiles` channels.
template <int kColumns, int kTiles>
KVCACHE_KERNEL(kThreads, (kColumns * kTiles == 8 ? 4 : 2)) attend_kernel(const AttentionArguments a) {
  KVCACHE_SHARED(shared);
  wait_for_previous();
  const Rows rows = Rows::mine(a);
  // The general splits come first: they take longest, and would be waited for at the end.
  const int split = static_cast<int>(blockIdx.y), general = a.general_splits + a.sink_splits;
  if (split < general) {
    attend_general<false>(a, rows, shared, split, split);
  } else {
    attend_fast<kColumns, kTiles>(a, shared, split - general, split);
  }
}

// Thread blocks for which a kernel is compiled: before compute capability 9.0 there is no shared memory for five.
constexpr int resident_here(int wanted) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
  return wanted < 4 ? wanted : 4;
#else
  return wanted;
#endif
}

// Up to 8 query rows, a format of known_formats.h.
template <typename Format>
KVCACHE_KERNEL(kThreads, resident_here(Format::kResident)) attend_known_kernel(const AttentionArguments a) {
  KVCACHE_SHARED(shared);
  wait_for_previous();
  const AttentionArguments known = as_known<Format>(a);
  const int split = static_cast<int>(blockIdx.y);
  if constexpr (Format::kKind == kNonUniform) {
    attend_over_levels<Format::kChunks, Format>(known, Rows::mine(known), shared, split, split);
  } else {
    attend_fast<1, Format::kChunks, Format>(known, shared, split, split);
  }
}

// KVQuant: up to 8 query rows, values of up to `16 kTiles` channels.
template <int kTiles>
KVCACHE_KERNEL(kThreads, 2) attend_levels_kernel(const AttentionArguments a) {
  KVCACHE_SHARED(shared);
  wait_for_previous();
  const Rows rows = Rows::mine(a);
  const int split = static_cast<int>(blockIdx.y), general = a.general_splits + a.sink_splits;
  if (split < general) {
    attend_general<true>(a, rows, shared, split, split);
  } else {
    attend_over_levels<kTiles>(a, rows, shared, split - general, split);
  }
}

// Bytes of dynamic shared memory of a kernel of known_formats.h.
inline int known_shared_bytes(const AttentionArguments& a) {
  return a.key.format == kNonUniform ? LevelMemory(a).bytes : FastMemory(a, 1).bytes;
}

// Bytes of that of the others; `columns` 0 stands for the general one.
inline int shared_bytes(const AttentionArguments& a, int columns) {
  const int general = GeneralMemory::bytes(a);
  if (columns == 0) return general;
  const int fast = a.key.format == kNonUniform ? LevelMemory(a).bytes : FastMemory(a, columns).bytes;
  return fast > general ? fast : general;
}

inline dim3 attention_grid(const AttentionArguments& a, int batch) {
  dim3 grid;
  grid.x = static_cast<unsigned>(static_cast<int64_t>(batch) * a.records.heads * a.chunks);  // fastest
  grid.y = static_cast<unsigned>(a.splits());
  return grid;
}

template <typename Format>
int launch_known(const AttentionArguments& a, int batch, void* stream) {
  return launch_early<attend_known_kernel<Format>>(attention_grid(a, batch), kThreads, known_shared_bytes(a), stream,
                                                   a);
}

}  // namespace kvcache
