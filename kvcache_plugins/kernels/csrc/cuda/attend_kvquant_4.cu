#include "decode_attention.cuh"

namespace kvcache {

int attend_kvquant_4(const AttentionArguments& a, int batch, void* stream) {
  return launch_known<KVQuant4>(a, batch, stream);
}

}  // namespace kvcache
