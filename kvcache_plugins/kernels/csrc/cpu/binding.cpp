// The CPU implementation of kvcache_plugins::decode_attention (schema: kvcache_plugins/kernels/ops.py): checks the
// tensors, cuts the work into tasks of one (row, kv head, at most 64 query rows, range of slots), runs them on torch's
// threads with the kernel of this machine, and merges the ranges. It adds a few microseconds to what the kernels read.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <pthread.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <string>
#include <vector>

#include "decode_attention.h"

namespace kvcache {
namespace {

using OptionalTensor = std::optional<at::Tensor>;

constexpr int64_t kSmallestSplit = 4;         // blocks
constexpr int64_t kSerialValues = 1 << 17;    // keys and values read in about the time it takes to wake a thread
constexpr int64_t kTasksPerThread = 4;
constexpr float kNothing = -std::numeric_limits<float>::infinity();

// OpenMP's threads do not survive a fork, and waiting for them would hang the child.
std::atomic<bool> is_forked{false};
[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, [] { is_forked = true; });

#define KVCACHE_CHECK(condition, what, name, expected, got) \
  TORCH_CHECK_VALUE(condition, "Invalid ", what, " of ", name, ": expected ", expected, ", got ", got)

// ---- choice of the kernel

struct InstructionSet {
  const char* name;
  Kernel kernel;
  bool is_supported;
};

std::vector<InstructionSet> instruction_sets() {
  std::vector<InstructionSet> sets;
#if defined(__x86_64__)
#if !defined(KVCACHE_NO_AVX512)
  sets.push_back({"avx512", decode_attention_avx512,
                  __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16")});
#else
  sets.push_back({"avx512", nullptr, false});
#endif
  sets.push_back({"avx2", decode_attention_avx2,
                  __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")});
#else
  sets.push_back({"avx512", nullptr, false});
  sets.push_back({"avx2", nullptr, false});
#endif
  sets.push_back({"portable", decode_attention_portable, true});
  return sets;
}

// The best instruction set, or the one KVCACHE_CPU_ISA names; read at every call, so that it can be changed.
InstructionSet choose_instruction_set() {
  static const std::vector<InstructionSet> sets = instruction_sets();
  const char* forced = std::getenv("KVCACHE_CPU_ISA");
  if (forced == nullptr || *forced == '\0') {
    return *std::find_if(sets.begin(), sets.end(), [](const InstructionSet& set) { return set.is_supported; });
  }
  for (const InstructionSet& set : sets) {
    if (set.name != std::string(forced)) continue;
    TORCH_CHECK_VALUE(set.is_supported, "KVCACHE_CPU_ISA=", forced, ", but ",
                      set.kernel == nullptr ? "that kernel was not built." : "this processor does not support it.");
    return set;
  }
  TORCH_CHECK_VALUE(false, "KVCACHE_CPU_ISA must be one of avx512, avx2, portable, got ", forced, ".");
}

// ---- description of the keys and values

// The integers of a layout, in the order of `SideLayout` in ops.py.
enum LayoutField {
  kPackedLength, kNbits, kFormatField, kHeadDim, kGroupTokens, kWidth, kMetadataBytes, kInterleaved, kCodesOffset,
  kScaleOffset, kMinimumOffset, kPeriod, kRotaryDim, kLayoutFields
};

struct Inputs {
  const char* name;  // "key" or "value"
  std::vector<at::Tensor> segments;
  OptionalTensor static_scale, factors, cos, sin, sinks;
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

// Checks an fp32 extra and makes it contiguous; `name` is a suffix such as "factors".
void check_extra(const Inputs& inputs, OptionalTensor& tensor, const char* suffix, at::IntArrayRef shape) {
  if (!tensor.has_value()) return;
  const std::string name = std::string(inputs.name) + "_" + suffix;
  check_tensor(*tensor, name, shape);
  KVCACHE_CHECK(tensor->scalar_type() == at::kFloat, "dtype", name, "float32", tensor->scalar_type());
  tensor = tensor->contiguous();
}

Inputs describe(const char* name, const at::Tensor& records, at::TensorList segments,
                const c10::List<OptionalTensor>& extras, at::IntArrayRef layout, const at::Tensor& query) {
  KVCACHE_CHECK(layout.size() == kLayoutFields, "length", std::string(name) + "_layout", int{kLayoutFields},
                layout.size());
  KVCACHE_CHECK(extras.size() == 5, "length", std::string(name) + "_extras", 5, extras.size());
  Inputs inputs{name, segments.vec(), extras.get(0), extras.get(1), extras.get(2), extras.get(3), extras.get(4), {}};
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
  KVCACHE_CHECK(dim >= 1 && dim <= kMaxHeadDim, "head_dim", layout_name, "1 to 256", dim);
  KVCACHE_CHECK(side.format == kAffine
                    ? side.nbits == 2 || side.nbits == 3 || side.nbits == 4 || side.nbits == 8
                    : side.nbits == 8 && side.format >= kAffine && side.format <= kE5M2,
                "nbits and format", layout_name, "2, 3, 4 or 8 for format 0, 8 for formats 1 to 3",
                std::to_string(side.nbits) + " and " + std::to_string(side.format));
  KVCACHE_CHECK(side.group_tokens >= 1 && side.group_tokens <= kBlockTokens && kBlockTokens % side.group_tokens == 0,
                "group_tokens", layout_name, "a divisor of 64", side.group_tokens);
  KVCACHE_CHECK(side.width >= 1 && dim % side.width == 0, "width", layout_name, "a divisor of head_dim", side.width);
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
    KVCACHE_CHECK(offset >= 0 && (blocks == 0 || offset + size <= side.record_bytes), "field offset", layout_name,
                  "a field inside the record", offset);
  }
  KVCACHE_CHECK(side.scale_offset >= 0 || inputs.static_scale.has_value() || blocks == 0, "scale", layout_name,
                "an offset or a static scale", "neither");
  KVCACHE_CHECK(inputs.cos.has_value() == inputs.sin.has_value(), "rotation", layout_name, "both cos and sin", "one");
  if (inputs.cos.has_value()) {
    KVCACHE_CHECK(side.period >= 1 && side.rotary_dim >= 0 && side.rotary_dim % 2 == 0 && side.rotary_dim <= dim,
                  "rotary_dim", layout_name, "an even number up to head_dim and a period", side.rotary_dim);
  }
  check_extra(inputs, inputs.static_scale, "static_scale", {heads});
  check_extra(inputs, inputs.factors, "factors", {batch, heads, dim});
  check_extra(inputs, inputs.cos, "cos", {side.period, side.rotary_dim / 2});
  check_extra(inputs, inputs.sin, "sin", {side.period, side.rotary_dim / 2});
  side.cos = inputs.cos.has_value() ? inputs.cos->const_data_ptr<float>() : nullptr;
  side.sin = inputs.sin.has_value() ? inputs.sin->const_data_ptr<float>() : nullptr;

  KVCACHE_CHECK(inputs.segments.size() <= 3, "length", std::string(name) + "_segments", "at most 3",
                inputs.segments.size());
  side.dtype = inputs.segments.empty() ? dtype_of(query, "query") : dtype_of(inputs.segments[0], name);
  for (const at::Tensor& segment : inputs.segments) {
    const std::string segment_name = std::string(name) + "_segments";
    KVCACHE_CHECK(segment.dim() == 4, "rank", segment_name, 4, segment.dim());
    check_tensor(segment, segment_name, {batch, heads, segment.size(2), dim});
    KVCACHE_CHECK(dtype_of(segment, segment_name) == side.dtype, "dtype", segment_name, inputs.segments[0].dtype(),
                  segment.dtype());
  }
  if (inputs.sinks.has_value()) {
    const std::string sinks_name = std::string(name) + "_sinks";
    KVCACHE_CHECK(inputs.sinks->dim() == 4, "rank", sinks_name, 4, inputs.sinks->dim());
    check_tensor(*inputs.sinks, sinks_name, {batch, heads, inputs.sinks->size(2), dim});
    KVCACHE_CHECK(dtype_of(*inputs.sinks, sinks_name) == side.dtype, "dtype", sinks_name, "that of the segments",
                  inputs.sinks->scalar_type());
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
Side side_of(const Inputs& inputs, const at::Tensor& records, int64_t row, int64_t head, const int64_t* sink_start) {
  Side side = inputs.side;
  side.records = static_cast<const uint8_t*>(records.const_data_ptr()) + row * records.stride(0) +
                 head * records.stride(1);
  if (inputs.static_scale.has_value()) side.static_scale = inputs.static_scale->const_data_ptr<float>()[head];
  const int64_t index = row * records.size(1) + head;
  if (inputs.factors.has_value()) {
    side.factors = inputs.factors->const_data_ptr<float>() + index * side.head_dim;
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
    if (segment.size(2) > 0) side.segments[side.num_segments++] = {data, start, segment.size(2), segment.stride(2)};
    start += segment.size(2);
  }
  return side;
}

// ---- the op

// Runs every task; threads take the next one as they become free.
void run_tasks(const std::vector<Task>& tasks, Kernel kernel, bool is_serial) {
  if (is_serial || is_forked || tasks.size() == 1) {
    for (const Task& task : tasks) kernel(task);
    return;
  }
  std::atomic<size_t> next{0};
  at::parallel_for(0, std::min<int64_t>(at::get_num_threads(), tasks.size()), 1, [&](int64_t, int64_t) {
    for (size_t i = next++; i < tasks.size(); i = next++) kernel(tasks[i]);
  });
}

// Ranges of at least kSmallestSplit blocks, so many that every thread has several tasks.
int64_t choose_splits(int64_t blocks, int64_t rows, bool is_serial) {
  const int64_t threads = is_serial ? 1 : at::get_num_threads();
  if (threads == 1 || blocks < 2 * kSmallestSplit) return 1;
  const int64_t wanted = (kTasksPerThread * threads + rows - 1) / rows;
  return std::max<int64_t>(1, std::min(wanted, blocks / kSmallestSplit));
}

// Bias as fp32 with strides such that one number leads from a query row to the next.
at::Tensor prepare_bias(const at::Tensor& bias, at::IntArrayRef full) {
  KVCACHE_CHECK(bias.dim() == 4 && bias.scalar_type() == at::kFloat && bias.device().is_cpu(), "bias",
                "decode_attention", "a 4-D float32 CPU tensor", bias.toString());
  for (int d = 0; d < 4; ++d) {
    KVCACHE_CHECK(bias.size(d) == full[d] || (d < 3 && bias.size(d) == 1), "shape", "bias", full, bias.sizes());
  }
  const bool is_uniform = bias.size(1) == 1 && bias.size(2) == 1;
  const bool is_full = bias.size(1) == full[1] && bias.size(2) == full[2];
  if (is_uniform || is_full) return bias.contiguous();
  return bias.expand({bias.size(0), full[1], full[2], full[3]}).contiguous();
}

at::Tensor decode_attention(const at::Tensor& query, const at::Tensor& records, at::TensorList key_segments,
                            at::TensorList value_segments, const c10::List<OptionalTensor>& key_extras,
                            const c10::List<OptionalTensor>& value_extras, const OptionalTensor& sink_start,
                            at::IntArrayRef key_layout, at::IntArrayRef value_layout, double scaling,
                            const OptionalTensor& bias, bool is_causal, int64_t window, double softcap,
                            const OptionalTensor& sink_logits, const OptionalTensor& alibi_slopes) {
  const InstructionSet instruction_set = choose_instruction_set();
  KVCACHE_CHECK(query.dim() == 4, "rank", "query", 4, query.dim());
  dtype_of(query, "query");
  KVCACHE_CHECK(records.dim() == 4, "rank", "records", 4, records.dim());
  KVCACHE_CHECK(records.scalar_type() == at::kByte, "dtype", "records", "uint8", records.scalar_type());
  check_tensor(records, "records", {query.size(0), records.size(1), records.size(2), records.size(3)});
  KVCACHE_CHECK(records.size(2) <= 1 || records.stride(2) == records.size(3), "stride", "records", records.size(3),
                records.stride(2));
  const Inputs keys = describe("key", records, key_segments, key_extras, key_layout, query);
  const Inputs values = describe("value", records, value_segments, value_extras, value_layout, query);

  const int64_t batch = query.size(0), query_heads = query.size(1), query_length = query.size(2);
  const int64_t kv_heads = records.size(1), length = length_of(keys), value_dim = values.side.head_dim;
  KVCACHE_CHECK(kv_heads > 0 && query_heads % kv_heads == 0, "heads", "query",
                "a multiple of " + std::to_string(kv_heads), query_heads);
  KVCACHE_CHECK(query_length >= 1 && query_length <= kMaxQueries, "tokens", "query", "1 to 64", query_length);
  check_tensor(query, "query", {batch, query_heads, query_length, keys.side.head_dim});
  KVCACHE_CHECK(length == length_of(values), "length", "values", length, length_of(values));
  KVCACHE_CHECK(length >= 1, "length", "keys", "at least 1", length);
  const int64_t group = query_heads / kv_heads, rows = group * query_length;

  const int64_t* starts = nullptr;
  if (sink_start.has_value()) {
    check_tensor(*sink_start, "sink_start", {batch});
    KVCACHE_CHECK(sink_start->scalar_type() == at::kLong, "dtype", "sink_start", "int64", sink_start->scalar_type());
    starts = sink_start->const_data_ptr<int64_t>();
  }
  for (const auto& [tensor, name] : {std::pair{&sink_logits, "sink_logits"}, std::pair{&alibi_slopes, "alibi_slopes"}}) {
    if (!tensor->has_value()) continue;
    check_tensor(**tensor, name, {query_heads});
    KVCACHE_CHECK((*tensor)->scalar_type() == at::kFloat, "dtype", name, "float32", (*tensor)->scalar_type());
  }
  const float* slopes = alibi_slopes.has_value() ? alibi_slopes->const_data_ptr<float>() : nullptr;
  const float* logits = sink_logits.has_value() ? sink_logits->const_data_ptr<float>() : nullptr;
  at::Tensor biases;
  if (bias.has_value()) biases = prepare_bias(*bias, {batch, query_heads, query_length, length});

  const at::Tensor scaled = query.to(at::kFloat).mul(scaling).contiguous();
  const int64_t first = window > 0 ? std::max<int64_t>(0, length - query_length - window + 1) / kBlockTokens : 0;
  const int64_t blocks = (length + kBlockTokens - 1) / kBlockTokens - first;
  const int64_t heads_per_task = std::min(group, std::max<int64_t>(1, kMaxQueries / query_length));
  const int64_t chunks = (group + heads_per_task - 1) / heads_per_task;
  const int64_t row_groups = batch * kv_heads * chunks;
  const bool is_serial = row_groups * blocks * kBlockTokens * (keys.side.head_dim + value_dim) < kSerialValues;
  const int64_t splits = choose_splits(blocks, row_groups, is_serial);
  const at::Tensor partial = at::empty({batch * kv_heads * splits * rows * (value_dim + 2)}, scaled.options());
  float* free = partial.mutable_data_ptr<float>();

  std::vector<Task> tasks;
  tasks.reserve(row_groups * splits);
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t h = 0; h < kv_heads; ++h) {
      Task task{};
      task.key = side_of(keys, records, b, h, starts);
      task.value = side_of(values, records, b, h, starts);
      task.query_length = static_cast<int32_t>(query_length);
      task.precise = query.scalar_type() == at::kFloat;
      task.length = length;
      task.is_causal = is_causal;
      task.window = window;
      task.softcap = static_cast<float>(softcap);
      for (int64_t g = 0; g < group; g += heads_per_task) {
        const int64_t head = h * group + g;
        task.queries = static_cast<int32_t>(std::min(heads_per_task, group - g) * query_length);
        task.query = scaled.const_data_ptr<float>() + (b * query_heads + head) * query_length * keys.side.head_dim;
        task.alibi = slopes != nullptr ? slopes + head : nullptr;
        if (biases.defined()) {
          const bool is_shared = biases.size(1) == 1 && biases.size(2) == 1 && query_heads * query_length > 1;
          task.bias_row_stride = is_shared ? 0 : length;
          task.bias = biases.const_data_ptr<float>() + (biases.size(0) == 1 ? 0 : b * biases.stride(0)) +
                      (is_shared ? 0 : head * query_length * length);
        }
        for (int64_t s = 0; s < splits; ++s) {
          task.begin = (first + s * blocks / splits) * kBlockTokens;
          task.end = std::min(length, (first + (s + 1) * blocks / splits) * kBlockTokens);
          task.maximum = free;
          task.sum = free + task.queries;
          task.output = free + 2 * task.queries;
          free += task.queries * (value_dim + 2);
          tasks.push_back(task);
        }
      }
    }
  }
  run_tasks(tasks, instruction_set.kernel, is_serial);

  at::Tensor output = at::empty({batch, query_heads, query_length, value_dim}, scaled.options());
  float* out = output.mutable_data_ptr<float>();
  for (size_t t = 0, row = 0; t < tasks.size(); t += splits) {
    for (int32_t r = 0; r < tasks[t].queries; ++r, ++row, out += value_dim) {
      const int64_t head = row / query_length % query_heads;
      // The kernels measure ALiBi's distance from the newest query; sinks are compared with this row's own.
      const float shift = slopes != nullptr ? slopes[head] * static_cast<float>(r % query_length - query_length + 1) : 0;
      const float sink = logits != nullptr ? logits[head] + shift : kNothing;
      float maximum = sink;
      for (int64_t s = 0; s < splits; ++s) maximum = std::max(maximum, tasks[t + s].maximum[r]);
      float total = maximum == kNothing ? 0.0f : std::exp(sink - maximum);
      std::fill(out, out + value_dim, 0.0f);
      if (maximum == kNothing) continue;
      for (int64_t s = 0; s < splits; ++s) {
        const Task& task = tasks[t + s];
        if (task.maximum[r] == kNothing) continue;
        const float weight = std::exp(task.maximum[r] - maximum);
        total += weight * task.sum[r];
        const float* partial_output = task.output + r * value_dim;
        for (int64_t d = 0; d < value_dim; ++d) out[d] += weight * partial_output[d];
      }
      const float inverse = total == 0.0f ? 1.0f : 1.0f / total;
      for (int64_t d = 0; d < value_dim; ++d) out[d] *= inverse;
    }
  }
  return output.to(query.scalar_type());
}

}  // namespace
}  // namespace kvcache

// The instruction set in use, or the reason there is none after "error: ".
extern "C" const char* kvcache_cpu_instruction_set() {
  thread_local std::string answer;
  try {
    answer = kvcache::choose_instruction_set().name;
  } catch (const c10::Error& error) {
    answer = std::string("error: ") + error.what_without_backtrace();
  }
  return answer.c_str();
}

TORCH_LIBRARY_IMPL(kvcache_plugins, CPU, library) {
  library.impl("decode_attention", TORCH_FN(kvcache::decode_attention));
}
