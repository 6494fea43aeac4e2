// Decode attention for any 64-bit machine: the shared implementation, compiled for the base instruction set.
// Bound: 4 lanes of fp32; see decode_attention_portable.inl.
#include "decode_attention_portable.inl"

namespace kvcache {

void decode_attention_portable(const Task& task) { run<NoProducts, NoProducts>(task); }

}  // namespace kvcache
