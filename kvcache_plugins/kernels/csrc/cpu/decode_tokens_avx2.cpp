// Decoding of slots for AVX2, FMA and F16C: the shared implementation with 8 lanes.
#if defined(__x86_64__)
#include "set_target.h"

KVCACHE_TARGET("avx2,fma,f16c")
// See decode_attention_avx2.cpp.
#define KVCACHE_LANES 8
#define KVCACHE_F16C
#include "decode_tokens.inl"

namespace kvcache {

void decode_tokens_avx2(const Side& side, bool is_key, int64_t start, int64_t stop, int32_t dtype, void* out) {
  decode_slots(side, is_key, start, stop, dtype, out);
}

}  // namespace kvcache

KVCACHE_END_TARGET
#endif
