#include "decode_attention.cuh"

namespace kvcache {

int attend_float8(const AttentionArguments& a, int batch, void* stream) {
  return launch_known<Float8>(a, batch, stream);
}

}  // namespace kvcache
