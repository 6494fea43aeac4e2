#include "decode_attention.cuh"

namespace kvcache {

int attend_kvquant_2(const AttentionArguments& a, int batch, void* stream) {
  return launch_known<KVQuant2>(a, batch, stream);
}

}  // namespace kvcache
