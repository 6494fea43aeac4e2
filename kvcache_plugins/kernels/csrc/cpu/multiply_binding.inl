// The CPU implementations of kvcache_plugins::multiply_keys and kvcache_plugins::multiply_values (schemas:
// kvcache_plugins/kernels/ops.py): the two products of attention by themselves, for models that make weights of the
// logits in their own way. The kernels are those of attention, each told to leave out the other half.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <string>
#include <vector>

#include "attention_call.h"
#include "binding_inputs.h"
#include "decode_attention.h"

namespace kvcache {
namespace {

// How the query rows and the slots of a call are cut into tasks.
struct Cut {
  int64_t batch, kv_heads, group, tokens;  // query heads of a kv head, and query tokens
  int64_t heads_per_task;
  int64_t first_block, blocks, splits;
  bool is_serial;

  int64_t rows() const { return group * tokens; }
};

Cut cut_of(const at::Tensor& rows, const char* name, const at::Tensor& records, const Inputs& inputs, int64_t start) {
  KVCACHE_CHECK(rows.dim() == 4, "rank", name, 4, rows.dim());
  const int64_t length = length_of(inputs), heads = rows.size(1);
  Cut cut{};
  cut.batch = records.size(0);
  cut.kv_heads = records.size(1);
  cut.tokens = rows.size(2);
  KVCACHE_CHECK(cut.kv_heads > 0 && heads > 0 && heads % cut.kv_heads == 0, "heads", name,
                "a multiple of " + std::to_string(cut.kv_heads), heads);
  KVCACHE_CHECK(cut.tokens >= 1 && cut.tokens <= kMaxQueries, "tokens", name, "1 to 64", cut.tokens);
  KVCACHE_CHECK(start >= 0 && start < length, "start", name, "a slot before " + std::to_string(length), start);
  cut.group = heads / cut.kv_heads;
  cut.heads_per_task = std::min(cut.group, std::max<int64_t>(1, kMaxQueries / cut.tokens));
  cut.first_block = start / kBlockTokens;
  cut.blocks = (length + kBlockTokens - 1) / kBlockTokens - cut.first_block;
  const int64_t chunks = (cut.group + cut.heads_per_task - 1) / cut.heads_per_task;
  const int64_t row_groups = cut.batch * cut.kv_heads * chunks;
  cut.is_serial = row_groups * cut.blocks * kBlockTokens * inputs.side.head_dim < kSerialValues;
  cut.splits = choose_splits(cut.blocks, row_groups, cut.is_serial);
  return cut;
}

// The side a task does not read.
Side nothing() {
  Side side{};
  side.format = kNonUniform;
  side.width = side.group_tokens = 1;
  side.scale_offset = side.minimum_offset = -1;
  return side;
}

// Calls `add(task, row, split)` for every task, which has all but what it reads and writes; `row` is its first of all
// query rows, and those of one range of slots after the other are neighbours.
template <typename Add>
void for_tasks(const Cut& cut, int64_t length, int64_t start, bool is_precise, const Add& add) {
  Task task{};
  task.query_length = static_cast<int32_t>(cut.tokens);
  task.precise = is_precise;
  task.length = length;
  task.first_slot = start;
  for (int64_t b = 0; b < cut.batch; ++b) {
    for (int64_t h = 0; h < cut.kv_heads; ++h) {
      for (int64_t g = 0; g < cut.group; g += cut.heads_per_task) {
        task.queries = static_cast<int32_t>(std::min(cut.heads_per_task, cut.group - g) * cut.tokens);
        for (int64_t s = 0; s < cut.splits; ++s) {
          task.begin = (cut.first_block + s * cut.blocks / cut.splits) * kBlockTokens;
          task.end = std::min(length, (cut.first_block + (s + 1) * cut.blocks / cut.splits) * kBlockTokens);
          add(task, b, h, (b * cut.kv_heads + h) * cut.rows() + g * cut.tokens);
        }
      }
    }
  }
}

at::Tensor multiply_keys(const at::Tensor& query, const at::Tensor& records, at::TensorList segments,
                         const c10::List<OptionalTensor>& extras, const OptionalTensor& sink_start,
                         at::IntArrayRef layout, int64_t start) {
  const Kernel kernel = best_kernel();
  dtype_of(query, "query");
  check_records(records);
  const Inputs keys = describe("key", records, segments, extras, layout, query);
  const Cut cut = cut_of(query, "query", records, keys, start);
  const int64_t length = length_of(keys), dim = keys.side.head_dim, seen = length - start;
  check_tensor(query, "query", {cut.batch, cut.kv_heads * cut.group, cut.tokens, dim});
  const int64_t* starts = check_sink_start(sink_start, cut.batch);
  const auto floats = query.options().dtype(at::kFloat);
  const at::Tensor scaled = at::empty({query.numel()}, floats);
  scale_query(query, 1.0f, scaled.mutable_data_ptr<float>());
  at::Tensor logits = at::empty({cut.batch, cut.kv_heads * cut.group, cut.tokens, seen}, floats);

  std::vector<Task> tasks;
  for_tasks(cut, length, start, query.scalar_type() != at::kBFloat16,
            [&](Task task, int64_t b, int64_t h, int64_t row) {
              task.key = side_of(keys, records, b, h, starts);
              task.value = nothing();
              task.query = scaled.const_data_ptr<float>() + row * dim;
              task.logits = logits.mutable_data_ptr<float>() + row * seen;
              tasks.push_back(task);
            });
  run_parallel(tasks.size(), cut.is_serial, [&](int64_t task) { kernel(tasks[task]); });
  return logits;
}

at::Tensor multiply_values(const at::Tensor& weights, const at::Tensor& records, at::TensorList segments,
                           const c10::List<OptionalTensor>& extras, const OptionalTensor& sink_start,
                           at::IntArrayRef layout, int64_t start) {
  const Kernel kernel = best_kernel();
  dtype_of(weights, "weights");
  check_records(records);
  const Inputs values = describe("value", records, segments, extras, layout, weights);
  const Cut cut = cut_of(weights, "weights", records, values, start);
  const int64_t length = length_of(values), dim = values.side.head_dim, seen = length - start;
  check_tensor(weights, "weights", {cut.batch, cut.kv_heads * cut.group, cut.tokens, seen});
  const int64_t* starts = check_sink_start(sink_start, cut.batch);
  const auto floats = weights.options().dtype(at::kFloat);
  const at::Tensor given = at::empty({weights.numel()}, floats);
  scale_query(weights, 1.0f, given.mutable_data_ptr<float>());
  const at::Tensor scratch = at::empty({cut.batch * cut.kv_heads * cut.rows() * cut.splits * (dim + 2)}, floats);
  float* free = scratch.mutable_data_ptr<float>();

  std::vector<Task> tasks;
  for_tasks(cut, length, start, weights.scalar_type() != at::kBFloat16,
            [&](Task task, int64_t b, int64_t h, int64_t row) {
              task.key = nothing();
              task.value = side_of(values, records, b, h, starts);
              task.weights = given.const_data_ptr<float>() + row * seen;
              task.maximum = free;
              task.sum = free + task.queries;
              task.output = free + 2 * task.queries;
              free += task.queries * (dim + 2);
              tasks.push_back(task);
            });
  run_parallel(tasks.size(), cut.is_serial, [&](int64_t task) { kernel(tasks[task]); });

  at::Tensor output = at::empty({cut.batch, cut.kv_heads * cut.group, cut.tokens, dim}, weights.options());
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kBFloat16, at::kHalf, weights.scalar_type(), "multiply_values", [&] {
    scalar_t* out = output.mutable_data_ptr<scalar_t>();
    for (size_t t = 0; t < tasks.size(); t += cut.splits)
      for (int32_t r = 0; r < tasks[t].queries; ++r, out += dim) merge(&tasks[t], cut.splits, r, dim, kNothing, out);
  });
  return output;
}

}  // namespace
}  // namespace kvcache

TORCH_LIBRARY_IMPL(kvcache_plugins, CPU, library) {
  library.impl("multiply_keys", TORCH_FN(kvcache::multiply_keys));
  library.impl("multiply_values", TORCH_FN(kvcache::multiply_values));
}
