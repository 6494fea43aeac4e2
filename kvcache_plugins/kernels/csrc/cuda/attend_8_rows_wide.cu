#include "decode_attention.cuh"

namespace kvcache {

int attend_8_rows_wide(const AttentionArguments& a, int batch, void* stream) {
  return launch_early<attend_kernel<1, 16>>(attention_grid(a, batch), kThreads, shared_bytes(a, 1), stream, a);
}

}  // namespace kvcache
