// The keys or values as the op receives them, checked and turned into what the kernels read (attention_binding.inl).
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "decode_attention.h"

#define KVCACHE_CHECK(condition, what, name, expected, got) \
  TORCH_CHECK_VALUE(condition, "Invalid ", what, " of ", name, ": expected ", expected, ", got ", got)

namespace kvcache {
namespace {

using OptionalTensor = std::optional<at::Tensor>;

// The integers of a layout, in the order of `SideLayout` in ops.py.
enum LayoutField {
  kPackedLength,
  kNbits,
  kFormatField,
  kHeadDim,
  kGroupTokens,
  kWidth,
  kMetadataBytes,
  kInterleaved,
  kCodesOffset,
  kScaleOffset,
  kMinimumOffset,
  kPeriod,
  kRotaryDim,
  kLayoutFields
};

struct Inputs {
  const char* name;  // "key" or "value"
  std::vector<at::Tensor> segments;
  // in the order of `Side.extras` in kvcache_plugins/kernels/layout.py
  OptionalTensor static_scale, factors, cos, sin, sinks;
  OptionalTensor levels, channel_scale, channel_offset, inv_freq, positions, outliers, outlier_starts;
  Side side;  // what all rows and heads share
};

int32_t dtype_of(const at::Tensor& tensor, const std::string& name) {
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return kFloat32;
    case at::kBFloat16:
      return kBFloat16;
    case at::kHalf:
      return kFloat16;
    default:
      KVCACHE_CHECK(false, "dtype", name, "float32, bfloat16 or float16", tensor.scalar_type());
  }
}

void check_tensor(const at::Tensor& tensor, const std::string& name, at::IntArrayRef shape) {
  KVCACHE_CHECK(tensor.device().is_cpu(), "device", name, "cpu", tensor.device());
  KVCACHE_CHECK(tensor.sizes() == shape, "shape", name, shape, tensor.sizes());
  KVCACHE_CHECK(tensor.numel() == 0 || shape.empty() || tensor.size(-1) == 1 || tensor.stride(-1) == 1,
                "stride of the last dimension", name, 1, tensor.stride(-1));
}

void check_records(const at::Tensor& records) {
  KVCACHE_CHECK(records.dim() == 4, "rank", "records", 4, records.dim());
  KVCACHE_CHECK(records.scalar_type() == at::kByte, "dtype", "records", "uint8", records.scalar_type());
  check_tensor(records, "records", {records.size(0), records.size(1), records.size(2), records.size(3)});
  KVCACHE_CHECK(records.size(2) <= 1 || records.stride(2) == records.size(3), "stride", "records", records.size(3),
                records.stride(2));
}

// The slots of the first sinks, one of every row, or null.
const int64_t* check_sink_start(const OptionalTensor& sink_start, int64_t batch) {
  if (!sink_start.has_value()) return nullptr;
  check_tensor(*sink_start, "sink_start", {batch});
  KVCACHE_CHECK(sink_start->scalar_type() == at::kLong, "dtype", "sink_start", "int64", sink_start->scalar_type());
  return sink_start->const_data_ptr<int64_t>();
}

// The sinks among the extras, else `other`: where there are no segments, exact tokens have the dtype of these.
at::Tensor sinks_or(const c10::List<OptionalTensor>& extras, const at::Tensor& other) {
  const bool has_sinks = extras.size() > 4 && extras.get(4).has_value();
  return has_sinks ? *extras.get(4) : other;
}

// Checks an fp32 extra and makes it contiguous; `name` is a suffix such as "factors".
void check_extra(const Inputs& inputs, OptionalTensor& tensor, const char* suffix, at::IntArrayRef shape) {
  if (!tensor.has_value()) return;
  const std::string name = std::string(inputs.name) + "_" + suffix;
  check_tensor(*tensor, name, shape);
  KVCACHE_CHECK(tensor->scalar_type() == at::kFloat, "dtype", name, "float32", tensor->scalar_type());
  tensor = tensor->contiguous();
}

// Checks what belongs to non-uniform codes (KVQuant) and points the side at it.
void describe_nonuniform(Inputs& inputs, int64_t batch, int64_t heads, int64_t blocks) {
  Side& side = inputs.side;
  const std::string name = inputs.name;
  KVCACHE_CHECK((side.format == kNonUniform) == inputs.levels.has_value(), "extras", name, "levels for format 4",
                "format " + std::to_string(side.format));
  check_extra(inputs, inputs.levels, "levels", {int64_t{1} << side.nbits});
  if (inputs.levels.has_value()) side.levels = inputs.levels->const_data_ptr<float>();
  KVCACHE_CHECK(inputs.channel_scale.has_value() == inputs.channel_offset.has_value(), "extras", name,
                "both channel_scale and channel_offset", "one");
  if (inputs.channel_scale.has_value()) {
    KVCACHE_CHECK(side.format == kNonUniform && inputs.channel_scale->dim() == 3, "extras", name,
                  "channel scales of three dimensions, for format 4", inputs.channel_scale->dim());
    const int64_t rows = inputs.channel_scale->size(0);
    KVCACHE_CHECK(rows == 1 || rows == batch, "rows", name + "_channel_scale", "1 or that of the batch", rows);
    check_extra(inputs, inputs.channel_scale, "channel_scale", {rows, heads, side.head_dim});
    check_extra(inputs, inputs.channel_offset, "channel_offset", {rows, heads, side.head_dim});
  }
  if (inputs.inv_freq.has_value()) {
    check_tensor(*inputs.inv_freq, name + "_inv_freq", {side.rotary_dim / 2});
    KVCACHE_CHECK(inputs.inv_freq->scalar_type() == at::kDouble && inputs.inv_freq->is_contiguous() &&
                      side.rotary_dim % 2 == 0 && side.rotary_dim <= side.head_dim && !inputs.cos.has_value(),
                  "extras", name, "float64 inv_freq for an even rotary_dim, without cos", side.rotary_dim);
    side.inv_freq = inputs.inv_freq->const_data_ptr<double>();
  }
  if (inputs.positions.has_value()) {
    check_tensor(*inputs.positions, name + "_positions", {batch});
    KVCACHE_CHECK(inputs.positions->scalar_type() == at::kLong, "dtype", name + "_positions", "int64",
                  inputs.positions->scalar_type());
  }
  KVCACHE_CHECK(inputs.outliers.has_value() == inputs.outlier_starts.has_value(), "extras", name,
                "both outliers and outlier_starts", "one");
  if (inputs.outliers.has_value()) {
    KVCACHE_CHECK(inputs.outliers->dim() == 3 && inputs.outliers->size(1) >= blocks, "shape", name + "_outliers",
                  "a list for every block", inputs.outliers->sizes());
    const int64_t count = inputs.outliers->size(1);
    check_tensor(*inputs.outliers, name + "_outliers", {batch, count, inputs.outliers->size(2)});
    check_tensor(*inputs.outlier_starts, name + "_outlier_starts", {batch, count, heads + 1});
    KVCACHE_CHECK(inputs.outliers->scalar_type() == at::kInt && inputs.outlier_starts->scalar_type() == at::kShort,
                  "dtype", name + "_outliers", "int32, and int16 starts", inputs.outliers->scalar_type());
    inputs.outliers = inputs.outliers->contiguous();
    inputs.outlier_starts = inputs.outlier_starts->contiguous();
    side.outlier_capacity = inputs.outliers->size(2);
    side.outlier_stride = heads + 1;
  }
}

Inputs describe(const char* name, const at::Tensor& records, at::TensorList segments,
                const c10::List<OptionalTensor>& extras, at::IntArrayRef layout, const at::Tensor& query) {
  KVCACHE_CHECK(layout.size() == kLayoutFields, "length", std::string(name) + "_layout", int{kLayoutFields},
                layout.size());
  KVCACHE_CHECK(extras.size() <= 12, "length", std::string(name) + "_extras", "at most 12", extras.size());
  // the last that are not given may be left out: every element costs host time
  const auto extra = [&extras](size_t i) { return i < extras.size() ? extras.get(i) : OptionalTensor(); };
  Inputs inputs{name,     segments.vec(), extra(0), extra(1), extra(2),  extra(3),  extra(4), extra(5),
                extra(6), extra(7),       extra(8), extra(9), extra(10), extra(11), {}};
  Side& side = inputs.side;
  side.packed_length = layout[kPackedLength];
  side.nbits = static_cast<int32_t>(layout[kNbits]);
  side.format = static_cast<int32_t>(layout[kFormatField]);
  side.head_dim = static_cast<int32_t>(layout[kHeadDim]);
  side.padded_dim = (side.head_dim + 15) / 16 * 16;
  side.group_tokens = static_cast<int32_t>(layout[kGroupTokens]);
  side.width = static_cast<int32_t>(layout[kWidth]);
  side.metadata_bytes = static_cast<int32_t>(layout[kMetadataBytes]);
  side.interleaved = static_cast<int32_t>(layout[kInterleaved]);
  side.codes_offset = layout[kCodesOffset];
  side.scale_offset = layout[kScaleOffset];
  side.minimum_offset = layout[kMinimumOffset];
  side.period = static_cast<int32_t>(layout[kPeriod]);
  side.rotary_dim = static_cast<int32_t>(layout[kRotaryDim]);
  side.record_bytes = records.size(3);

  const std::string layout_name = std::string(name) + "_layout";
  const int64_t batch = records.size(0), heads = records.size(1), dim = side.head_dim;
  KVCACHE_CHECK(dim >= 1 && dim <= kMaxHeadDim, "head_dim", layout_name, "1 to " + std::to_string(kMaxHeadDim), dim);
  KVCACHE_CHECK(side.format == kAffine
                    ? side.nbits == 2 || side.nbits == 3 || side.nbits == 4 || side.nbits == 8
                : side.format == kNonUniform
                    ? side.nbits >= 2 && side.nbits <= 4
                    : side.nbits == 8 && side.format >= kAffine && side.format <= kE5M2,
                "nbits and format", layout_name, "2, 3, 4 or 8 for format 0, 8 for formats 1 to 3, 2 to 4 for format 4",
                std::to_string(side.nbits) + " and " + std::to_string(side.format));
  KVCACHE_CHECK(
      side.group_tokens >= 1 && side.group_tokens <= kBlockTokens && kBlockTokens % side.group_tokens == 0,
      "group_tokens", layout_name, "a divisor of 64", side.group_tokens);
  KVCACHE_CHECK(side.width >= 1 && dim % side.width == 0, "width", layout_name, "a divisor of head_dim",
                side.width);
  KVCACHE_CHECK(side.metadata_bytes == 2 || side.metadata_bytes == 4, "metadata_bytes", layout_name, "2 or 4",
                side.metadata_bytes);
  const int64_t entries = kBlockTokens / side.group_tokens * side.width;
  KVCACHE_CHECK(entries <= kMaxMetadata, "metadata entries", layout_name, "at most 4096", entries);
  const int64_t blocks = (side.packed_length + kBlockTokens - 1) / kBlockTokens;
  KVCACHE_CHECK(side.packed_length >= 0 && blocks <= records.size(2), "packed_length", layout_name,
                "at most the tokens of the records", side.packed_length);
  const int64_t code_bytes = kBlockTokens * side.padded_dim * side.nbits / 8;
  const int64_t row_bytes = entries * side.metadata_bytes;
  for (const auto& [offset, size] : {std::pair{side.codes_offset, code_bytes},
                                     std::pair{std::max<int64_t>(side.scale_offset, 0), row_bytes},
                                     std::pair{std::max<int64_t>(side.minimum_offset, 0), row_bytes}}) {
    KVCACHE_CHECK(offset >= 0 && (blocks == 0 || offset + size <= side.record_bytes), "field offset",
                  layout_name, "a field inside the record", offset);
  }
  KVCACHE_CHECK(side.scale_offset >= 0 || inputs.static_scale.has_value() || inputs.channel_scale.has_value() ||
                    blocks == 0,
                "scale", layout_name, "an offset or a static scale", "neither");
  KVCACHE_CHECK(inputs.cos.has_value() == inputs.sin.has_value(), "rotation", layout_name, "both cos and sin",
                "one");
  KVCACHE_CHECK(!inputs.cos.has_value() || !inputs.factors.has_value(), "extras", std::string(name),
                "factors or a rotation", "both");
  if (inputs.cos.has_value()) {
    KVCACHE_CHECK(
        side.period >= 1 && side.rotary_dim >= 0 && side.rotary_dim % 2 == 0 && side.rotary_dim <= dim,
        "rotary_dim", layout_name, "an even number up to head_dim and a period", side.rotary_dim);
  }
  check_extra(inputs, inputs.static_scale, "static_scale", {heads});
  check_extra(inputs, inputs.factors, "factors", {batch, heads, dim});
  check_extra(inputs, inputs.cos, "cos", {side.period, side.rotary_dim / 2});
  check_extra(inputs, inputs.sin, "sin", {side.period, side.rotary_dim / 2});
  side.cos = inputs.cos.has_value() ? inputs.cos->const_data_ptr<float>() : nullptr;
  side.sin = inputs.sin.has_value() ? inputs.sin->const_data_ptr<float>() : nullptr;

  describe_nonuniform(inputs, batch, heads, blocks);

  KVCACHE_CHECK(inputs.segments.size() <= 3, "length", std::string(name) + "_segments", "at most 3",
                inputs.segments.size());
  side.dtype = inputs.segments.empty() ? dtype_of(query, "query") : dtype_of(inputs.segments[0], name);
  for (const at::Tensor& segment : inputs.segments) {
    const std::string segment_name = std::string(name) + "_segments";
    KVCACHE_CHECK(segment.dim() == 4, "rank", segment_name, 4, segment.dim());
    check_tensor(segment, segment_name, {batch, heads, segment.size(2), dim});
    KVCACHE_CHECK(dtype_of(segment, segment_name) == side.dtype, "dtype", segment_name,
                  inputs.segments[0].dtype(), segment.dtype());
  }
  if (inputs.sinks.has_value()) {
    const std::string sinks_name = std::string(name) + "_sinks";
    KVCACHE_CHECK(inputs.sinks->dim() == 4, "rank", sinks_name, 4, inputs.sinks->dim());
    check_tensor(*inputs.sinks, sinks_name, {batch, heads, inputs.sinks->size(2), dim});
    KVCACHE_CHECK(dtype_of(*inputs.sinks, sinks_name) == side.dtype, "dtype", sinks_name,
                  "that of the segments", inputs.sinks->scalar_type());
    inputs.sinks = inputs.sinks->contiguous();
    side.sink_length = inputs.sinks->size(2);
  }
  return inputs;
}

int64_t length_of(const Inputs& inputs) {
  int64_t length = inputs.side.packed_length;
  for (const at::Tensor& segment : inputs.segments) length += segment.size(2);
  return length;
}

// The side of one row and head.
Side side_of(const Inputs& inputs, const at::Tensor& records, int64_t row, int64_t head,
             const int64_t* sink_start) {
  Side side = inputs.side;
  side.records = static_cast<const uint8_t*>(records.const_data_ptr()) + row * records.stride(0) +
                 head * records.stride(1);
  if (inputs.static_scale.has_value()) side.static_scale = inputs.static_scale->const_data_ptr<float>()[head];
  const int64_t index = row * records.size(1) + head;
  if (inputs.factors.has_value()) {
    side.factors = inputs.factors->const_data_ptr<float>() + index * side.head_dim;
  }
  if (inputs.channel_scale.has_value()) {
    const int64_t place = (inputs.channel_scale->size(0) == 1 ? head : index) * side.head_dim;
    side.channel_scale = inputs.channel_scale->const_data_ptr<float>() + place;
    side.channel_offset = inputs.channel_offset->const_data_ptr<float>() + place;
  }
  if (inputs.positions.has_value()) side.position = inputs.positions->const_data_ptr<int64_t>()[row];
  if (inputs.outliers.has_value()) {
    const int64_t blocks = inputs.outliers->size(1);
    side.outliers = inputs.outliers->const_data_ptr<int32_t>() + row * blocks * side.outlier_capacity;
    side.outlier_starts =
        inputs.outlier_starts->const_data_ptr<int16_t>() + row * blocks * side.outlier_stride + head;
  }
  if (inputs.sinks.has_value()) {
    side.sinks = static_cast<const char*>(inputs.sinks->const_data_ptr()) +
                 index * side.sink_length * side.head_dim * inputs.sinks->element_size();
    side.sink_start = sink_start != nullptr ? sink_start[row] : 0;
  }
  int64_t start = side.packed_length;
  for (const at::Tensor& segment : inputs.segments) {
    const char* data = static_cast<const char*>(segment.const_data_ptr()) +
                       (row * segment.stride(0) + head * segment.stride(1)) * segment.element_size();
    if (segment.size(2) > 0)
      side.segments[side.num_segments++] = {data, start, segment.size(2), segment.stride(2)};
    start += segment.size(2);
  }
  return side;
}

}  // namespace
}  // namespace kvcache
