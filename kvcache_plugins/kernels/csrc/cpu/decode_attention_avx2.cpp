// Decode attention for AVX2, FMA and F16C: the shared implementation with 8 lanes, compiled for that target
// alone so that one library serves every machine. Bound: that of avx2_floats.h for float8 and, for bf16 queries, of
// avx2_products.h; else two fused multiply-adds of 8 lanes a cycle, see decode_attention_portable.inl.
#if defined(__x86_64__)
#pragma GCC target("avx2,fma,f16c")
// The pragma does not define __AVX2__ and __F16C__ in C++ before GCC 13.
#define KVCACHE_LANES 8
#define KVCACHE_F16C
#include "decode_attention_portable.inl"

#include "avx2_floats.h"

namespace kvcache {

void decode_attention_avx2(const Task& task) { run<KeyProducts, ValueProducts>(task); }

}  // namespace kvcache
#endif
