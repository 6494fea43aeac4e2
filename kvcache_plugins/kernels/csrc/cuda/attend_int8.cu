#include "decode_attention.cuh"

namespace kvcache {

int attend_int8(const AttentionArguments& a, int batch, void* stream) { return launch_known<Int8>(a, batch, stream); }

}  // namespace kvcache
