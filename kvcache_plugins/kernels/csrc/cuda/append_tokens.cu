// A step of decoding in one launch: new tokens into the exact tails, and those that are due, new ones among them or
// not, into the records. One thread block per row, head, side and unit of what is due; the first of a side copies.
//
// A due token that is new is read from where it came from, since another thread block may not have copied it yet. No
// thread block writes what another one reads: what is due of a tail lies before the place of the new tokens.
// Bound: the latency of a launch and of a load; of more than a token, of three dependent passes.
#include "encoding_token.cuh"
#include "launches.h"

namespace kvcache {

KVCACHE_DEVICE void place_tokens(const PlaceArguments& a) {
  const int64_t batch = blockIdx.z, head = blockIdx.y;
  const uint16_t* from = a.from + batch * a.from_batch_stride + head * a.from_head_stride;
  uint16_t* to = a.to + batch * a.to_batch_stride + head * a.to_head_stride;
  for (int i = static_cast<int>(threadIdx.x); i < a.tokens * a.words; i += static_cast<int>(blockDim.x)) {
    const int token = i / a.words, word = i % a.words;
    to[token * a.to_token_stride + word] = from[token * a.from_token_stride + word];
  }
}

KVCACHE_DEVICE void append_side(const PlaceArguments& places, const EncodeArguments& due, int unit, uint8_t* shared) {
  if (unit == 0) place_tokens(places);
  if (is_one_token(due)) {
    encode_token(due, shared);
  } else if (due.count > 0) {
    encode_unit(due, unit, shared);
  }
}

KVCACHE_BOTH int thread_blocks(const EncodeArguments& due) { return due.count > 0 ? due.units() : 1; }

KVCACHE_KERNEL(kEncodeThreads, 2) append_kernel(const AppendArguments a) {
  KVCACHE_SHARED(shared);
  let_next_begin();  // attention, usually
  wait_for_previous();
  const int unit = static_cast<int>(blockIdx.x), keys = thread_blocks(a.key);
  // two calls, and not one on a side that was chosen, so that the arguments are read from where they are
  if (unit < keys) {
    append_side(a.key_new, a.key, unit, shared);
  } else {
    append_side(a.value_new, a.value, unit - keys, shared);
  }
}

inline int due_bytes(const EncodeArguments& due) {
  return is_one_token(due) ? token_shared_bytes(due) : encoding_shared_bytes(due);
}

int append_slots(const AppendArguments& a, int batch, int heads, void* stream) {
  dim3 grid;
  grid.x = static_cast<unsigned>(thread_blocks(a.key) + thread_blocks(a.value));
  grid.y = static_cast<unsigned>(heads);
  grid.z = static_cast<unsigned>(batch);
  const int key_bytes = due_bytes(a.key), value_bytes = due_bytes(a.value);
  return launch_early<append_kernel>(grid, kEncodeThreads, key_bytes > value_bytes ? key_bytes : value_bytes, stream, a);
}

}  // namespace kvcache
