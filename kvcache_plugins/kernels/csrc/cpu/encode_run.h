// A run of tokens to be encoded, checked and described once for `encode_tokens` and `append_tokens`.
//
// What is rare, numbers that are not finite or metadata beyond fp16, is not done here: `is_plain` looks first, so that
// an op can write nothing and say so. One unit of work is a block (or a group of tokens that spans two) of one row and
// head, so that no two threads write to one record.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <optional>
#include <vector>

#include "encode_rotation.h"
#include "instruction_set.h"

namespace kvcache {
namespace {

constexpr float kLargestHalf = 65504.0f;

inline UnitKernels choose_unit_kernels() {
  const std::string name = instruction_set();
#if defined(__x86_64__)
  if (name == "avx512") return unit_kernels_avx512();
  if (name == "avx2") return unit_kernels_avx2();
#endif
  return unit_kernels_portable();
}

using OptionalTensor = std::optional<at::Tensor>;

// Exact tokens of all rows and heads; strides in elements, the channels lie next to each other.
struct Exact {
  const void* data;
  at::ScalarType dtype;
  int64_t batch_stride, head_stride, token_stride;

  // Those of `tensor` (B, H, n, D) from token `first` on.
  explicit Exact(const at::Tensor& tensor, int64_t first = 0)
      : data(static_cast<const uint8_t*>(tensor.const_data_ptr()) + first * tensor.stride(2) * tensor.element_size()),
        dtype(tensor.scalar_type()),
        batch_stride(tensor.stride(0)),
        head_stride(tensor.stride(1)),
        token_stride(tensor.stride(2)) {}

  bool is_known() const { return dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf; }

  // Tokens of one row and head, from token `first` on.
  Rows rows(int64_t row, int64_t head, int64_t first) const {
    const int64_t at = row * batch_stride + head * head_stride + first * token_stride;
    const int32_t kind = dtype == at::kFloat ? kFloat32 : dtype == at::kBFloat16 ? kBFloat16 : kFloat16;
    return {static_cast<const uint8_t*>(data) + at * int64_t(c10::elementSize(dtype)), kind, token_stride};
  }
};

// What is done to numbers before they are encoded: divided by a factor per channel, or rotated back.
struct Preparation {
  const float* factors = nullptr;  // [batch][heads][head_dim]
  Rotation rotation;
  RotateBack rotate_back = nullptr;
  bool is_possible = true;
};

struct Run {
  at::Tensor records;
  Exact tokens;
  Preparation preparation;
  Layout layout;
  bool is_key;
  int64_t start, count;  // slots
  UnitKernels kernels;

