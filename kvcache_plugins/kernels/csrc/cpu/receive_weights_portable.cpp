// What tokens receive of attention, for any 64-bit machine: the shared implementation, for the base instruction set.
#include "receive_weights.inl"

namespace kvcache {

void receive_weights_portable(float* logits, int64_t length, float sink, bool is_strongest, float* received) {
  receive(logits, length, sink, is_strongest, received);
}

}  // namespace kvcache
