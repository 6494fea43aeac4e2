// The CUDA implementation of kvcache_plugins::decode_tokens (schema: kvcache_plugins/kernels/ops.py).
#include <ATen/ops/empty.h>

#include "binding_inputs.h"
#include "device_faults.h"

namespace kvcache {
namespace {

at::Tensor decode_tokens(const at::Tensor& records, at::TensorList segments, const c10::List<OptionalTensor>& extras,
                         const OptionalTensor& sink_start, at::IntArrayRef layout, bool is_key, int64_t start,
                         int64_t stop, at::ScalarType dtype) {
  const Device device(records);
  report_faults(device);
  KVCACHE_CHECK(records.dim() == 4, "rank", "records", 4, records.dim());
  const int64_t batch = records.size(0), heads = records.size(1);
  DecodeArguments a{};
  a.records = describe_records(records, batch, sink_start);
  const SideInputs inputs = describe(is_key ? "key" : "value", records, segments, extras, layout, kFloat32);
  KVCACHE_CHECK(0 <= start && start <= stop && stop <= inputs.length(), "slots", "decode_tokens",
                "a range inside [0, " + std::to_string(inputs.length()) + ")",
                std::to_string(start) + " to " + std::to_string(stop));
  KVCACHE_CHECK(dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf, "dtype", "the output",
                "float32, bfloat16 or float16", dtype);
  at::Tensor output = at::empty({batch, heads, stop - start, inputs.side.head_dim}, records.options().dtype(dtype));
  if (output.numel() == 0) return output;
  a.side = inputs.side;
  a.is_key = is_key;
  a.dtype = dtype_of(output, "the output");
  a.start = start;
  a.stop = stop;
  a.output = output.mutable_data_ptr();
  device.check(decode_slots(a, static_cast<int>(batch), device.stream()));
  return output;
}

}  // namespace
}  // namespace kvcache

TORCH_LIBRARY_IMPL(KVCACHE_LIBRARY, KVCACHE_DISPATCH_KEY, library) {
  library.impl("decode_tokens", TORCH_FN(kvcache::decode_tokens));
}
