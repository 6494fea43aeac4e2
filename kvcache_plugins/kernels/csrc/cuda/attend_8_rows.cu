#include "decode_attention.cuh"

namespace kvcache {

int attend_8_rows(const AttentionArguments& a, int batch, void* stream) {
  return launch_attention<attend_kernel<1, 8>>(a, batch, stream);
}

}  // namespace kvcache
