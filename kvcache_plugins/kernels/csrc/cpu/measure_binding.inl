// The CPU implementation of kvcache_plugins::measure_attention (schema: kvcache_plugins/kernels/ops.py): how much of the
// attention of some queries every token receives. The kernels are those of attention, told to leave out the values.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include <algorithm>
#include <array>
#include <vector>

#include "half_attention.h"
#include "receive_weights.h"

namespace kvcache {
namespace {

// Of a task, unless it has fewer rows; attention/measured.py gives no more query tokens than there are rows then.
constexpr int64_t kMostLogits = 1 << 22;
constexpr int64_t kFewestRows = 8;

// The logits of all rows of a task, and what tokens receive of them.
struct Measurement {
  Task task;
  int64_t first_row;  // of all query rows
  float* received;    // [slots]
};

// Fills the logits where a kernel passes over blocks that nobody sees.
void clear(const Task& task, int64_t slots) {
  if (task.bias != nullptr) std::fill(task.logits, task.logits + task.queries * slots, kNothing);
}

at::Tensor measure_attention(const at::Tensor& query, const at::Tensor& records, at::TensorList segments,
                             const c10::List<OptionalTensor>& extras, const OptionalTensor& sink_start,
                             at::IntArrayRef layout, int64_t start, double scaling, const OptionalTensor& bias,
                             bool is_causal, int64_t window, double softcap, const OptionalTensor& sink_logits,
                             const OptionalTensor& alibi_slopes, const OptionalTensor& counted, bool is_strongest) {
  const Kernel kernel = best_kernel();
  const Receive receive = best_receive();
  dtype_of(query, "query");
  check_records(records);
  const Inputs keys = describe("key", records, segments, extras, layout, query);
  KVCACHE_CHECK(query.dim() == 4, "rank", "query", 4, query.dim());
  const int64_t length = length_of(keys), dim = keys.side.head_dim, all = length - start;
  const int64_t first = window > 0 ? std::max(start, (length - query.size(2) - window + 1) / kBlockTokens * kBlockTokens)
                                   : start;  // no query sees what comes before
  const int64_t slots = length - first;
  const int64_t most_rows = std::clamp(kMostLogits / std::max<int64_t>(1, slots), kFewestRows, int64_t{kMaxQueries});
  const Cut cut = cut_of(query, "query", records, keys, first, most_rows);
  const int64_t heads = cut.kv_heads * cut.group;
  check_tensor(query, "query", {cut.batch, heads, cut.tokens, dim});
  KVCACHE_CHECK(start >= 0, "start", "query", "a slot from 0 on", start);
  const int64_t* starts = check_sink_start(sink_start, cut.batch);
  const std::array<int64_t, 1> of_heads{heads};
  const std::array<int64_t, 3> of_queries{cut.batch, heads, cut.tokens};
  const bool are_sinks_of_queries = sink_logits.has_value() && sink_logits->dim() == 3;
  const float* sinks = check_numbers(sink_logits, "sink_logits",
                                     are_sinks_of_queries ? at::IntArrayRef(of_queries) : at::IntArrayRef(of_heads));
  const float* slopes = check_numbers(alibi_slopes, "alibi_slopes", of_heads);
  at::Tensor biases;
  if (bias.has_value()) biases = prepare_bias("measure_attention", *bias, {cut.batch, heads, cut.tokens, length});
  const bool* counts = nullptr;
  if (counted.has_value()) {
    check_tensor(*counted, "counted", {cut.batch, cut.tokens});
    KVCACHE_CHECK(counted->scalar_type() == at::kBool && counted->is_contiguous(), "dtype", "counted",
                  "contiguous bool", counted->scalar_type());
    counts = counted->const_data_ptr<bool>();
  }

  const auto floats = query.options().dtype(at::kFloat);
  const at::Tensor scaled = at::empty({query.numel()}, floats);
  scale_query(query, static_cast<float>(scaling), scaled.mutable_data_ptr<float>());
  // One range of slots: every worker has logits of its own. Several: so has every group of rows, until all are there.
  const int64_t groups = cut.row_groups(), task_logits = cut.heads_per_task * cut.tokens * slots;
  const int64_t workers = count_workers(groups, cut.is_serial), areas = cut.splits > 1 ? groups : workers;
  const at::Tensor logits = at::empty({areas * task_logits}, floats);
  const at::Tensor received = at::zeros({groups, slots}, floats);

  std::vector<Measurement> measurements;
  measurements.reserve(groups * cut.splits);
  for_tasks(cut, length, first, query.scalar_type() != at::kBFloat16,
            [&](Task task, int64_t b, int64_t h, int64_t row) {
              const int64_t head = row / cut.tokens % heads;
              const int64_t group = static_cast<int64_t>(measurements.size()) / cut.splits;
              task.key = side_of(keys, records, b, h, starts);
              task.value = nothing();
              task.query = scaled.const_data_ptr<float>() + row * dim;
              task.scaling = static_cast<float>(scaling);
              task.is_causal = is_causal;
              task.window = window;
              task.softcap = static_cast<float>(softcap);
              task.alibi = slopes != nullptr ? slopes + head : nullptr;
              if (biases.defined()) give_bias(task, biases, b, head);
              task.logits = logits.mutable_data_ptr<float>() + (cut.splits > 1 ? group * task_logits : 0);
              measurements.push_back({task, row, received.mutable_data_ptr<float>() + group * slots});
            });

  const auto gather = [&](const Measurement& of, float* found) {
    for (int64_t r = 0; r < of.task.queries; ++r) {
      const int64_t row = of.first_row + r, b = row / (heads * cut.tokens), token = row % cut.tokens;
      if (counts != nullptr && !counts[b * cut.tokens + token]) continue;
      const float sink = sinks == nullptr ? kNothing : sinks[are_sinks_of_queries ? row : row / cut.tokens % heads];
      receive(found + r * slots, slots, sink, is_strongest, of.received);
    }
  };
  if (cut.splits == 1) {
    run_on_workers(groups, workers, [&](int64_t group, int64_t worker) {
      Task task = measurements[group].task;
      task.logits += worker * task_logits;
      clear(task, slots);
      kernel(task);
      gather(measurements[group], task.logits);
    });
  } else {
    for (int64_t group = 0; group < groups; ++group) clear(measurements[group * cut.splits].task, slots);
    run_parallel(measurements.size(), cut.is_serial, [&](int64_t place) { kernel(measurements[place].task); });
    run_parallel(groups, cut.is_serial, [&](int64_t group) {
      const Measurement& of = measurements[group * cut.splits];
      gather(of, of.task.logits);
    });
  }

  at::Tensor output = at::zeros({cut.batch, cut.kv_heads, all}, floats);
  const int64_t chunks = groups / (cut.batch * cut.kv_heads);
  float* out = output.mutable_data_ptr<float>() + (first - start);
  const float* part = received.const_data_ptr<float>();
  for (int64_t head = 0; head < cut.batch * cut.kv_heads; ++head, out += all) {
    for (int64_t chunk = 0; chunk < chunks; ++chunk, part += slots) {
      for (int64_t t = 0; t < slots; ++t) out[t] = is_strongest ? std::max(out[t], part[t]) : out[t] + part[t];
    }
  }
  return output;
}

}  // namespace
}  // namespace kvcache

TORCH_LIBRARY_IMPL(kvcache_plugins, CPU, library) {
  library.impl("measure_attention", TORCH_FN(kvcache::measure_attention));
}
