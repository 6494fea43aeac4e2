// The CUDA implementation of kvcache_plugins::encode_tokens (schema: kvcache_plugins/kernels/ops.py).
//
// Whether numbers are finite and metadata fit fp16 is known on the device only. A run of many tokens is searched
// first, which waits for the device: it is a prompt. A few tokens are encoded without waiting; metadata beyond fp16
// saturate there, which is reported later (device_faults.h).
#include "encode_inputs.h"

namespace kvcache {
namespace {

constexpr int64_t kMostUnsearched = 16;  // tokens

bool encode_tokens(at::Tensor records, const at::Tensor& states, bool is_key, at::IntArrayRef integers, int64_t start,
                   const OptionalTensor& cos, const OptionalTensor& sin) {
  const Device device(states);
  report_faults(device);
  const auto dtype = states.scalar_type();
  if (dtype != at::kFloat && dtype != at::kBFloat16 && dtype != at::kHalf) return false;
  EncodeArguments a = describe_encoding(device, records, states, 0, is_key, integers, start, states.size(2));
  set_rotation(a, cos, sin);
  if (!is_encodable(a)) return false;
  if (a.count == 0 || states.size(0) * states.size(1) == 0) return true;
  if (a.count > kMostUnsearched && a.metadata_bytes == 2 && !device.is_capturing() &&
      holds_large_numbers(device, a, records))
    return false;
  device.check(encode_slots(a, static_cast<int>(states.size(0)), static_cast<int>(states.size(1)), device.stream()));
  return true;
}

}  // namespace
}  // namespace kvcache

TORCH_LIBRARY_IMPL(KVCACHE_LIBRARY, KVCACHE_DISPATCH_KEY, library) {
  library.impl("encode_tokens", TORCH_FN(kvcache::encode_tokens));
}
