#include "decode_attention.cuh"

namespace kvcache {

int attend_kivi_4_rotated(const AttentionArguments& a, int batch, void* stream) {
  return launch_known<Kivi4Rotated>(a, batch, stream);
}

}  // namespace kvcache
