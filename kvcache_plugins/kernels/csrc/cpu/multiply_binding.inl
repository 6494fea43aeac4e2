// The CPU implementations of kvcache_plugins::multiply_keys and kvcache_plugins::multiply_values (schemas:
// kvcache_plugins/kernels/ops.py): the two products of attention by themselves, for models that make weights of the
// logits in their own way. The kernels are those of attention, each told to leave out the other half.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <vector>

#include "half_attention.h"

namespace kvcache {
namespace {

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
