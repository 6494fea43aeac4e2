// The CUDA implementation of kvcache_plugins::gather_tokens (schema: kvcache_plugins/kernels/ops.py). The slots lie on
// the device and are not looked at from here: one that is out of range becomes a token of zeros, which is reported
// later (device_faults.h).
#include "binding_inputs.h"
#include "device_faults.h"

namespace kvcache {
namespace {

Fields describe_fields(const std::string& name, at::IntArrayRef layout, int64_t record_bytes, int64_t blocks) {
  KVCACHE_CHECK(layout.size() == kLayoutFields, "length", name, int{kLayoutFields}, layout.size());
  const bool has_metadata = layout[kScaleOffset] >= 0 || layout[kMinimumOffset] >= 0;
  KVCACHE_CHECK(layout[kGroupTokens] == 1 || !has_metadata, "group_tokens", name,
                "1, for tokens that share no metadata", layout[kGroupTokens]);
  const int64_t nbits = layout[kNbits], dim = layout[kHeadDim], width = layout[kWidth];
  KVCACHE_CHECK(nbits == 2 || nbits == 3 || nbits == 4 || nbits == 8, "nbits", name, "2, 3, 4 or 8", nbits);
  KVCACHE_CHECK(dim >= 1 && dim <= kMaxHeadDim, "head_dim", name, "1 to " + std::to_string(kMaxHeadDim), dim);
  KVCACHE_CHECK(width >= 1 && width <= dim, "width", name, "1 to head_dim", width);
  KVCACHE_CHECK(layout[kMetadataBytes] == 2 || layout[kMetadataBytes] == 4, "metadata_bytes", name, "2 or 4",
                layout[kMetadataBytes]);
  KVCACHE_CHECK(layout[kPackedLength] >= 0 && layout[kPackedLength] <= blocks * kBlockTokens, "packed_length", name,
                "at most the tokens of the records", layout[kPackedLength]);
  const int padded = static_cast<int>((dim + 15) / 16 * 16);
  const int64_t row_bytes = kBlockTokens * width * layout[kMetadataBytes];
  KVCACHE_CHECK(layout[kCodesOffset] >= 0 && layout[kCodesOffset] % 2 == 0 &&
                    layout[kCodesOffset] + plane_bytes(1, padded) * nbits <= record_bytes,
                "field offset", name, "an aligned field inside the record", layout[kCodesOffset]);
  for (const LayoutField field : {kScaleOffset, kMinimumOffset})
    KVCACHE_CHECK(layout[field] < 0 || (layout[field] % 2 == 0 && layout[field] + row_bytes <= record_bytes),
                  "field offset", name, "an aligned field inside the record", layout[field]);
  return {static_cast<int32_t>(nbits), padded, static_cast<int32_t>(width),
          static_cast<int32_t>(layout[kMetadataBytes]), static_cast<int32_t>(layout[kInterleaved]),
          static_cast<int32_t>(layout[kCodesOffset]), static_cast<int32_t>(layout[kScaleOffset]),
          static_cast<int32_t>(layout[kMinimumOffset])};
}

void gather_tokens(const at::Tensor& records_in, at::Tensor records_out, const at::Tensor& index,
                   at::IntArrayRef key_layout, at::IntArrayRef value_layout) {
  const Device device(records_in);
  report_faults(device);
  KVCACHE_CHECK(records_in.dim() == 4, "rank", "records_in", 4, records_in.dim());
  const int64_t batch = records_in.size(0), heads = records_in.size(1), bytes = records_in.size(3);
  GatherArguments a{};
  a.from = describe_records(records_in, batch, std::nullopt);
  KVCACHE_CHECK(records_out.dim() == 4, "rank", "records_out", 4, records_out.dim());
  check_tensor(records_out, "records_out", {batch, heads, records_out.size(2), bytes});
  check_dtype(records_out, "records_out", at::kByte);
  KVCACHE_CHECK(records_out.size(2) <= 1 || records_out.stride(2) == bytes, "stride", "records_out", bytes,
                records_out.stride(2));
  KVCACHE_CHECK(index.dim() == 3, "rank", "index", 3, index.dim());
  check_tensor(index, "index", {batch, heads, index.size(2)});
  check_dtype(index, "index", at::kLong);
  a.key = describe_fields("key_layout", key_layout, bytes, records_in.size(2));
  a.value = describe_fields("value_layout", value_layout, bytes, records_in.size(2));
  a.count = index.size(2);
  a.length = std::min(key_layout[kPackedLength], value_layout[kPackedLength]);
  KVCACHE_CHECK(a.count <= records_out.size(2) * kBlockTokens, "length", "index",
                "at most " + std::to_string(records_out.size(2) * kBlockTokens), a.count);
  if (index.numel() == 0) return;
  KVCACHE_CHECK(!records_in.is_alias_of(records_out), "memory", "records_out", "other than that of records_in",
                "the same");
  const at::Tensor choices = index.contiguous();
  a.index = choices.const_data_ptr<int64_t>();
  a.to = records_out.mutable_data_ptr<uint8_t>();
  a.fault = flags_of(device) + kNoSuchSlot;
  a.to_batch_stride = records_out.stride(0);
  a.to_head_stride = records_out.stride(1);
  device.check(gather_slots(a, static_cast<int>(batch), device.stream()));
}

}  // namespace
}  // namespace kvcache

TORCH_LIBRARY_IMPL(KVCACHE_LIBRARY, KVCACHE_DISPATCH_KEY, library) {
  library.impl("gather_tokens", TORCH_FN(kvcache::gather_tokens));
}
