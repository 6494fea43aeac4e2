// Encoding of tokens: the interface between the bindings, which know torch, and the kernels, which do not.
#pragma once

#include "decode_attention.h"

namespace kvcache {

namespace {  // every source file is compiled for another machine

// a * b + c, rounded twice whatever the compiler may contract: the product passes through memory, and so does c, which
// may be one, too.
inline __attribute__((always_inline)) float multiply_add_separately(float a, float b, float c) {
  float product = a * b;
  asm volatile("" : "+m"(product), "+m"(c));
  return product + c;
}

}  // namespace

// The integers of a layout, in the order of `encode_tokens` in ops.py.
struct Layout {
  int64_t nbits, format, head_dim, group_tokens, width, metadata_bytes, interleaved;
  int64_t codes_offset, scale_offset, minimum_offset;
  __attribute__((always_inline)) int64_t padded_dim() const { return (head_dim + 15) / 16 * 16; }
};

// Exact tokens of one row and head: numbers of `dtype` (Dtype), `stride` of them from one token to the next.
struct Rows {
  const void* data;
  int32_t dtype;
  int64_t stride;
};

struct UnitKernels {
  // `count` tokens as fp32 `[count][dim]`.
  void (*load)(const Rows& rows, int64_t count, int64_t dim, float* out);
  // Whether all numbers lie between -limit and limit; NaN does not.
  bool (*are_below)(const Rows& rows, int64_t count, int64_t dim, float limit);
  // Writes `count` tokens `[count][head_dim]` from slot `start` on: codes and metadata, into records of which the first
  // is that of slot 0. They are whole groups, in one block or, where groups span several, one group.
  void (*encode)(const float* states, int64_t start, int64_t count, uint8_t* records, int64_t record_bytes,
                 const Layout& layout, bool is_key);
};

UnitKernels unit_kernels_portable();
UnitKernels unit_kernels_avx2();
UnitKernels unit_kernels_avx512();

}  // namespace kvcache
