// The kernels of decode attention and their launches. One launch attends, its thread blocks sharing the slots of every
// row and head; a second merges what they found.
#pragma once

#include "fast_attention.cuh"
#include "launches.h"

namespace kvcache {

// Up to `8 kColumns` query rows, values of up to `16 kTiles` channels.
template <int kColumns, int kTiles>
KVCACHE_KERNEL(kThreads, (kColumns * kTiles == 8 ? 3 : 2)) attend_kernel(const AttentionArguments a) {
  KVCACHE_SHARED(shared);
  const Rows rows = Rows::mine(a);
  const int split = static_cast<int>(blockIdx.x);
  if (split < a.fast_splits) {
    attend_fast<kColumns, kTiles>(a, rows, shared);
  } else {
    attend_general<false>(a, rows, shared, split - a.fast_splits, split);
  }
}

// Bytes of dynamic shared memory of the attending kernel; `columns` 0 stands for the general one.
inline int shared_bytes(const AttentionArguments& a, int columns) {
  const int general = GeneralMemory::bytes(a);
  if (columns == 0) return general;
  const int fast = FastMemory(a, columns).bytes;
  return fast > general ? fast : general;
}

inline dim3 attention_grid(const AttentionArguments& a, int batch) {
  dim3 grid;
  grid.x = static_cast<unsigned>(a.splits());
  grid.y = static_cast<unsigned>(a.records.heads * a.chunks);
  grid.z = static_cast<unsigned>(batch);
  return grid;
}

}  // namespace kvcache
