// The CUDA implementation of kvcache_plugins::encode_tokens (schema: kvcache_plugins/kernels/ops.py).
//
// Whether numbers are finite and metadata fit fp16 is known on the device only. A run of many tokens is searched
// first, which waits for the device: it is a prompt, or one of many steps. A few tokens are encoded without waiting;
// metadata beyond fp16 saturate there, and the next search reports that they did.
#include <ATen/ops/addcmul.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <array>
#include <cmath>
#include <mutex>

#include "binding_inputs.h"

namespace kvcache {
namespace {

constexpr float kLargestHalf = 65504.0f;
constexpr int64_t kMostUnsearched = 16;  // tokens

// Whether torch, by whose `addcmul` the codecs rotate, rounds a product before it adds it: asked once per process.
bool is_fused(const at::Tensor& like) {
  static const bool answer = [&] {
    constexpr int count = 101;
    const at::Tensor numbers = at::empty({3, count}, at::kFloat);
    float* data = numbers.mutable_data_ptr<float>();
    for (int i = 0; i < 3 * count; ++i) data[i] = 1.0f / static_cast<float>(i % count + 3 + 4 * (i / count));
    const at::Tensor there = numbers.to(like.device());
    const at::Tensor sum = at::addcmul(there[2], there[0], there[1]).to(at::kCPU);
    int fused = 0;
    for (int i = 0; i < count; ++i)
      fused += sum.const_data_ptr<float>()[i] == std::fma(data[i], data[count + i], data[2 * count + i]);
    return fused == count;
  }();
  return answer;
}

// Two flags per device: metadata have saturated; the search has found something.
at::Tensor flags_of(const at::Tensor& like) {
  static std::mutex mutex;
  static std::array<at::Tensor, 64> flags;
  const std::lock_guard<std::mutex> lock(mutex);
  at::Tensor& found = flags.at(like.is_cpu() ? 0 : static_cast<size_t>(like.get_device()));
  if (!found.defined()) found = at::zeros({2}, like.options().dtype(at::kInt));
  return found;
}

bool encode_tokens(at::Tensor records, const at::Tensor& states, bool is_key, at::IntArrayRef integers, int64_t start,
                   const OptionalTensor& cos, const OptionalTensor& sin) {
  const Device device(states);
  TORCH_CHECK_VALUE(integers.size() == 10, "Invalid layout: expected 10 integers, got ", integers.size(), ".");
  const int64_t batch = states.size(0), heads = states.size(1), count = states.size(2), dim = states.size(3);
  EncodeArguments a{};
  a.nbits = static_cast<int32_t>(integers[0]);
  a.format = static_cast<int32_t>(integers[1]);
  a.head_dim = static_cast<int32_t>(integers[2]);
  a.padded_dim = (a.head_dim + 15) / 16 * 16;
  a.group_tokens = static_cast<int32_t>(integers[3]);
  a.width = static_cast<int32_t>(integers[4]);
  a.metadata_bytes = static_cast<int32_t>(integers[5]);
  a.interleaved = static_cast<int32_t>(integers[6]);
  a.codes_offset = static_cast<int32_t>(integers[7]);
  a.scale_offset = static_cast<int32_t>(integers[8]);
  a.minimum_offset = static_cast<int32_t>(integers[9]);
  TORCH_CHECK_VALUE(records.dim() == 4 && records.size(0) == batch && records.size(1) == heads &&
                        records.is_contiguous() && is_served(records) && records.scalar_type() == at::kByte &&
                        (start + count + kBlockTokens - 1) / kBlockTokens <= records.size(2),
                    "Invalid records: expected contiguous (", batch, ", ", heads, ", N, bytes) with room for ",
                    start + count, " tokens, got ", records.sizes(), ".");
  TORCH_CHECK_VALUE(a.group_tokens >= 1 && dim == a.head_dim && dim <= kMaxHeadDim && states.stride(3) == 1 &&
                        start % a.group_tokens == 0 && count % a.group_tokens == 0,
                    "Invalid states: expected whole groups of ", a.group_tokens, " tokens of ", a.head_dim,
                    " contiguous channels, got ", states.sizes(), " from slot ", start, ".");
  const bool is_known = states.scalar_type() == at::kFloat || states.scalar_type() == at::kBFloat16 ||
                        states.scalar_type() == at::kHalf;
  if (!is_known || a.scale_offset < 0 || a.width < 1 || dim % a.width != 0 ||
      (a.group_tokens > kBlockTokens ? a.group_tokens % kBlockTokens : kBlockTokens % a.group_tokens) != 0)
    return false;
  if (count == 0) return true;
  TORCH_CHECK_VALUE(cos.has_value() == sin.has_value(), "Invalid rotation: cos and sin come together or not at all.");
  if (cos.has_value()) {
    for (const at::Tensor& table : {*cos, *sin})
      TORCH_CHECK_VALUE(is_served(table) && table.scalar_type() == at::kFloat && table.dim() == 2 &&
                            table.is_contiguous() && table.sizes() == cos->sizes() && table.size(0) > 0 &&
                            2 * table.size(1) <= dim,
                        "Invalid rotation: expected two contiguous float32 tensors (period, up to ", dim / 2,
                        ") on the device of the states, got ", cos->toString(), " ", cos->sizes(), " and ",
                        sin->toString(), " ", sin->sizes(), ".");
    a.cos = cos->const_data_ptr<float>();
    a.sin = sin->const_data_ptr<float>();
    a.period = static_cast<int32_t>(cos->size(0));
    a.pairs = static_cast<int32_t>(cos->size(1));
    a.is_fused = is_fused(states);
  }
  a.records = records.mutable_data_ptr<uint8_t>();
  a.record_bytes = records.size(3);
  a.batch_stride = records.stride(0);
  a.head_stride = records.stride(1);
  a.states = states.const_data_ptr();
  a.state_batch_stride = states.stride(0);
  a.state_head_stride = states.stride(1);
  a.state_token_stride = states.stride(2);
  a.dtype = dtype_of(states, "states");
  a.is_key = is_key;
  a.start = start;
  a.count = count;
  const at::Tensor flags = flags_of(records);
  a.overflow = flags.mutable_data_ptr<int32_t>();
  if (count > kMostUnsearched && a.metadata_bytes == 2 && !device.is_capturing()) {
    // A rotation adds at most a factor of sqrt(2).
    const float limit = cos.has_value() ? kLargestHalf / 1.5f : kLargestHalf;
    device.check(find_large_numbers(a, static_cast<int>(batch), static_cast<int>(heads), limit, a.overflow + 1,
                                    device.stream()));
    const at::Tensor seen = flags.to(at::kCPU, /*non_blocking=*/false, /*copy=*/true);
    const int32_t saturated = seen.const_data_ptr<int32_t>()[0], large = seen.const_data_ptr<int32_t>()[1];
    if (saturated != 0 || large != 0) flags.zero_();
    TORCH_CHECK(saturated == 0, "Scales or minima beyond fp16 have been stored as the largest fp16 number, in one of "
                "the last steps: these keys or values need a cache with kernel='torch'.");
    if (large != 0) return false;
  }
  device.check(encode_slots(a, static_cast<int>(batch), static_cast<int>(heads), device.stream()));
  return true;
}

}  // namespace
}  // namespace kvcache

TORCH_LIBRARY_IMPL(KVCACHE_LIBRARY, KVCACHE_DISPATCH_KEY, library) {
  library.impl("encode_tokens", TORCH_FN(kvcache::encode_tokens));
}
