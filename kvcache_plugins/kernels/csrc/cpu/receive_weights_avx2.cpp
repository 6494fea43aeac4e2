// What tokens receive of attention, for AVX2 and FMA: the shared implementation with 8 lanes.
#if defined(__x86_64__)
#include "set_target.h"

KVCACHE_TARGET("avx2,fma,f16c")
// See decode_attention_avx2.cpp.
#define KVCACHE_LANES 8
#define KVCACHE_F16C
#include "receive_weights.inl"

namespace kvcache {

void receive_weights_avx2(float* logits, int64_t length, float sink, bool is_strongest, float* received) {
  receive(logits, length, sink, is_strongest, received);
}

}  // namespace kvcache

KVCACHE_END_TARGET
#endif
