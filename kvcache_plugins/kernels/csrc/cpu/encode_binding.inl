// The CPU implementation of kvcache_plugins::encode_tokens (schema: kvcache_plugins/kernels/ops.py).
#include <torch/library.h>

#include "encode_run.h"

namespace kvcache {
namespace {

bool encode_tokens(at::Tensor records, const at::Tensor& states, bool is_key, at::IntArrayRef layout, int64_t start,
                   const OptionalTensor& cos, const OptionalTensor& sin) {
  TORCH_CHECK_VALUE(states.dim() == 4 && states.stride(3) == 1,
                    "Invalid states: expected (B, H, n, D) with contiguous channels, got ", states.sizes(), ".");
  const int64_t batch = states.size(0), heads = states.size(1), count = states.size(2), dim = states.size(3);
  const Preparation preparation = prepare(cos, sin, std::nullopt, batch, heads, dim);
  const Run run =
      describe_run(records, Exact(states), preparation, layout, is_key, batch, heads, dim, start, count);
  if (!is_plain(run)) return false;
  encode_run(run);
  return true;
}

}  // namespace
}  // namespace kvcache

TORCH_LIBRARY_IMPL(kvcache_plugins, CPU, library) { library.impl("encode_tokens", TORCH_FN(kvcache::encode_tokens)); }
