// The kernels of decode attention and their launches. One launch attends, its thread blocks sharing the slots of every
// row and head; a second merges what they found. Where the fast path leaves exact slots to the general kernel, that has
// been launched before.
#pragma once

#include "any_attention.cuh"
#include "known_attention.cuh"
#include "launches.h"
#include "level_attention.cuh"

namespace kvcache {

// Up to `8 kColumns` query rows, values of up to `16 kTiles` channels.
template <int kColumns, int kTiles>
KVCACHE_KERNEL(kThreads, (kColumns * kTiles == 8 ? 4 : 2)) attend_kernel(const AttentionArguments a) {
  KVCACHE_SHARED(shared);
  begin_early(a);
  const int split = static_cast<int>(blockIdx.y);
  attend_any<kColumns, kTiles>(a, shared, split, a.left_splits() + split);
}

#if defined(__CUDA_ARCH__)
constexpr int kCompiledFor = __CUDA_ARCH__ / 10;
#else
constexpr int kCompiledFor = 90;  // on the host, where it means nothing
#endif
template <typename Format>
constexpr int kResidentHere = resident_blocks(Format::kResident, kCompiledFor);

// Up to 8 query rows, a format of known_formats.h.
template <typename Format>
KVCACHE_KERNEL(kThreads, kResidentHere<Format>) attend_known_kernel(const AttentionArguments a) {
  KVCACHE_SHARED(shared);
  begin_early(a);
  const AttentionArguments known = as_known<Format>(a);
  const int split = static_cast<int>(blockIdx.y);
  if constexpr (Format::kKind == kNonUniform) {
    attend_over_levels<Format::kChunks, Format>(known, Rows::mine(known), shared, split, split);
  } else {
    attend_known<Format>(known, shared, split, split);
  }
}

// KVQuant: up to 8 query rows, values of up to `16 kTiles` channels.
template <int kTiles>
KVCACHE_KERNEL(kThreads, 2) attend_levels_kernel(const AttentionArguments a) {
  KVCACHE_SHARED(shared);
  begin_early(a);
  const int split = static_cast<int>(blockIdx.y);
  attend_over_levels<kTiles>(a, Rows::mine(a), shared, split, a.left_splits() + split);
}

// Bytes of dynamic shared memory.
inline int fast_shared_bytes(const AttentionArguments& a, int columns) {
  return a.key.format == kNonUniform ? LevelMemory(a).bytes : FastMemory(a, columns).bytes;
}

// Thread blocks of `splits` splits.
inline dim3 attention_grid(const AttentionArguments& a, int batch, int splits) {
  dim3 grid;
  grid.x = static_cast<unsigned>(static_cast<int64_t>(batch) * a.records.heads * a.chunks);  // fastest
  grid.y = static_cast<unsigned>(splits);
  return grid;
}

// Launches a kernel of the fast path.
template <auto kKernel>
int launch_attention(const AttentionArguments& a, int batch, void* stream, int columns = 1) {
  return launch_early<kKernel>(attention_grid(a, batch, a.fast_splits), kThreads, fast_shared_bytes(a, columns), stream,
                               a);
}

template <typename Format>
int launch_known(const AttentionArguments& a, int batch, void* stream) {
  return launch_attention<attend_known_kernel<Format>>(a, batch, stream);
}

}  // namespace kvcache