  int64_t unit() const { return layout.group_tokens > kBlockTokens ? layout.group_tokens : kBlockTokens; }
};

inline Preparation prepare(const OptionalTensor& cos, const OptionalTensor& sin, const OptionalTensor& factors,
                           int64_t batch, int64_t heads, int64_t dim) {
  Preparation preparation;
  TORCH_CHECK_VALUE(cos.has_value() == sin.has_value(), "Invalid rotation: cos and sin come together or not at all.");
  if (cos.has_value()) {
    for (const at::Tensor& table : {*cos, *sin})
      TORCH_CHECK_VALUE(table.device().is_cpu() && table.scalar_type() == at::kFloat && table.dim() == 2 &&
                            table.is_contiguous() && table.sizes() == cos->sizes() && table.size(0) > 0 &&
                            2 * table.size(1) <= dim,
                        "Invalid rotation: expected two contiguous float32 CPU tensors (period, up to ", dim / 2,
                        "), got ", cos->toString(), " ", cos->sizes(), " and ", sin->toString(), " ", sin->sizes(),
                        ".");
    preparation.rotation = {cos->const_data_ptr<float>(), sin->const_data_ptr<float>(), cos->size(0), cos->size(1)};
    preparation.rotate_back = find_rotate_back();
    preparation.is_possible = preparation.rotate_back != nullptr;
  }
  if (factors.has_value()) {
    TORCH_CHECK_VALUE(!cos.has_value() && factors->device().is_cpu() && factors->scalar_type() == at::kFloat &&
                          factors->is_contiguous() && factors->sizes() == at::IntArrayRef({batch, heads, 1, dim}),
                      "Invalid factors: expected contiguous float32 (", batch, ", ", heads, ", 1, ", dim,
                      ") on the CPU, and no rotation, got ", factors->toString(), " ", factors->sizes(), ".");
    preparation.factors = factors->const_data_ptr<float>();
  }
  return preparation;
}

// Checks what the caller answers for; whether the run can be encoded at all is `is_plain`'s to say.
inline Run describe_run(const at::Tensor& records, const Exact& tokens, const Preparation& preparation,
                        at::IntArrayRef integers, bool is_key, int64_t batch, int64_t heads, int64_t dim, int64_t start,
                        int64_t count) {
  TORCH_CHECK_VALUE(integers.size() == 10, "Invalid layout: expected 10 integers, got ", integers.size(), ".");
  const Layout layout{integers[0], integers[1], integers[2], integers[3], integers[4],
                      integers[5], integers[6], integers[7], integers[8], integers[9]};
  TORCH_CHECK_VALUE(records.dim() == 4 && records.size(0) == batch && records.size(1) == heads &&
                        records.scalar_type() == at::kByte && records.is_contiguous() && start >= 0 && count >= 0 &&
                        (start + count + kBlockTokens - 1) / kBlockTokens <= records.size(2),
                    "Invalid records: expected contiguous (", batch, ", ", heads, ", N, bytes) with room for ",
                    start + count, " tokens, got ", records.sizes(), ".");
  TORCH_CHECK_VALUE(dim >= 1 && dim <= kMaxHeadDim, "Invalid head_dim of states: expected 1 to ", kMaxHeadDim, ", got ",
                    dim, ".");
  TORCH_CHECK_VALUE(dim == layout.head_dim && layout.group_tokens >= 1 &&
                        start % layout.group_tokens == 0 && count % layout.group_tokens == 0,
                    "Invalid states: expected whole groups of ", layout.group_tokens, " tokens of ", layout.head_dim,
                    " channels, got ", count, " of ", dim, " from slot ", start, ".");
  TORCH_CHECK_VALUE(layout.width >= 1 && dim % layout.width == 0 && (layout.group_tokens == 1 || layout.width == dim) &&
                        (layout.metadata_bytes == 2 || layout.metadata_bytes == 4),
                    "Invalid layout: a width of ", layout.width, " and metadata of ", layout.metadata_bytes,
                    " bytes do not go with groups of ", layout.group_tokens, " tokens.");
  const int64_t rows = kBlockTokens / std::min<int64_t>(layout.group_tokens, kBlockTokens);
  const int64_t row_bytes = rows * layout.width * layout.metadata_bytes;
  const int64_t code_bytes = kBlockTokens * layout.padded_dim() * layout.nbits / 8;
  TORCH_CHECK_VALUE(layout.codes_offset >= 0 && layout.codes_offset + code_bytes <= records.size(3) &&
                        std::max(layout.scale_offset, layout.minimum_offset) + row_bytes <= records.size(3),
                    "Invalid layout: a field lies outside of the ", records.size(3), " bytes of a record.");
  return {records, tokens, preparation, layout, is_key, start, count, choose_unit_kernels()};
}

struct Unit {
  int64_t row, head, start, count;  // slots
};

// Calls `visit(unit, numbers)` for every unit, with room for its numbers, until `go_on` is false.
template <class Visit>
void for_units(const Run& run, const std::atomic<bool>& go_on, Visit visit) {
  const int64_t unit = run.unit(), dim = run.layout.head_dim, end = run.start + run.count;
  const int64_t first_unit = run.start / unit, units = (end + unit - 1) / unit - first_unit;
  const int64_t heads = run.records.size(1), longest = std::min(run.count, unit);
  const int64_t grain = std::max<int64_t>(1, (1 << 14) / (longest * dim));
  at::parallel_for(0, run.records.size(0) * heads * units, grain, [&](int64_t begin, int64_t stop) {
    std::vector<float> numbers(static_cast<size_t>(longest * dim));
    for (int64_t task = begin; task < stop && go_on.load(std::memory_order_relaxed); ++task) {
      const int64_t low = std::max(run.start, (first_unit + task % units) * unit);
      const int64_t high = std::min(end, (first_unit + task % units + 1) * unit);
      visit(Unit{task / units / heads, task / units % heads, low, high - low}, numbers.data());
    }
  });
}

inline Rows rows_of(const Run& run, const Unit& unit) {
  return run.tokens.rows(unit.row, unit.head, unit.start - run.start);
}

// Numbers of a unit in fp32, divided by their factors.
inline void load_numbers(const Run& run, const Unit& unit, float* numbers) {
  const int64_t dim = run.layout.head_dim;
  run.kernels.load(rows_of(run, unit), unit.count, dim, numbers);
  if (run.preparation.factors == nullptr) return;
  const float* factors = run.preparation.factors + (unit.row * run.records.size(1) + unit.head) * dim;
  for (int64_t t = 0; t < unit.count; ++t)
    for (int64_t c = 0; c < dim; ++c) numbers[t * dim + c] /= factors[c];
}

// Whether all numbers are finite, and stay fp16 numbers if they are rotated: that adds at most a factor of sqrt(2).
inline bool are_below_half(const Run& run) {
  if (!run.tokens.is_known()) return false;
  const float limit = run.preparation.rotate_back == nullptr ? kLargestHalf : kLargestHalf / 1.5f;
  const int64_t dim = run.layout.head_dim;
  std::atomic<bool> are{true};
  for_units(run, are, [&](const Unit& unit, float* numbers) {
    Rows rows = rows_of(run, unit);
    if (run.preparation.factors != nullptr) {
      load_numbers(run, unit, numbers);
      rows = {numbers, kFloat32, dim};
    }
    if (!run.kernels.are_below(rows, unit.count, dim, limit)) are.store(false, std::memory_order_relaxed);
  });
  return are.load();
}

// Whether `encode_run` would write what the codecs write.
inline bool is_plain(const Run& run) {
  if (run.count == 0) return true;
  return run.layout.scale_offset >= 0 && run.preparation.is_possible && are_below_half(run);
}

inline void encode_run(const Run& run) {
  if (run.count == 0) return;
  const std::atomic<bool> always{true};
  uint8_t* data = run.records.mutable_data_ptr<uint8_t>();
  for_units(run, always, [&](const Unit& unit, float* numbers) {
    load_numbers(run, unit, numbers);
    const Preparation& preparation = run.preparation;
    if (preparation.rotate_back != nullptr)
      preparation.rotate_back(numbers, unit.start, unit.count, run.layout, preparation.rotation);
    uint8_t* first = data + unit.row * run.records.stride(0) + unit.head * run.records.stride(1);
    run.kernels.encode(numbers, unit.start, unit.count, first, run.records.size(3), run.layout, run.is_key);
  });
}

}  // namespace
}  // namespace kvcache
