// The CPU implementation of kvcache_plugins::append_tokens (schema: kvcache_plugins/kernels/ops.py).
#include <torch/library.h>

#include "encode_run.h"

namespace kvcache {
namespace {

// The integers of a plan, before those of the layout.
enum PlanField { kWrite, kFirst, kCount, kSlot, kPlanFields };

void check_side(const char* side, const at::Tensor& states, const at::Tensor& tail, at::IntArrayRef plan) {
  TORCH_CHECK_VALUE(plan.size() == kPlanFields + 10 || (plan.size() == kPlanFields && plan[kCount] == 0),
                    "Invalid ", side, "_plan: expected 14 integers, or 4 where nothing is due, got ", plan.size(), ".");
  TORCH_CHECK_VALUE(states.dim() == 4 && states.device().is_cpu() && tail.dim() == 4 && tail.device().is_cpu() &&
                        tail.size(0) == states.size(0) && tail.size(1) == states.size(1) &&
                        tail.size(3) == states.size(3) && tail.stride(3) == 1 &&
                        tail.scalar_type() == states.scalar_type(),
                    "Invalid ", side, "_tail: expected ", states.toString(), " (", states.size(0), ", ", states.size(1),
                    ", capacity, ", states.size(-1), ") with contiguous channels, got ", tail.toString(), " ",
                    tail.sizes(), ".");
  const int64_t end = plan[kWrite] + states.size(2);
  TORCH_CHECK_VALUE(plan[kWrite] >= 0 && end <= tail.size(2) && plan[kFirst] >= 0 && plan[kCount] >= 0 &&
                        plan[kFirst] + plan[kCount] <= end,
                    "Invalid ", side, "_plan: ", states.size(2), " tokens to place ", plan[kWrite], " and ",
                    plan[kCount], " due from place ", plan[kFirst], " do not fit a tail of ", tail.size(2), ".");
}

void copy_to_tail(const at::Tensor& states, const at::Tensor& tail, int64_t write) {
  const int64_t heads = states.size(1), count = states.size(2), item = states.element_size();
  const size_t bytes = static_cast<size_t>(states.size(3) * item);
  const auto* from = static_cast<const uint8_t*>(states.const_data_ptr());
  auto* to = static_cast<uint8_t*>(tail.mutable_data_ptr());
  const int64_t grain = std::max<int64_t>(1, (1 << 15) / std::max<int64_t>(1, count * states.size(3)));
  at::parallel_for(0, states.size(0) * heads, grain, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t row = task / heads, head = task % heads;
      const uint8_t* source = from + (row * states.stride(0) + head * states.stride(1)) * item;
      uint8_t* target = to + (row * tail.stride(0) + head * tail.stride(1) + write * tail.stride(2)) * item;
      for (int64_t t = 0; t < count; ++t)
        std::memcpy(target + t * tail.stride(2) * item, source + t * states.stride(2) * item, bytes);
    }
  });
}

std::optional<Run> due_run(const at::Tensor& records, const at::Tensor& tail, at::IntArrayRef plan, bool is_key,
                           const Preparation& preparation) {
  if (plan[kCount] == 0) return std::nullopt;
  // the new tokens are in the tail by the time this is read
  return describe_run(records, Exact(tail, plan[kFirst]), preparation, plan.slice(kPlanFields), is_key, tail.size(0),
                      tail.size(1), tail.size(3), plan[kSlot], plan[kCount]);
}

bool append_tokens(at::Tensor records, const at::Tensor& key_states, const at::Tensor& value_states,
                   at::Tensor key_tail, at::Tensor value_tail, at::IntArrayRef key_plan, at::IntArrayRef value_plan,
                   const OptionalTensor& cos, const OptionalTensor& sin, const OptionalTensor& factors) {
  check_side("key", key_states, key_tail, key_plan);
  check_side("value", value_states, value_tail, value_plan);
  const Preparation preparation =
      key_plan[kCount] == 0 ? Preparation{}
                            : prepare(cos, sin, factors, key_tail.size(0), key_tail.size(1), key_tail.size(3));
  const std::optional<Run> runs[] = {due_run(records, key_tail, key_plan, true, preparation),
                                     due_run(records, value_tail, value_plan, false, {})};
  // everything has been checked: from here on something is written
  copy_to_tail(key_states.stride(3) == 1 ? key_states : key_states.contiguous(), key_tail, key_plan[kWrite]);
  copy_to_tail(value_states.stride(3) == 1 ? value_states : value_states.contiguous(), value_tail, value_plan[kWrite]);
  for (const auto& run : runs)
    if (run.has_value() && !is_plain(*run)) return false;
  for (const auto& run : runs)
    if (run.has_value()) encode_run(*run);
  return true;
}

}  // namespace
}  // namespace kvcache

TORCH_LIBRARY_IMPL(kvcache_plugins, CPU, library) { library.impl("append_tokens", TORCH_FN(kvcache::append_tokens)); }
