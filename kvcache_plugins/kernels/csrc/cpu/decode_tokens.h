// Decoding of slots into a dense tensor: the interface between the binding, which knows torch, and the kernels.
#pragma once

#include "decode_attention.h"

namespace kvcache {

// Writes slots [start, stop) of one (row, kv head) to `out` as [stop - start][head_dim] numbers of `dtype` (Dtype),
// rounded to nearest even from fp32.
using TokenDecoder = void (*)(const Side& side, bool is_key, int64_t start, int64_t stop, int32_t dtype, void* out);
void decode_tokens_portable(const Side& side, bool is_key, int64_t start, int64_t stop, int32_t dtype, void* out);
void decode_tokens_avx2(const Side& side, bool is_key, int64_t start, int64_t stop, int32_t dtype, void* out);
void decode_tokens_avx512(const Side& side, bool is_key, int64_t start, int64_t stop, int32_t dtype, void* out);

}  // namespace kvcache
