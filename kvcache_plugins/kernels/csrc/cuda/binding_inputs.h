// The keys or values as the ops receive them, checked and turned into what the kernels read.
#pragma once

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "binding_device.h"
#include "launches.h"

namespace kvcache {
namespace {

using OptionalTensor = std::optional<at::Tensor>;
constexpr int64_t kMaxMetadata = 4096;

// The integers of a layout, in the order of `SideLayout` in kvcache_plugins/kernels/layout.py.
enum LayoutField {
  kPackedLength, kNbits, kFormatField, kHeadDim, kGroupTokens, kWidth, kMetadataBytes, kInterleaved, kCodesOffset,
  kScaleOffset, kMinimumOffset, kPeriod, kRotaryDim, kLayoutFields
};
// The optional tensors, in the order of `Side.extras`.
enum Extra {
  kStaticScale, kFactors, kCos, kSin, kSinks, kLevels, kChannelScale, kChannelOffset, kInvFreq, kPositions, kOutliers,
  kOutlierStarts, kExtras
};
// Those of a side, of which the last that are not given may be left out: every element costs host time.
struct Extras {
  const c10::List<OptionalTensor>& given;
  OptionalTensor get(size_t extra) const { return extra < given.size() ? given.get(extra) : std::nullopt; }
};

inline int32_t dtype_of(const at::Tensor& tensor, const std::string& name) {
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

inline void check_tensor(const at::Tensor& tensor, const std::string& name, at::IntArrayRef shape) {
  check_device(tensor, name);
  KVCACHE_CHECK(tensor.sizes() == shape, "shape", name, shape, tensor.sizes());
  KVCACHE_CHECK(tensor.numel() == 0 || shape.empty() || tensor.size(-1) == 1 || tensor.stride(-1) == 1,
                "stride of the last dimension", name, 1, tensor.stride(-1));
}

inline void check_dtype(const at::Tensor& tensor, const std::string& name, at::ScalarType dtype) {
  KVCACHE_CHECK(tensor.scalar_type() == dtype, "dtype", name, dtype, tensor.scalar_type());
}

// A side and the tensors it points into, some of them made for it.
struct SideInputs {
  std::vector<at::Tensor> held;
  Side side{};

  int64_t length() const {
    int64_t length = side.packed_length;
    for (int i = 0; i < side.num_segments; ++i) length += side.segments[i].length;
    return length;
  }
};

// `field` ends the name, which is put together for a tensor that is given.
template <typename Number>
const Number* hold(SideInputs& inputs, const OptionalTensor& tensor, const std::string& side, const char* field,
                   at::IntArrayRef shape) {
  if (!tensor.has_value()) return nullptr;
  const std::string name = side + "_" + field;
  check_tensor(*tensor, name, shape);
  check_dtype(*tensor, name, c10::CppTypeToScalarType<Number>::value);
  inputs.held.push_back(tensor->contiguous());
  return inputs.held.back().const_data_ptr<Number>();
}

inline void check_layout(const Side& side, const std::string& name, int64_t record_bytes, int64_t blocks) {
  const int64_t dim = side.head_dim;
  KVCACHE_CHECK(dim >= 1 && dim <= kMaxHeadDim, "head_dim", name, "1 to " + std::to_string(kMaxHeadDim), dim);
  bool is_known = side.nbits == 8 && side.format > kAffine && side.format <= kE5M2;
  if (side.format == kAffine) is_known = (side.nbits >= 2 && side.nbits <= 4) || side.nbits == 8;
  if (side.format == kNonUniform) is_known = side.nbits >= 2 && side.nbits <= 4;
  KVCACHE_CHECK(is_known, "nbits and format", name,
                "2, 3, 4 or 8 for format 0, 8 for formats 1 to 3, 2 to 4 for format 4",
                std::to_string(side.nbits) + " and " + std::to_string(side.format));
  KVCACHE_CHECK(side.group_tokens >= 1 && side.group_tokens <= kBlockTokens && kBlockTokens % side.group_tokens == 0,
                "group_tokens", name, "a divisor of 64", side.group_tokens);
  KVCACHE_CHECK(side.width >= 1 && dim % side.width == 0, "width", name, "a divisor of head_dim", side.width);
  KVCACHE_CHECK(side.metadata_bytes == 2 || side.metadata_bytes == 4, "metadata_bytes", name, "2 or 4",
                side.metadata_bytes);
  const int64_t entries = kBlockTokens / side.group_tokens * side.width, row_bytes = entries * side.metadata_bytes;
  KVCACHE_CHECK(entries <= kMaxMetadata, "metadata entries", name, "at most 4096", entries);
  const int64_t code_bytes = kBlockTokens * side.padded_dim * side.nbits / 8;
  for (const auto& [offset, size, alignment] :
       {std::tuple<int64_t, int64_t, int64_t>{side.codes_offset, code_bytes, 4},
        {std::max(side.scale_offset, 0), row_bytes, side.metadata_bytes},
        {std::max(side.minimum_offset, 0), row_bytes, side.metadata_bytes}}) {
    KVCACHE_CHECK(offset >= 0 && offset % alignment == 0 && (blocks == 0 || offset + size <= record_bytes),
                  "field offset", name, "an aligned field inside the record", offset);
  }
}

inline SideInputs describe(const std::string& name, const at::Tensor& records, at::TensorList segments,
                           const c10::List<OptionalTensor>& given_extras, at::IntArrayRef layout,
                           int32_t default_dtype) {
  const std::string layout_name = name + "_layout";
  KVCACHE_CHECK(layout.size() == kLayoutFields, "length", layout_name, int{kLayoutFields}, layout.size());
  KVCACHE_CHECK(given_extras.size() <= kExtras, "length", name + "_extras", "at most 12", given_extras.size());
  const Extras extras{given_extras};
  SideInputs inputs;
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
  side.codes_offset = static_cast<int32_t>(layout[kCodesOffset]);
  side.scale_offset = static_cast<int32_t>(layout[kScaleOffset]);
  side.minimum_offset = static_cast<int32_t>(layout[kMinimumOffset]);
  side.period = static_cast<int32_t>(layout[kPeriod]);
  side.rotary_dim = static_cast<int32_t>(layout[kRotaryDim]);
  const int64_t batch = records.size(0), heads = records.size(1), dim = side.head_dim;
  const int64_t blocks = (side.packed_length + kBlockTokens - 1) / kBlockTokens;
  KVCACHE_CHECK(side.packed_length >= 0 && blocks <= records.size(2), "packed_length", layout_name,
                "at most the tokens of the records", side.packed_length);
  check_layout(side, layout_name, records.size(3), blocks);

  side.static_scale = hold<float>(inputs, extras.get(kStaticScale), name, "static_scale", {heads});
  side.factors = hold<float>(inputs, extras.get(kFactors), name, "factors", {batch, heads, dim});
  const OptionalTensor cos = extras.get(kCos), channel_scale = extras.get(kChannelScale);
  KVCACHE_CHECK(cos.has_value() == extras.get(kSin).has_value(), "rotation", layout_name, "both cos and sin", "one");
  KVCACHE_CHECK(!cos.has_value() || side.factors == nullptr, "extras", name, "factors or a rotation", "both");
  if (cos.has_value() || extras.get(kInvFreq).has_value())
    KVCACHE_CHECK(side.rotary_dim >= 0 && side.rotary_dim % 2 == 0 && side.rotary_dim <= dim &&
                      (!cos.has_value() || side.period >= 1),
                  "rotary_dim", layout_name, "an even number up to head_dim and a period", side.rotary_dim);
  side.cos = hold<float>(inputs, cos, name, "cos", {side.period, side.rotary_dim / 2});
  side.sin = hold<float>(inputs, extras.get(kSin), name, "sin", {side.period, side.rotary_dim / 2});
  const OptionalTensor levels = extras.get(kLevels);
  KVCACHE_CHECK((side.format == kNonUniform) == levels.has_value(), "extras", name, "levels for format 4",
                "format " + std::to_string(side.format));
  side.levels = hold<float>(inputs, levels, name, "levels", {int64_t{1} << side.nbits});
  KVCACHE_CHECK(channel_scale.has_value() == extras.get(kChannelOffset).has_value(), "extras", name,
                "both channel_scale and channel_offset", "one");
  if (channel_scale.has_value()) {
    const int64_t rows = channel_scale->dim() == 3 ? channel_scale->size(0) : 0;
    KVCACHE_CHECK(side.format == kNonUniform && (rows == 1 || rows == batch), "rows", name + "_channel_scale",
                  "1 or that of the batch, for format 4", rows);
    side.channel_scale = hold<float>(inputs, channel_scale, name, "channel_scale", {rows, heads, dim});
    side.channel_offset = hold<float>(inputs, extras.get(kChannelOffset), name, "channel_offset", {rows, heads, dim});
    side.channel_batch_stride = rows == 1 ? 0 : heads * dim;
  }
  KVCACHE_CHECK(side.scale_offset >= 0 || side.static_scale != nullptr || channel_scale.has_value() || blocks == 0,
                "scale", layout_name, "an offset or a static scale", "neither");
  side.inv_freq = hold<double>(inputs, extras.get(kInvFreq), name, "inv_freq", {side.rotary_dim / 2});
  side.positions = hold<int64_t>(inputs, extras.get(kPositions), name, "positions", {batch});
  const OptionalTensor outliers = extras.get(kOutliers);
  KVCACHE_CHECK(outliers.has_value() == extras.get(kOutlierStarts).has_value(), "extras", name,
                "both outliers and outlier_starts", "one");
  if (outliers.has_value()) {
    KVCACHE_CHECK(outliers->dim() == 3 && outliers->size(1) >= blocks, "shape", name + "_outliers",
                  "a list for every block", outliers->sizes());
    side.outlier_blocks = outliers->size(1);
    side.outlier_capacity = outliers->size(2);
    side.outliers = hold<int32_t>(inputs, outliers, name, "outliers",
                                  {batch, side.outlier_blocks, side.outlier_capacity});
    side.outlier_starts = hold<int16_t>(inputs, extras.get(kOutlierStarts), name, "outlier_starts",
                                        {batch, side.outlier_blocks, heads + 1});
  }

  KVCACHE_CHECK(segments.size() <= 3, "length", name + "_segments", "at most 3", segments.size());
  side.dtype = segments.empty() ? default_dtype : dtype_of(segments[0], name + "_segments");
  int64_t start = side.packed_length;
  for (const at::Tensor& segment : segments) {
    const std::string segment_name = name + "_segments";
    KVCACHE_CHECK(segment.dim() == 4, "rank", segment_name, 4, segment.dim());
    check_tensor(segment, segment_name, {batch, heads, segment.size(2), dim});
    check_dtype(segment, segment_name, segments[0].scalar_type());
    if (segment.size(2) == 0) continue;
    side.segments[side.num_segments++] = {segment.const_data_ptr(), start, segment.size(2), segment.stride(0),
                                          segment.stride(1), segment.stride(2)};
    start += segment.size(2);
  }
  const OptionalTensor sinks = extras.get(kSinks);
  if (sinks.has_value()) {
    const std::string sinks_name = name + "_sinks";
    KVCACHE_CHECK(sinks->dim() == 4, "rank", sinks_name, 4, sinks->dim());
    check_tensor(*sinks, sinks_name, {batch, heads, sinks->size(2), dim});
    KVCACHE_CHECK(dtype_of(*sinks, sinks_name) == side.dtype, "dtype", sinks_name, "that of the segments",
                  sinks->scalar_type());
    inputs.held.push_back(sinks->contiguous());
    side.sinks = inputs.held.back().const_data_ptr();
    side.sink_length = static_cast<int32_t>(sinks->size(2));
  }
  return inputs;
}

inline Records describe_records(const at::Tensor& records, int64_t batch, const OptionalTensor& sink_start) {
  KVCACHE_CHECK(records.dim() == 4, "rank", "records", 4, records.dim());
  check_dtype(records, "records", at::kByte);
  check_tensor(records, "records", {batch, records.size(1), records.size(2), records.size(3)});
  KVCACHE_CHECK(records.size(2) <= 1 || records.stride(2) == records.size(3), "stride", "records", records.size(3),
                records.stride(2));
  const int64_t apart = reinterpret_cast<int64_t>(records.const_data_ptr()) | records.stride(0) | records.stride(1) |
                        records.size(3);
  KVCACHE_CHECK(apart % 4 == 0 || records.numel() == 0, "alignment", "records", "records at multiples of 4 bytes",
                records.size(3));
  Records described{records.const_data_ptr<uint8_t>(), records.size(3), records.stride(0), records.stride(1),
                    static_cast<int32_t>(records.size(1)), nullptr};
  if (sink_start.has_value()) {
    check_tensor(*sink_start, "sink_start", {batch});
    check_dtype(*sink_start, "sink_start", at::kLong);
    described.sink_start = sink_start->const_data_ptr<int64_t>();
  }
  return described;
}

}  // namespace
}  // namespace kvcache
