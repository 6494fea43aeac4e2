#include "decode_attention.cuh"

namespace kvcache {

// No fast path: fp32 queries, and layouts that it does not know.
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

KVCACHE_KERNEL(kMergeThreads, 2) merge_kernel(const AttentionArguments a) {
  KVCACHE_SHARED(shared);
  merge_splits(a, shared);
}

int attend_general_rows(const AttentionArguments& a, int batch, void* stream) {
  const bool is_wide = tile_slots(GeneralMemory::larger_dim(a)) < kBlockTokens;
  const dim3 grid = attention_grid(a, batch);
  return is_wide ? launch_early<attend_general_wide_kernel>(grid, kThreads, shared_bytes(a, 0), stream, a)
                 : launch_early<attend_general_kernel>(grid, kThreads, shared_bytes(a, 0), stream, a);
}

int merge_rows(const AttentionArguments& a, int batch, void* stream) {
  dim3 grid;
  grid.x = static_cast<unsigned>(static_cast<int64_t>(batch) * a.records.heads * a.group * a.query_length);
  return launch_early<merge_kernel>(grid, kMergeThreads, merge_bytes(a), stream, a);
}

int attention_shared_bytes(const AttentionArguments& a, int columns) { return shared_bytes(a, columns); }
int known_attention_shared_bytes(const AttentionArguments& a) { return known_shared_bytes(a); }

}  // namespace kvcache
