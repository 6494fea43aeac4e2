#include "decode_attention.cuh"

namespace kvcache {

int attend_kivi_2(const AttentionArguments& a, int batch, void* stream) {
  return launch_known<Kivi2>(a, batch, stream);
}

}  // namespace kvcache
