// The CUDA implementation of kvcache_plugins::decode_attention (schema: kvcache_plugins/kernels/ops.py): checks the
// tensors, decides which thread block attends to what, and launches. It reads no device memory and waits for nothing,
// so it can be captured in a CUDA graph.
#include <ATen/ops/empty.h>

#include <array>

#include "binding_inputs.h"
#include "known_formats.h"
#include "splits.h"

namespace kvcache {
namespace {

constexpr int64_t kMaxQueries = 64;

int trailing_zeros(int x) { return x == 0 ? 31 : __builtin_ctz(static_cast<unsigned>(x)); }

// Bytes of a record from the codes of a side to the end of its metadata, in units of a copy.
int unit_bytes(const Side& side) {
  const int row = kBlockTokens / side.group_tokens * side.width * side.metadata_bytes;
  int end = side.codes_offset + plane_bytes(1, side.padded_dim) * side.nbits;
  for (const int offset : {side.scale_offset, side.minimum_offset})
    if (offset >= 0) end = std::max(end, offset + row);
  return (end - side.codes_offset + 15) / 16 * 16;
}

// Whether the fields of a side lie as the fast path copies and loads them.
bool is_laid_out_for_copies(const Side& side, int64_t record_bytes) {
  const int code_bytes = plane_bytes(1, side.padded_dim) * side.nbits;
  if (side.head_dim % 16 != 0 || side.head_dim > kMostFastChannels || side.codes_offset % 16 != 0) return false;
  if (side.format != kNonUniform && side.scale_offset < 0 && (side.minimum_offset >= 0 || side.width > 1)) return false;
  for (const int offset : {side.scale_offset, side.minimum_offset}) {
    const int relative = offset - side.codes_offset;
    if (offset >= 0 && (relative < code_bytes || relative % 16 != 0 || side.metadata_bytes != 2)) return false;
  }
  return side.codes_offset + unit_bytes(side) <= record_bytes;
}

// What follows is mirrored by `is_fast` in kvcache_plugins/kernels/cuda_inputs.py.
bool are_keys_fast(const Side& side, int64_t record_bytes) {
  if (!is_laid_out_for_copies(side, record_bytes)) return false;
  if (side.format == kNonUniform) {
    // pairs that rotate are those whose codes lie together
    const bool is_paired = side.inv_freq == nullptr || side.interleaved || side.rotary_dim == side.head_dim;
    return is_paired && side.packed_length % kBlockTokens == 0 && side.channel_scale != nullptr &&
           side.cos == nullptr && side.factors == nullptr;
  }
  if (side.inv_freq != nullptr || side.outliers != nullptr) return false;
  const bool is_per_channel = side.width == side.head_dim && side.format == kAffine && side.scale_offset >= 0 &&
                              side.minimum_offset >= 0 && side.group_tokens >= 16;
  if (side.cos != nullptr)
    return is_per_channel && side.nbits < 8 && side.rotary_dim == side.head_dim && side.period % 16 == 0;
  const bool is_grouped = side.format == kSymmetric && side.group_tokens == 1 && side.scale_offset >= 0 &&
                          side.head_dim / side.width % 16 == 0;
  // of 8 bits channels lie as they are
  return (is_per_channel && (side.interleaved || side.nbits == 8)) || is_grouped || side.width == 1;
}

bool are_values_fast(const Side& side, int64_t record_bytes) {
  if (!is_laid_out_for_copies(side, record_bytes) || side.cos != nullptr || side.inv_freq != nullptr) return false;
  if (side.format == kNonUniform)
    return side.packed_length % kBlockTokens == 0 && side.width == 1 && side.group_tokens == 1 &&
           side.scale_offset >= 0 && side.minimum_offset >= 0 && side.factors == nullptr;
  return side.outliers == nullptr && side.head_dim / side.width % 16 == 0 &&
         (side.format != kAffine || side.minimum_offset >= 0);
}

// How far lanes of neighbouring t lie apart in the codes, as the power of two that `swizzled` takes: 2 to 6.
int swizzle_of(const Side& side, bool is_key) {
  if (is_key) return side.nbits == 8 ? 4 : 3;
  const int chunks = side.head_dim / 16;
  const int apart = side.nbits == 8 ? 4 * chunks : side.nbits == 4 ? 2 * chunks : chunks;  // in 16 bytes
  return std::clamp(trailing_zeros(apart), 2, 6);  // means nothing for heads that only `general` reads
}

UnitCopy copy_of(const Side& side, bool is_key) {
  UnitCopy copy{};
  copy.codes_offset = side.codes_offset;
  copy.code_bytes = plane_bytes(1, side.padded_dim) * side.nbits;
  copy.bytes = unit_bytes(side);
  copy.swizzle = swizzle_of(side, is_key);
  copy.scale = side.scale_offset - side.codes_offset;
  copy.minimum = side.minimum_offset - side.codes_offset;
  for (int i = 0; i < UnitCopy::kSteps; ++i) copy.step_bits[i] = swizzle_bits(i * UnitCopy::kStepBytes, copy.swizzle);
  copy.further_bits = swizzle_bits(UnitCopy::kSteps * UnitCopy::kStepBytes, copy.swizzle);
  return copy;
}

// Gives every warp `slots` units in shared memory.
void lay_out_ring(AttentionArguments& a, int slots, int columns) {
  a.unit_slots = slots;
  a.warp_bytes = slots * a.unit_bytes;
  a.ring_bytes = std::max(kWarps * a.warp_bytes, merge_bytes_of_warps(a.value.head_dim, columns));
  a.ring_bytes = (a.ring_bytes + 127) / 128 * 128;
}

// A kernel for one format.
struct KnownKernel {
  bool (*is_served)(AttentionArguments&);
  int (*attend)(const AttentionArguments&, int, void*);
  int slots;     // of a warp's ring
  int resident;  // thread blocks on a multiprocessor, see `resident_blocks`
};

template <typename Format>
constexpr KnownKernel known(int (*attend)(const AttentionArguments&, int, void*)) {
  return {is_known<Format>, attend, Format::kSlots, Format::kResident};
}

constexpr KnownKernel kKnownKernels[] = {
    known<Int8>(attend_int8),
    known<Float8>(attend_float8),
    known<Int4>(attend_int4),
    known<Kivi4>(attend_kivi_4),
    known<Kivi4Wide>(attend_kivi_4_wide),
    known<Kivi2>(attend_kivi_2),
    known<Kivi4Rotated>(attend_kivi_4_rotated),
    known<Kivi4WideRotated>(attend_kivi_4_wide_rotated),
    known<Kivi2Rotated>(attend_kivi_2_rotated),
    known<KVQuant2>(attend_kvquant_2),
    known<KVQuant3>(attend_kvquant_3),
    known<KVQuant4>(attend_kvquant_4),
};

// Whether the exact tokens of a side can be read as exact_tokens.cuh does: one segment of the queries' dtype, of which
// 8 bytes are loaded at a time, and whose numbers of a row and head can be counted in 32 bits; and as many sinks as fit
// a block.
bool is_exact_fast(const Side& side, int32_t query_dtype) {
  const Segment& s = side.segments[0];
  if (side.sink_length > 0 && (side.sink_length > kBlockTokens || side.dtype != query_dtype || side.head_dim % 4 != 0 ||
                               reinterpret_cast<uintptr_t>(side.sinks) % 8 != 0))
    return false;
  if (side.num_segments == 0) return true;
  const int64_t apart = s.batch_stride | s.head_stride | s.token_stride;
  return side.num_segments == 1 && side.dtype == query_dtype && apart % 4 == 0 &&
         reinterpret_cast<uintptr_t>(s.data) % 8 == 0 && s.length * s.token_stride < int64_t{1} << 31;
}

// Those of both; not beside factors of values, by which a split multiplies all that it has summed: what is exact has
// none.
bool are_exact_fast(const AttentionArguments& a) {
  const int64_t apart = a.query_batch_stride | a.query_head_stride | a.query_token_stride;
  const bool are_packed_alike = a.key.packed_length == a.value.packed_length;
  return (are_packed_alike || (a.key.packed_length > a.value.packed_length && a.key.format != kNonUniform)) &&
         a.key.sink_length == a.value.sink_length && a.value.factors == nullptr &&
         is_exact_fast(a.key, a.query_dtype) && is_exact_fast(a.value, a.query_dtype) && apart % 4 == 0 &&
         reinterpret_cast<uintptr_t>(a.query) % 8 == 0;
}

// Which kernel attends: to how many times 8 query rows at once by tensor cores (0: not by them), and of which format.
struct Choice {
  int columns;
  const KnownKernel* known;
};

// Thread blocks of the fast path whose shared memory fits a multiprocessor, which has 1 KB more of it than a thread
// block may have, and takes 1 KB for each of them.
int fitting_blocks(const AttentionArguments& a, int columns, const Device& device) {
  return (device.shared_bytes() + 1024) / (attention_shared_bytes(a, columns) + 1024);
}

// Leaves packed slots, those before `packed`, to the fast path, from block `first` on.
void plan_packed(AttentionArguments& a, int64_t first, int64_t packed) {
  a.fast_begin = static_cast<int32_t>(first);
  a.fast_stop = packed;
  a.fast_end = static_cast<int32_t>((packed + kBlockTokens - 1) / kBlockTokens);
  a.whole_end = static_cast<int32_t>(packed / kBlockTokens);
  if (a.softcap > 0 || a.alibi != nullptr || a.bias != nullptr) return;
  const int64_t seen = a.is_causal != 0 ? std::min(packed, a.length - a.query_length + 1) : packed;
  a.plain_end = static_cast<int32_t>(seen / kBlockTokens);
  const int64_t hidden = a.window > 0 ? std::max<int64_t>(0, a.length - a.window) : 0;  // from the last query
  a.plain_begin = static_cast<int32_t>((hidden + kBlockTokens - 1) / kBlockTokens);
}

// Leaves all other slots to it as well.
void plan_exact(AttentionArguments& a, int64_t first, int64_t packed) {
  const int64_t keys = a.key.packed_length;
  const auto begin_at = [first](int64_t slot) { return static_cast<int32_t>(std::max(first, slot / kBlockTokens)); };
  const auto end_before = [](int64_t slot) { return static_cast<int32_t>((slot + kBlockTokens - 1) / kBlockTokens); };
  a.mixed_begin = begin_at(packed);
  a.mixed_end = keys > packed ? std::max(a.mixed_begin, end_before(keys)) : a.mixed_begin;
  a.exact_begin = begin_at(keys);
  a.exact_end = a.length > keys ? std::max(a.exact_begin, end_before(a.length)) : a.exact_begin;
  a.exact_start = keys;
  a.sink_units = a.key.sink_length == 0 ? 0 : keys > packed ? 2 : 1;
  const bool is_seen = a.is_causal == 0 || a.query_length == 1;
  // what no query has in its window is packed, and no sink
  const bool is_open = a.window <= 0 || (a.length - a.window <= packed && a.sink_units == 0);
  a.are_exact_plain = a.softcap <= 0 && a.alibi == nullptr && a.bias == nullptr && is_seen && is_open;
}

// Divides the slots among thread blocks.
Choice plan(AttentionArguments& a, int64_t batch, bool is_half, const Device& device) {
  const int64_t rows = static_cast<int64_t>(a.group) * a.query_length;
  const bool are_levels = a.key.format == kNonUniform;
  int columns = rows > 8 && a.value.head_dim <= 128 && !are_levels ? 2 : 1;  // registers bound the product of the two
  const int64_t first =
      a.window > 0 ? std::max<int64_t>(0, a.length - a.query_length - a.window + 1) / kBlockTokens : 0;
  const int64_t blocks = (a.length + kBlockTokens - 1) / kBlockTokens;
  const int64_t packed = std::min(a.key.packed_length, a.value.packed_length);
  const Records& r = a.records;
  const bool is_aligned = reinterpret_cast<uintptr_t>(r.data) % 16 == 0 && r.record_bytes % 16 == 0 &&
                          r.batch_stride % 16 == 0 && r.head_stride % 16 == 0;
  if (!is_half || !is_aligned || packed <= first * kBlockTokens || are_levels != (a.value.format == kNonUniform) ||
      !are_keys_fast(a.key, r.record_bytes) || !are_values_fast(a.value, r.record_bytes))
    columns = 0;
  // Of wide heads 8 rows, so that a thread block's shared memory fits GPUs that have 99 KB for it.
  const bool is_wide = std::max(a.key.head_dim, a.value.head_dim) > 128;
  const auto rows_at_once = [is_wide](int columns) {
    return columns == 1 || (columns == 0 && is_wide) ? 8 : kMostRows;
  };
  const int64_t processors = device.multiprocessors();
  int resident = 2;  // thread blocks on a multiprocessor
  a.key_copy = copy_of(a.key, true);
  a.value_copy = copy_of(a.value, false);
  if (columns > 0) {
    a.unit_bytes = (std::max(a.key_copy.bytes, a.value_copy.bytes) + 127) / 128 * 128;
    a.key_steps = a.key.head_dim / 16;
    a.key_group_shift = power_of(a.key.group_tokens);
    a.key_tile_shift = std::clamp(a.key_group_shift - 4, 0, 2);
    a.value_chunks = a.value.head_dim / 16;
    a.value_chunks_per_group = a.value_chunks / a.value.width;
    a.value_group_shift = power_of(a.value.group_tokens);
    const int chunks = a.value_chunks, most_groups = a.value.nbits == 8 ? 1 : 8;
    const bool are_known = (chunks == 4 || chunks == 8 || chunks == 16) && a.value.group_tokens == 1;
    a.value_groups = are_known && a.value.width <= most_groups ? a.value.width : 0;
    a.are_values_aligned = a.value.nbits == 8 || chunks % (a.value.nbits == 4 ? 4 : 8) == 0 || a.value_groups > 0;
  }
  const bool is_exact_read = columns > 0 && are_exact_fast(a);
  const KnownKernel* known = nullptr;
  if (columns == 1 && rows <= 8 && is_exact_read) {
    for (const KnownKernel& each : kKnownKernels)
      if (each.is_served(a)) known = &each;
  }
  if (known != nullptr) {
    lay_out_ring(a, known->slots, columns);
    resident = std::min(resident_blocks(known->resident, attention_compiled_for()), fitting_blocks(a, columns, device));
    if (resident == 0) known = nullptr;
  }
  for (; columns > 0 && known == nullptr; --columns) {  // fewer rows at once need less memory
    a.chunk_rows = rows_at_once(columns);
    const int most = columns == 1 && a.value.head_dim <= 128 && !are_levels ? 4 : 2;  // by registers
    resident = 0;
    for (const int slots : {3, 2}) {  // three units of a warp unless two leave room for more thread blocks
      const int given = a.unit_slots;
      lay_out_ring(a, slots, columns);
      const int fitting = std::min(most, fitting_blocks(a, columns, device));
      if (fitting > resident) {
        resident = fitting;
      } else {
        lay_out_ring(a, given, columns);
      }
    }
    if (resident > 0) break;
  }
  a.chunk_rows = rows_at_once(columns);
  a.chunks = static_cast<int32_t>((rows + a.chunk_rows - 1) / a.chunk_rows);
  const int64_t row_groups = batch * r.heads * a.chunks;
  if (columns > 0) {
    plan_packed(a, first, packed);
    if (is_exact_read) {
      plan_exact(a, first, packed);
    } else if (packed < a.length) {
      a.general_begin = static_cast<int32_t>(std::max(first, packed / kBlockTokens));
      a.general_end = static_cast<int32_t>(blocks);
    }
    a.sink_splits = !is_exact_read && (a.key.sink_length > 0 || a.value.sink_length > 0);
    const int64_t places = processors * resident;
    a.fast_splits = choose_splits(a.fast_work(), row_groups, places);
    const bool has_own =
        has_exact_split(a.packed_units(), a.exact_units(), a.exact_work(), a.fast_splits, row_groups, places);
    a.sharing_splits = has_own ? a.fast_splits - 1 : a.fast_splits;
    a.shared_work = has_own ? a.packed_units() : a.fast_work();
  } else {
    a.general_begin = static_cast<int32_t>(first);
    a.general_end = static_cast<int32_t>(blocks);
  }
  a.general_splits = choose_general_splits(a.general_end - a.general_begin, row_groups, 2 * processors);
  return {columns, known};
}

// Contiguous fp32 numbers of this shape, or null where there are none.
const float* check_numbers(const OptionalTensor& numbers, const char* name, at::IntArrayRef shape) {
  if (!numbers.has_value()) return nullptr;
  check_tensor(*numbers, name, shape);
  check_dtype(*numbers, name, at::kFloat);
  KVCACHE_CHECK(numbers->is_contiguous(), "strides", name, "contiguous", numbers->strides());
  return numbers->const_data_ptr<float>();
}

at::Tensor decode_attention(const at::Tensor& query, const at::Tensor& records, at::TensorList key_segments,
                            at::TensorList value_segments, const c10::List<OptionalTensor>& key_extras,
                            const c10::List<OptionalTensor>& value_extras, const OptionalTensor& sink_start,
                            at::IntArrayRef key_layout, at::IntArrayRef value_layout, double scaling,
                            const OptionalTensor& bias, bool is_causal, int64_t window, double softcap,
                            const OptionalTensor& sink_logits, const OptionalTensor& alibi_slopes) {
  const Device device(query);
  KVCACHE_CHECK(query.dim() == 4, "rank", "query", 4, query.dim());
  const int64_t batch = query.size(0), query_heads = query.size(1), query_length = query.size(2);
  AttentionArguments a{};
  a.query_dtype = dtype_of(query, "query");
  a.records = describe_records(records, batch, sink_start);
  const SideInputs keys = describe("key", records, key_segments, key_extras, key_layout, a.query_dtype);
  const SideInputs values = describe("value", records, value_segments, value_extras, value_layout, a.query_dtype);
  a.key = keys.side;
  a.value = values.side;
  const int64_t kv_heads = records.size(1), length = keys.length(), value_dim = a.value.head_dim;
  KVCACHE_CHECK(kv_heads > 0 && query_heads > 0 && query_heads % kv_heads == 0, "heads", "query",
                "a multiple of " + std::to_string(kv_heads), query_heads);
  KVCACHE_CHECK(query_length >= 1 && query_length <= kMaxQueries, "tokens", "query", "1 to 64", query_length);
  check_tensor(query, "query", {batch, query_heads, query_length, a.key.head_dim});
  KVCACHE_CHECK(length == values.length(), "length", "values", length, values.length());
  KVCACHE_CHECK(length >= 1, "length", "keys", "at least 1", length);
  a.query = query.const_data_ptr();
  a.query_batch_stride = query.stride(0);
  a.query_head_stride = query.stride(1);
  a.query_token_stride = query.stride(2);
  a.group = static_cast<int32_t>(query_heads / kv_heads);
  a.query_length = static_cast<int32_t>(query_length);
  a.length = length;
  a.scaling = static_cast<float>(scaling);
  a.softcap = static_cast<float>(softcap);
  a.inverse_softcap = softcap > 0 ? static_cast<float>(1 / softcap) : 0.0f;
  a.is_causal = is_causal;
  a.window = window;
  const std::array<int64_t, 1> of_heads{query_heads};
  const std::array<int64_t, 3> of_queries{batch, query_heads, query_length};
  a.are_sinks_of_queries = sink_logits.has_value() && sink_logits->dim() == 3;
  a.alibi = check_numbers(alibi_slopes, "alibi_slopes", of_heads);
  a.sink_logits = check_numbers(sink_logits, "sink_logits",
                                a.are_sinks_of_queries ? at::IntArrayRef(of_queries) : at::IntArrayRef(of_heads));
  if (bias.has_value()) {
    const int64_t full[4] = {batch, query_heads, query_length, length};
    KVCACHE_CHECK(bias->dim() == 4, "rank", "bias", 4, bias->dim());
    check_dtype(*bias, "bias", at::kFloat);
    for (int d = 0; d < 4; ++d)
      KVCACHE_CHECK(bias->size(d) == full[d] || (d < 3 && bias->size(d) == 1), "shape", "bias",
                    at::IntArrayRef(full, 4), bias->sizes());
    check_tensor(*bias, "bias", bias->sizes());
    a.bias = bias->const_data_ptr<float>();
    a.bias_batch_stride = bias->size(0) == 1 ? 0 : bias->stride(0);
    a.bias_head_stride = bias->size(1) == 1 ? 0 : bias->stride(1);
    a.bias_token_stride = bias->size(2) == 1 ? 0 : bias->stride(2);
  }

  at::Tensor output = at::empty({batch, query_heads, query_length, value_dim}, query.options());
  if (output.numel() == 0) return output;
  const auto [columns, known] = plan(a, batch, a.query_dtype != kFloat32, device);
  const int64_t partials = batch * query_heads * query_length * a.splits();
  const int64_t sums = (2 * partials + 3) / 4 * 4;  // so that what follows is aligned
  const at::Tensor scratch =
      at::empty({sums + partials * a.partial_channels()}, query.options().dtype(at::kFloat));
  a.partial_sums = scratch.mutable_data_ptr<float>();
  a.partial_outputs = a.partial_sums + sums;
  a.output = output.mutable_data_ptr();
  const bool is_wide = value_dim > 128;
  const bool are_levels = a.key.format == kNonUniform;
  const auto attend = known != nullptr ? known->attend
                      : columns == 0   ? attend_general_rows
                      : are_levels     ? (is_wide ? attend_levels_wide : attend_levels)
                      : columns == 2   ? attend_16_rows
                      : is_wide        ? attend_8_rows_wide
                                       : attend_8_rows;
  if (known == nullptr && columns > 0 && a.left_splits() > 0)
    device.check(attend_general_rows(a, static_cast<int>(batch), device.stream()));
  device.check(attend(a, static_cast<int>(batch), device.stream()));
  device.check(merge_rows(a, static_cast<int>(batch), device.stream()));
  return output;
}

}  // namespace
}  // namespace kvcache

TORCH_LIBRARY_IMPL(KVCACHE_LIBRARY, KVCACHE_DISPATCH_KEY, library) {
  library.impl("decode_attention", TORCH_FN(kvcache::decode_attention));
}
