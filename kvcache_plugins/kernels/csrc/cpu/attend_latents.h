// Attention over latents: the interface between the binding, which knows torch, and the kernels.
#pragma once

#include "decode_attention.h"

namespace kvcache {

// Query rows of one task, for all of which a block is decoded once: the heads of the largest models. With the blocks,
// their queries and sums of 512 channels are as much as a second-level cache of 1 MB holds.
constexpr int kMaxLatentRows = 128;

// A task of decode_attention (decode_attention.h) whose `key` are latents and whose `value` are rotated keys. A query
// row has the channels of both, the latents' first, and its logits are the sums of both products; what is summed up by
// the weights are the latents, so that `output` is [queries][key.head_dim]. There is no ALiBi.
void attend_latents_portable(const Task& task);
void attend_latents_avx2(const Task& task);
void attend_latents_avx512(const Task& task);  // needs what decode_attention_avx512 does

}  // namespace kvcache
