// What tokens receive of the attention of one query: the interface between the binding, which knows torch, and the
// kernels (measure_binding.inl).
#pragma once

#include <cstdint>

namespace kvcache {

// Turns `length` masked logits into weights that add up to one, less what `sink`, a logit without a value, takes, and
// adds these to `received`, or raises it to them. The logits are overwritten. Minus infinity, as a sink too, is
// nothing; a query that sees nothing, or whose logits are not finite, gives nothing.
using Receive = void (*)(float* logits, int64_t length, float sink, bool is_strongest, float* received);
void receive_weights_portable(float* logits, int64_t length, float sink, bool is_strongest, float* received);
void receive_weights_avx2(float* logits, int64_t length, float sink, bool is_strongest, float* received);
void receive_weights_avx512(float* logits, int64_t length, float sink, bool is_strongest, float* received);

Receive best_receive();  // of the instruction set of `best_kernel`

}  // namespace kvcache
