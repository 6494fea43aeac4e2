// Encoding for AVX2, FMA and F16C: the shared implementation with 8 lanes.
#if defined(__x86_64__)
#include "set_target.h"

KVCACHE_TARGET("avx2,fma,f16c")
// See decode_attention_avx2.cpp.
#define KVCACHE_LANES 8
#define KVCACHE_F16C
#include "encode_levels.inl"
#include "encode_unit.inl"

namespace kvcache {

UnitKernels unit_kernels_avx2() { return kUnitKernels; }

LevelKernels level_kernels_avx2() { return kLevelKernels; }

}  // namespace kvcache

KVCACHE_END_TARGET
#endif
