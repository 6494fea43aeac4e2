// New tokens into their places in the records, in one launch, and the search of a prompt for numbers that only torch
// encodes. Bound: the bytes of the states; not measured.
#include "encoding.cuh"
#include "launches.h"

namespace kvcache {

KVCACHE_KERNEL(kEncodeThreads, 2) encode_kernel(const EncodeArguments a) {
  KVCACHE_SHARED(shared);
  encode_unit(a, static_cast<int>(blockIdx.x), shared);
}

int encode_slots(const EncodeArguments& a, int batch, int heads, void* stream) {
  dim3 grid;
  grid.x = static_cast<unsigned>(a.units());
  grid.y = static_cast<unsigned>(heads);
  grid.z = static_cast<unsigned>(batch);
  return launch<encode_kernel>(grid, kEncodeThreads, encoding_shared_bytes(a), stream, a);
}

struct SearchArguments {
  EncodeArguments states;
  float limit;
  int32_t* flag;
};

KVCACHE_KERNEL(kEncodeThreads, 2) search_kernel(const SearchArguments s) {
  const EncodeArguments& a = s.states;
  const Tokens tokens{a, blockIdx.z, blockIdx.y};
  const int thread = static_cast<int>(threadIdx.x), warps = kEncodeThreads / 32;
  const int64_t step = static_cast<int64_t>(gridDim.x) * warps;
  bool is_plain = true;
  for (int64_t token = blockIdx.x * static_cast<int64_t>(warps) + thread / 32; token < a.count; token += step) {
#pragma unroll 4
    for (int channel = thread % 32; channel < a.head_dim; channel += 32)
      is_plain &= fabsf(tokens.stored(a.start + token, channel)) < s.limit;
  }
  if (!is_plain) raise_flag(s.flag);
}

int find_large_numbers(const EncodeArguments& a, int batch, int heads, float limit, int32_t* flag, void* stream) {
  const int64_t blocks = (a.count * a.head_dim + 16 * kEncodeThreads - 1) / (16 * kEncodeThreads);
  dim3 grid;
  grid.x = static_cast<unsigned>(blocks < 64 ? blocks : 64);
  grid.y = static_cast<unsigned>(heads);
  grid.z = static_cast<unsigned>(batch);
  return launch<search_kernel>(grid, kEncodeThreads, 0, stream, SearchArguments{a, limit, flag});
}

}  // namespace kvcache
