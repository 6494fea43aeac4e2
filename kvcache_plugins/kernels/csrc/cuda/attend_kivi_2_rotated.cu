#include "decode_attention.cuh"

namespace kvcache {

int attend_kivi_2_rotated(const AttentionArguments& a, int batch, void* stream) {
  return launch_known<Kivi2Rotated>(a, batch, stream);
}

}  // namespace kvcache
