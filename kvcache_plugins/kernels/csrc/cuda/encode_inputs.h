// A run of tokens to be encoded as the ops receive it, checked and turned into what the kernels read.
#pragma once

#include <ATen/ops/addcmul.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <cmath>

#include "binding_inputs.h"
#include "device_faults.h"

namespace kvcache {
namespace {

constexpr int64_t kEncodeLayoutFields = 10;

// Whether torch, by whose `addcmul` the codecs rotate, rounds a product before it adds it: asked once per process.
inline bool is_fused(const at::Tensor& like) {
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

inline Exact exact_tokens(const at::Tensor& tensor, int64_t first) {
  const auto* data = static_cast<const uint8_t*>(tensor.const_data_ptr());
  return {data + first * tensor.stride(2) * tensor.element_size(), tensor.stride(0), tensor.stride(1),
          tensor.stride(2)};
}

// Slots [start, start + count) of the records, from tokens `first` on of `states` (B, H, n, D).
inline EncodeArguments describe_encoding(const Device& device, const at::Tensor& records, const at::Tensor& states,
                                         int64_t first, bool is_key, at::IntArrayRef integers, int64_t start,
                                         int64_t count) {
  TORCH_CHECK_VALUE(integers.size() == kEncodeLayoutFields, "Invalid layout: expected 10 integers, got ",
                    integers.size(), ".");
  const int64_t batch = states.size(0), heads = states.size(1), dim = states.size(3);
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
  check_device(records, "records");
  TORCH_CHECK_VALUE(records.dim() == 4 && records.size(0) == batch && records.size(1) == heads &&
                        records.is_contiguous() && records.scalar_type() == at::kByte &&
                        start >= 0 && count >= 0 &&
                        (start + count + kBlockTokens - 1) / kBlockTokens <= records.size(2),
                    "Invalid records: expected contiguous (", batch, ", ", heads, ", N, bytes) with room for ",
                    start + count, " tokens, got ", records.sizes(), ".");
  TORCH_CHECK_VALUE(dim >= 1 && dim <= kMaxHeadDim, "Invalid head_dim of states: expected 1 to ", kMaxHeadDim, ", got ",
                    dim, ".");
  TORCH_CHECK_VALUE(a.group_tokens >= 1 && dim == a.head_dim && states.stride(3) == 1 &&
                        start % a.group_tokens == 0 && count % a.group_tokens == 0,
                    "Invalid states: expected whole groups of ", a.group_tokens, " tokens of ", a.head_dim,
                    " contiguous channels, got ", count, " of ", dim, " from slot ", start, ".");
  TORCH_CHECK_VALUE(a.width >= 1 && dim % a.width == 0 && (a.metadata_bytes == 2 || a.metadata_bytes == 4),
                    "Invalid layout: a width of ", a.width, " and metadata of ", a.metadata_bytes,
                    " bytes do not go with ", dim, " channels.");
  const int64_t rows = kBlockTokens / std::min(a.group_tokens, kBlockTokens);
  const int64_t row_bytes = rows * a.width * a.metadata_bytes;
  TORCH_CHECK_VALUE(a.codes_offset >= 0 && a.codes_offset + plane_bytes(1, a.padded_dim) * a.nbits <= records.size(3) &&
                        std::max(a.scale_offset, a.minimum_offset) + row_bytes <= records.size(3),
                    "Invalid layout: a field lies outside of the ", records.size(3), " bytes of a record.");
  a.records = records.mutable_data_ptr<uint8_t>();
  a.record_bytes = records.size(3);
  a.batch_stride = records.stride(0);
  a.head_stride = records.stride(1);
  a.states = exact_tokens(states, first);
  a.newer_start = start + count;
  a.dtype = dtype_of(states, "states");
  a.is_key = is_key;
  a.start = start;
  a.count = count;
  a.overflow = flags_of(device) + kSaturated;
  return a;
}

// Whether the kernels know the layout; what they do not, torch encodes.
inline bool is_encodable(const EncodeArguments& a) {
  const int32_t group = a.group_tokens;
  return a.scale_offset >= 0 && (group > kBlockTokens ? group % kBlockTokens : kBlockTokens % group) == 0;
}

inline void set_rotation(EncodeArguments& a, const OptionalTensor& cos, const OptionalTensor& sin) {
  TORCH_CHECK_VALUE(cos.has_value() == sin.has_value(), "Invalid rotation: cos and sin come together or not at all.");
  if (!cos.has_value()) return;
  for (const at::Tensor& table : {*cos, *sin}) {
    check_device(table, "the rotation");
    TORCH_CHECK_VALUE(table.scalar_type() == at::kFloat && table.dim() == 2 && table.is_contiguous() &&
                          table.sizes() == cos->sizes() && table.size(0) > 0 && 2 * table.size(1) <= a.head_dim,
                      "Invalid rotation: expected two contiguous float32 tensors (period, up to ", a.head_dim / 2,
                      "), got ", cos->toString(), " ", cos->sizes(), " and ", sin->toString(), " ", sin->sizes(), ".");
  }
  a.cos = cos->const_data_ptr<float>();
  a.sin = sin->const_data_ptr<float>();
  a.period = static_cast<int32_t>(cos->size(0));
  a.pairs = static_cast<int32_t>(cos->size(1));
  a.is_fused = is_fused(*cos);
}

inline void set_factors(EncodeArguments& a, const OptionalTensor& factors, int64_t batch, int64_t heads) {
  if (!factors.has_value()) return;
  check_device(*factors, "factors");
  TORCH_CHECK_VALUE(a.cos == nullptr && factors->scalar_type() == at::kFloat && factors->is_contiguous() &&
                        factors->sizes() == at::IntArrayRef({batch, heads, 1, int64_t{a.head_dim}}),
                    "Invalid factors: expected contiguous float32 (", batch, ", ", heads, ", 1, ", a.head_dim,
                    ") and no rotation, got ", factors->toString(), " ", factors->sizes(), ".");
  a.factors = factors->const_data_ptr<float>();
}

// Whether a number is not finite, or so large that metadata may not fit fp16. Waits for the device.
inline bool holds_large_numbers(const Device& device, const EncodeArguments& a, const at::Tensor& records) {
  at::Tensor flag = at::zeros({1}, records.options().dtype(at::kInt));
  const float limit = a.cos != nullptr ? 65504.0f / 1.5f : 65504.0f;  // a rotation adds a factor of sqrt(2) at most
  device.check(find_large_numbers(a, static_cast<int>(records.size(0)), static_cast<int>(records.size(1)), limit,
                                  flag.mutable_data_ptr<int32_t>(), device.stream()));
  return flag.to(at::kCPU).const_data_ptr<int32_t>()[0] != 0;
}

}  // namespace
}  // namespace kvcache
