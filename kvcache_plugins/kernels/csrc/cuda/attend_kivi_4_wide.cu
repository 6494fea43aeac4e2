#include "decode_attention.cuh"

namespace kvcache {

int attend_kivi_4_wide(const AttentionArguments& a, int batch, void* stream) {
  return launch_known<Kivi4Wide>(a, batch, stream);
}

}  // namespace kvcache
