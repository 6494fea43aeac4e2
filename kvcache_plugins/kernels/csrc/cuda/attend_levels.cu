#include "decode_attention.cuh"

namespace kvcache {

int attend_levels(const AttentionArguments& a, int batch, void* stream) {
  return launch_attention<attend_levels_kernel<8>>(a, batch, stream);
}

}  // namespace kvcache
