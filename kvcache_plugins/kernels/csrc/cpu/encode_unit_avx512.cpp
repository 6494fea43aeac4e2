// Encoding for AVX-512 F, BW, VL and DQ: the shared implementation with 16 lanes.
#if defined(__x86_64__)
#include "set_target.h"

KVCACHE_TARGET("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c")
// See decode_attention_avx2.cpp.
#define KVCACHE_LANES 16
#define KVCACHE_F16C
#include "encode_levels.inl"
#include "encode_unit.inl"

namespace kvcache {

UnitKernels unit_kernels_avx512() { return kUnitKernels; }

LevelKernels level_kernels_avx512() { return kLevelKernels; }

}  // namespace kvcache

KVCACHE_END_TARGET
#endif
