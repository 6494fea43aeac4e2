#include "decode_attention.cuh"

namespace kvcache {

int attend_8_rows_wide(const AttentionArguments& a, int batch, void* stream) {
  return launch_attention<attend_kernel<1, 16>>(a, batch, stream);
}

}  // namespace kvcache
