#include "decode_attention.cuh"

namespace kvcache {

int attend_levels_wide(const AttentionArguments& a, int batch, void* stream) {
  return launch_early<attend_levels_kernel<16>>(attention_grid(a, batch), kThreads, shared_bytes(a, 1), stream, a);
}

}  // namespace kvcache
