#include "decode_attention.cuh"

namespace kvcache {

int attend_16_rows(const AttentionArguments& a, int batch, void* stream) {
  return launch_attention<attend_kernel<2, 8>>(a, batch, stream, 2);
}

}  // namespace kvcache
