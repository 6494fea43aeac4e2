#include "decode_attention.cuh"

namespace kvcache {

int attend_kvquant_3(const AttentionArguments& a, int batch, void* stream) {
  return launch_known<KVQuant3>(a, batch, stream);
}

}  // namespace kvcache
