#include "decode_attention.cuh"

namespace kvcache {

int attend_16_rows(const AttentionArguments& a, int batch, void* stream) {
  return launch_early<attend_kernel<2, 8>>(attention_grid(a, batch), kThreads, shared_bytes(a, 2), stream, a);
}

}  // namespace kvcache
