// Decoding of slots for any 64-bit machine: the shared implementation, compiled for the base instruction set.
#include "decode_tokens.inl"

namespace kvcache {

void decode_tokens_portable(const Side& side, bool is_key, int64_t start, int64_t stop, int32_t dtype, void* out) {
  decode_slots(side, is_key, start, stop, dtype, out);
}

}  // namespace kvcache
