// Slots of keys or values as dense numbers, for attention of many queries, which is bound by products: a thread block
// decodes 64 slots (of wide heads 32) to shared memory and writes them out. Bound: the bytes written; not measured.
#include "decoding.cuh"
#include "launches.h"

namespace kvcache {

namespace {

// A number that is finite in `dtype`, too, where it is: rounded scales make codes stand for a little more than what was
// encoded, which may be the largest number of fp16.
KVCACHE_DEVICE float kept_finite(float value, int dtype) {
  const bool may_overflow = dtype == kFloat16 && fabsf(value) < infinity();
  return may_overflow ? fminf(fmaxf(value, -65504.0f), 65504.0f) : value;
}

}  // namespace

KVCACHE_KERNEL(256, 2) decode_kernel(const DecodeArguments a) {
  KVCACHE_SHARED(shared);
  float* tile = reinterpret_cast<float*>(shared);
  const int dim = a.side.head_dim, stride = tile_stride(dim), slots = tile_slots(dim);
  const int shift = power_of(slots);  // a division of 64 bits is a call
  const int batch = static_cast<int>(blockIdx.z), head = static_cast<int>(blockIdx.y);
  const int64_t begin = ((a.start >> shift) + blockIdx.x) << shift, start = begin / kBlockTokens * kBlockTokens;
  const int64_t low = begin > a.start ? begin : a.start;
  const int64_t high = begin + slots < a.stop ? begin + slots : a.stop;
  tile -= (begin - start) * stride;
  load_tile<true>(a.side, a.records, a.is_key != 0, batch, head, start, static_cast<int>(low - start),
                  static_cast<int>(high - start), tile, stride);
  const int64_t row = (static_cast<int64_t>(batch) * a.records.heads + head) * (a.stop - a.start) + low - a.start;
  const float* const first = tile + (low - start) * stride;
  const int numbers = static_cast<int>(high - low) * dim;
#pragma unroll 4
  for (int i = static_cast<int>(threadIdx.x); i < numbers; i += static_cast<int>(blockDim.x))
    write_number(a.output, a.dtype, row * dim + i, kept_finite(first[i / dim * stride + i % dim], a.dtype));
}

int decode_slots(const DecodeArguments& a, int batch, void* stream) {
  const int slots = tile_slots(a.side.head_dim);
  dim3 grid;
  grid.x = static_cast<unsigned>((a.stop + slots - 1) / slots - a.start / slots);
  grid.y = static_cast<unsigned>(a.records.heads);
  grid.z = static_cast<unsigned>(batch);
  return launch<decode_kernel>(grid, 256, 4 * slots * tile_stride(a.side.head_dim), stream, a);
}

}  // namespace kvcache
