// The CPU implementation of kvcache_plugins::decode_tokens (schema: kvcache_plugins/kernels/ops.py): checks the
// tensors, cuts the slots into runs of blocks of one (row, kv head), and decodes them on torch's threads.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <string>

#include "binding_inputs.h"
#include "decode_tokens.h"
#include "instruction_set.h"
#include "parallel_tasks.h"

namespace kvcache {
namespace {

constexpr int64_t kRunTokens = 8 * kBlockTokens;  // so that the rotation tables of a run are made once
constexpr int64_t kSerialSlots = 1 << 15;         // decoded in about the time it takes to wake a thread

TokenDecoder choose_decoder() {
  const std::string name = instruction_set();
#if defined(__x86_64__)
  if (name == "avx512") return decode_tokens_avx512;
  if (name == "avx2") return decode_tokens_avx2;
#endif
  return decode_tokens_portable;
}

at::Tensor decode_tokens(const at::Tensor& records, at::TensorList segments, const c10::List<OptionalTensor>& extras,
                         const OptionalTensor& sink_start, at::IntArrayRef layout, bool is_key, int64_t start,
                         int64_t stop, at::ScalarType dtype) {
  const TokenDecoder decoder = choose_decoder();
  check_records(records);
  const int64_t batch = records.size(0), heads = records.size(1);
  const at::Tensor scalar = at::empty({0}, records.options().dtype(dtype));
  const int32_t out_dtype = dtype_of(scalar, "the output");
  const Inputs inputs =
      describe(is_key ? "key" : "value", records, segments, extras, layout, sinks_or(extras, scalar));
  KVCACHE_CHECK(start >= 0 && start <= stop && stop <= length_of(inputs), "slots", "decode_tokens",
                "a range inside [0, " + std::to_string(length_of(inputs)) + ")",
                std::to_string(start) + " to " + std::to_string(stop));
  const int64_t* starts = check_sink_start(sink_start, batch);
  const int64_t count = stop - start, dim = inputs.side.head_dim;
  at::Tensor output = at::empty({batch, heads, count, dim}, scalar.options());
  char* const data = static_cast<char*>(output.mutable_data_ptr());
  const int64_t row_bytes = dim * output.element_size();
  const int64_t first_run = start / kRunTokens, runs = (stop + kRunTokens - 1) / kRunTokens - first_run;
  run_parallel(count > 0 ? batch * heads * runs : 0, output.numel() < kSerialSlots, [&](int64_t task) {
    const int64_t head = task / runs, run = first_run + task % runs;
    const int64_t low = std::max(start, run * kRunTokens), high = std::min(stop, (run + 1) * kRunTokens);
    decoder(side_of(inputs, records, head / heads, head % heads, starts), is_key, low, high, out_dtype,
            data + (head * count + low - start) * row_bytes);
  });
  return output;
}

}  // namespace
}  // namespace kvcache

TORCH_LIBRARY_IMPL(kvcache_plugins, CPU, library) { library.impl("decode_tokens", TORCH_FN(kvcache::decode_tokens)); }
