#include "decode_attention.cuh"

namespace kvcache {

int attend_two_bits(const AttentionArguments& a, int batch, void* stream) {
  return launch<attend_kernel<1, 8, true>>(attention_grid(a, batch), kThreads, shared_bytes(a, 1), stream, a);
}

}  // namespace kvcache
