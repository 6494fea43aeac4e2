// Attention over latents for any 64-bit machine: the shared implementation, compiled for the base instruction set.
#include "attend_latents.inl"

namespace kvcache {

void attend_latents_portable(const Task& task) { attend<FloatProducts>(task); }

}  // namespace kvcache
