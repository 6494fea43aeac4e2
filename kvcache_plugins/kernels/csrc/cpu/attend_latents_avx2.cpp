// Attention over latents for AVX2, FMA and F16C: the shared implementation with 8 lanes.
#if defined(__x86_64__)
#include "set_target.h"

KVCACHE_TARGET("avx2,fma,f16c")
// See decode_attention_avx2.cpp.
#define KVCACHE_LANES 8
#define KVCACHE_F16C
#include "attend_latents.inl"

namespace kvcache {

void attend_latents_avx2(const Task& task) { attend<FloatProducts>(task); }

}  // namespace kvcache

KVCACHE_END_TARGET
#endif
