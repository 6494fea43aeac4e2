// The CUDA implementation of kvcache_plugins::encode_levels (schema: kvcache_plugins/kernels/ops.py).
//
// Keys have ranges that are known, so any numbers are encoded without waiting for the device. Values of more than a
// block are searched for numbers whose ranges do not fit fp16, see encode_tokens_binding.cpp.
#include "encode_inputs.h"

namespace kvcache {
namespace {

constexpr int kMostSide = 255;         // twice 64 times as many, the most a list of outliers holds
constexpr int kMostNumbers = 1 << 15;  // of a token in all heads, see level_encoding.cuh

const float* read_floats(const char* name, const at::Tensor& tensor, at::IntArrayRef sizes) {
  check_device(tensor, name);
  TORCH_CHECK_VALUE(tensor.scalar_type() == at::kFloat && tensor.is_contiguous() && tensor.sizes() == sizes, "Invalid ",
                    name, ": expected contiguous float32 ", sizes, ", got ", tensor.toString(), " ", tensor.sizes(),
                    ".");
  return tensor.const_data_ptr<float>();
}

void set_ranges(LevelArguments& a, const OptionalTensor& scale, const OptionalTensor& offset, int64_t batch) {
  const bool is_key = a.run.is_key != 0;
  TORCH_CHECK_VALUE(scale.has_value() == is_key && offset.has_value() == is_key,
                    "Invalid ranges: keys have a scale and an offset, values none.");
  if (!is_key) return;
  const int64_t rows = scale->dim() == 4 && scale->size(0) == 1 ? 1 : batch;
  a.scale = read_floats("range", *scale, {rows, a.heads, 1, a.run.head_dim});
  a.offset = read_floats("range", *offset, {rows, a.heads, 1, a.run.head_dim});
  a.range_batch_stride = rows == 1 ? 0 : int64_t{a.heads} * a.run.head_dim;
}

void set_turns(LevelArguments& a, const OptionalTensor& cos, const OptionalTensor& sin, int64_t batch) {
  TORCH_CHECK_VALUE(cos.has_value() == sin.has_value(), "Invalid rotation: cos and sin come together.");
  if (!cos.has_value()) return;
  TORCH_CHECK_VALUE(cos->dim() == 3 && 2 * cos->size(2) <= a.run.head_dim, "Invalid rotation: expected (1 or B, n, up "
                    "to ", a.run.head_dim / 2, "), got ", cos->sizes(), ".");
  const int64_t rows = cos->size(0) == 1 ? 1 : batch, pairs = cos->size(2);
  a.run.cos = read_floats("rotation", *cos, {rows, a.run.count, pairs});
  a.run.sin = read_floats("rotation", *sin, {rows, a.run.count, pairs});
  a.run.pairs = static_cast<int32_t>(pairs);
  a.run.is_fused = is_fused(*cos);
  a.turn_batch_stride = rows == 1 ? 0 : a.run.count * pairs;
}

void set_lists(LevelArguments& a, const OptionalTensor& entries, const OptionalTensor& starts, int64_t batch) {
  TORCH_CHECK_VALUE(entries.has_value() == starts.has_value() && entries.has_value() == (a.side > 0),
                    "Invalid outliers: entries and starts come together, where side is not 0.");
  if (!entries.has_value()) return;
  check_device(*entries, "entries");
  check_device(*starts, "starts");
  const int64_t blocks = (a.run.start + a.run.count) / kBlockTokens, least = 2 * int64_t{a.side} * kBlockTokens;
  TORCH_CHECK_VALUE(entries->scalar_type() == at::kInt && entries->is_contiguous() && entries->dim() == 3 &&
                        entries->size(0) == batch && entries->size(1) >= blocks && entries->size(2) >= least &&
                        entries->size(2) <= 32767,
                    "Invalid entries: expected contiguous int32 (", batch, ", at least ", blocks, ", at least ", least,
                    "), got ", entries->toString(), " ", entries->sizes(), ".");
  TORCH_CHECK_VALUE(starts->scalar_type() == at::kShort && starts->is_contiguous() &&
                        starts->sizes() == at::IntArrayRef({batch, entries->size(1), a.heads + 1}),
                    "Invalid starts: expected contiguous int16 (", batch, ", ", entries->size(1), ", ", a.heads + 1,
                    "), got ", starts->toString(), " ", starts->sizes(), ".");
  a.entries = entries->mutable_data_ptr<int32_t>();
  a.starts = starts->mutable_data_ptr<int16_t>();
  a.lists = entries->size(1);
  a.width = entries->size(2);
}

// The part of a run from block `first` on, `blocks` of them at most.
LevelArguments part_of(const LevelArguments& a, int64_t first, int64_t blocks) {
  LevelArguments part = a;
  const int64_t tokens = first * kBlockTokens;
  part.run.start += tokens;
  part.run.count = std::min(blocks * kBlockTokens, a.run.count - tokens);
  const int64_t number_bytes = a.run.dtype == kFloat32 ? 4 : 2;
  part.run.states.data = static_cast<const uint8_t*>(a.run.states.data) +
                         tokens * a.run.states.token_stride * number_bytes;
  if (a.run.cos != nullptr) {
    part.run.cos += tokens * a.run.pairs;
    part.run.sin += tokens * a.run.pairs;
  }
  return part;
}

bool encode_levels(at::Tensor records, const OptionalTensor& entries, const OptionalTensor& starts,
                   const at::Tensor& states, bool is_key, at::IntArrayRef integers, const at::Tensor& boundaries,
                   const at::Tensor& levels, int64_t side, int64_t start, const OptionalTensor& scale,
                   const OptionalTensor& offset, const OptionalTensor& first_plain, const OptionalTensor& cos,
                   const OptionalTensor& sin) {
  const Device device(states);
  report_faults(device);
  const auto dtype = states.scalar_type();
  if (dtype != at::kFloat && dtype != at::kBFloat16 && dtype != at::kHalf) return false;
  const int64_t batch = states.size(0), heads = states.size(1), count = states.size(2);
  LevelArguments a{};
  a.run = describe_encoding(device, records, states, 0, is_key, integers, start, count);
  a.heads = static_cast<int32_t>(heads);
  a.side = static_cast<int32_t>(side);
  TORCH_CHECK_VALUE(start % kBlockTokens == 0 && count % kBlockTokens == 0 && a.run.group_tokens == 1 &&
                        a.run.width == 1 && a.run.nbits >= 2 && a.run.nbits <= 4 && side >= 0 && side <= kMostSide,
                    "Invalid layout: expected whole blocks of 2 to 4 bits, scales of single tokens, and a side of up "
                    "to ", kMostSide, "; got ", count, " tokens from slot ", start, ", a side of ", side, ", and ",
                    integers, ".");
  TORCH_CHECK_VALUE(is_key || (a.run.scale_offset >= 0 && a.run.minimum_offset >= 0),
                    "Invalid layout: values need a place for scales and one for offsets, got ", integers, ".");
  const int64_t codes = int64_t{1} << a.run.nbits;
  a.boundaries = read_floats("boundaries", boundaries, {codes - 1});
  a.levels = read_floats("levels", levels, {codes});
  set_ranges(a, scale, offset, batch);
  set_turns(a, cos, sin, batch);
  set_lists(a, entries, starts, batch);
  if (first_plain.has_value()) {
    check_device(*first_plain, "first_plain");
    TORCH_CHECK_VALUE(first_plain->scalar_type() == at::kLong && first_plain->is_contiguous() &&
                          first_plain->sizes() == at::IntArrayRef({batch}),
                      "Invalid first_plain: expected contiguous int64 (", batch, "), got ", first_plain->toString(),
                      " ", first_plain->sizes(), ".");
    a.first_plain = first_plain->const_data_ptr<int64_t>();
  }
  if (heads * a.run.head_dim > kMostNumbers) return false;
  if (count == 0 || batch * heads == 0) return true;
  if (!is_key && count > kBlockTokens && a.run.metadata_bytes == 2 && !device.is_capturing() &&
      holds_large_numbers(device, a.run, records))
    return false;
  const int64_t numbers = batch * heads * kBlockTokens * a.run.head_dim;
  const bool needs_scratch = is_key && a.entries != nullptr;
  const int64_t blocks = count / kBlockTokens;
  const int64_t most = needs_scratch ? std::clamp<int64_t>(device.scratch_bytes() / (4 * numbers), 1, blocks) : blocks;
  at::Tensor scratch;
  if (needs_scratch) {
    scratch = at::empty({most * numbers}, records.options().dtype(at::kFloat));
    a.missing = scratch.mutable_data_ptr<float>();
  } else if (a.entries != nullptr) {
    scratch = at::empty({batch * count * 2}, records.options().dtype(at::kLong));
    a.cuts = reinterpret_cast<uint64_t*>(scratch.mutable_data_ptr<int64_t>());
  }
  for (int64_t first = 0; first < blocks; first += most)
    device.check(encode_blocks(part_of(a, first, most), static_cast<int>(batch), device.stream()));
  return true;
}

}  // namespace
}  // namespace kvcache

TORCH_LIBRARY_IMPL(KVCACHE_LIBRARY, KVCACHE_DISPATCH_KEY, library) {
  library.impl("encode_levels", TORCH_FN(kvcache::encode_levels));
}
