#include "general_attention.cuh"

#include "decode_attention.cuh"
#include "merging.cuh"

namespace kvcache {

// Fp32 queries, layouts that the fast path does not know, and what that leaves.
KVCACHE_KERNEL(kThreads, 4) attend_general_kernel(const AttentionArguments a) {
  KVCACHE_SHARED(shared);
  wait_for_previous();
  const int split = static_cast<int>(blockIdx.y);
  attend_general<true>(a, Rows::mine(a), shared, split, split);
}

// The same for heads of more than 256 channels, of which shared memory holds fewer thread blocks.
KVCACHE_KERNEL(kThreads, 2) attend_general_wide_kernel(const AttentionArguments a) {
  KVCACHE_SHARED(shared);
  wait_for_previous();
  const int split = static_cast<int>(blockIdx.y);
  attend_general<true, kWideSlots>(a, Rows::mine(a), shared, split, split);
}

KVCACHE_KERNEL(kMergeThreads, 4) merge_kernel(const AttentionArguments a) {
  KVCACHE_SHARED(shared);
  merge_splits(a, shared);
}

int attend_general_rows(const AttentionArguments& a, int batch, void* stream) {
  const bool is_wide = tile_slots(GeneralMemory::larger_dim(a)) < kBlockTokens;
  const dim3 grid = attention_grid(a, batch, a.left_splits());
  const int shared = GeneralMemory::bytes(a);
  return is_wide ? launch_early<attend_general_wide_kernel>(grid, kThreads, shared, stream, a)
                 : launch_early<attend_general_kernel>(grid, kThreads, shared, stream, a);
}

int merge_rows(const AttentionArguments& a, int batch, void* stream) {
  dim3 grid;
  grid.x = static_cast<unsigned>(static_cast<int64_t>(batch) * a.records.heads * a.group * a.query_length);
  return launch_early<merge_kernel>(grid, kMergeThreads, merge_bytes(a), stream, a);
}

// All files are compiled for the same GPUs, and this kernel is launched whatever attends.
int attention_compiled_for() { return compiled_for<merge_kernel>(); }

int attention_shared_bytes(const AttentionArguments& a, int columns) { return fast_shared_bytes(a, columns); }

}  // namespace kvcache
