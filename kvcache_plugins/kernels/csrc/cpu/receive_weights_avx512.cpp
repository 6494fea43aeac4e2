// What tokens receive of attention, for AVX-512 F, BW, VL and DQ: the shared implementation with 16 lanes.
#if defined(__x86_64__)
#include "set_target.h"

KVCACHE_TARGET("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")
// See decode_attention_avx2.cpp.
#define KVCACHE_LANES 16
#define KVCACHE_F16C
#include "receive_weights.inl"

namespace kvcache {

void receive_weights_avx512(float* logits, int64_t length, float sink, bool is_strongest, float* received) {
  receive(logits, length, sink, is_strongest, received);
}

}  // namespace kvcache

KVCACHE_END_TARGET
#endif
