#include "decode_attention.cuh"

namespace kvcache {

int attend_kivi_4(const AttentionArguments& a, int batch, void* stream) {
  return launch_known<Kivi4>(a, batch, stream);
}

}  // namespace kvcache
