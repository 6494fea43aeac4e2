// From slots to rows of numbers in plain C++ with compiler vectors; included by one source file per instruction set.
//
// A block of 64 slots at a time is brought into a tile of fp32 (portable_decoding.inl). Keys lie there as
// [channel][token] and are turned over, a square of one vector's width at a time; rows are then rounded to the dtype
// asked for. Finite ones stay so: rounded scales make codes stand for a little more than what was encoded, which may be
// the largest number of fp16. Bound: the tile stays in the first-level cache, so one decoding operation per vector and
// the write of the result; the attention that reads the result does hundreds of operations per number.
#pragma once

#include "decode_tokens.h"
#include "narrow_numbers.inl"
#include "portable_decoding.inl"
#include "portable_transposition.inl"

namespace kvcache {
namespace {  // see portable_numbers.inl

// Writes a row of `count` fp32 numbers as `dtype`; `from` may be read up to a multiple of kLanes.
void write_row(const float* from, int64_t count, int32_t dtype, void* to, int64_t offset) {
  if (dtype == kFloat32) {
    std::memcpy(static_cast<float*>(to) + offset, from, count * sizeof(float));
    return;
  }
  typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));
  uint16_t* out = static_cast<uint16_t*>(to) + offset;
  for (int64_t i = 0; i < count; i += kLanes) {
    const Floats v = load<Floats>(from + i);
    const Words words = dtype == kBFloat16 ? narrow_to_bfloat16(v) : narrow_finite_to_half(v);
    const Halves halves = __builtin_convertvector(words, Halves);
    __builtin_memcpy(out + i, &halves, sizeof(uint16_t) * smaller(kLanes, count - i));
  }
}

void decode_slots(const Side& side, bool is_key, int64_t start, int64_t stop, int32_t dtype, void* out) {
  Workspace ws;
  alignas(64) float turned[kBlockTokens * kMaxHeadDim];  // keys as [token][padded_dim]
  const Decoder decode = choose_decoder(side, is_key);
  const int64_t dim = side.head_dim, width = side.padded_dim;
  std::memset(ws.tile, 0, sizeof(float) * kBlockTokens * width);  // channels of the padding are turned over too
  for (int64_t block = start / kBlockTokens * kBlockTokens; block < stop; block += kBlockTokens) {
    const int64_t low = larger(start, block), high = smaller(stop, block + kBlockTokens);
    load_block(side, is_key, decode, block, high - block, ws);
    const float* rows = ws.tile;  // [token][padded_dim]
    if (is_key) {
      for (int64_t d = 0; d < width; d += kLanes) {
        for (int64_t t = (low - block) / kLanes * kLanes; t < high - block; t += kLanes) {
          transpose_square(ws.tile + d * kBlockTokens + t, kBlockTokens, turned + t * width + d, width);
        }
      }
      rows = turned;
    }
    for (int64_t t = low; t < high; ++t) write_row(rows + (t - block) * width, dim, dtype, out, (t - start) * dim);
  }
}

}  // namespace
}  // namespace kvcache
