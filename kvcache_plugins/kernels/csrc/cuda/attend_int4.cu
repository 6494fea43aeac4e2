#include "decode_attention.cuh"

namespace kvcache {

int attend_int4(const AttentionArguments& a, int batch, void* stream) { return launch_known<Int4>(a, batch, stream); }

}  // namespace kvcache
