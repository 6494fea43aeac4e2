// The CUDA implementation of kvcache_plugins::append_tokens (schema: kvcache_plugins/kernels/ops.py): one launch, and
// nothing that waits. Metadata beyond fp16 saturate, which is reported later (device_faults.h).
#include "encode_inputs.h"

namespace kvcache {
namespace {

// The integers of a plan, before those of the layout.
enum PlanField { kWrite, kFirst, kCount, kSlot, kPlanFields };

void check_side(const std::string& side, const at::Tensor& states, const at::Tensor& tail, at::IntArrayRef plan) {
  TORCH_CHECK_VALUE(
      plan.size() == kPlanFields + kEncodeLayoutFields || (plan.size() == kPlanFields && plan[kCount] == 0), "Invalid ",
      side, "_plan: expected 14 integers, or 4 where nothing is due, got ", plan.size(), ".");
  check_device(states, side + "_states");
  check_device(tail, side + "_tail");
  TORCH_CHECK_VALUE(states.dim() == 4 && tail.dim() == 4 && tail.size(0) == states.size(0) &&
                        tail.size(1) == states.size(1) &&
                        tail.size(3) == states.size(3) && tail.stride(3) == 1 &&
                        tail.scalar_type() == states.scalar_type() && tail.element_size() % 2 == 0,
                    "Invalid ", side, "_tail: expected ", states.toString(), " (", states.size(0), ", ", states.size(1),
                    ", capacity, ", states.size(-1), ") with contiguous channels, got ", tail.toString(), " ",
                    tail.sizes(), ".");
  const int64_t end = plan[kWrite] + states.size(2);
  TORCH_CHECK_VALUE(plan[kWrite] >= 0 && end <= tail.size(2) && plan[kFirst] >= 0 && plan[kCount] >= 0 &&
                        plan[kFirst] + plan[kCount] <= end,
                    "Invalid ", side, "_plan: ", states.size(2), " tokens to place ", plan[kWrite], " and ",
                    plan[kCount], " due from place ", plan[kFirst], " do not fit a tail of ", tail.size(2), ".");
}

PlaceArguments describe_places(const at::Tensor& states, const at::Tensor& tail, int64_t write) {
  const int64_t words = states.element_size() / 2;
  auto* to = static_cast<uint16_t*>(tail.mutable_data_ptr()) + write * tail.stride(2) * words;
  return {static_cast<const uint16_t*>(states.const_data_ptr()),
          states.stride(0) * words,
          states.stride(1) * words,
          states.stride(2) * words,
          to,
          tail.stride(0) * words,
          tail.stride(1) * words,
          tail.stride(2) * words,
          static_cast<int32_t>(states.size(2)),
          static_cast<int32_t>(states.size(3) * words)};
}

// What is due of `[tail | states]`; `count` is 0 if that is nothing, or nothing that the kernels encode.
EncodeArguments describe_due(const Device& device, const at::Tensor& records, const at::Tensor& states,
                             const at::Tensor& tail, at::IntArrayRef plan, bool is_key) {
  const auto dtype = states.scalar_type();
  const bool is_known = dtype == at::kFloat || dtype == at::kBFloat16 || dtype == at::kHalf;
  if (plan[kCount] == 0 || !is_known) return {};
  EncodeArguments a = describe_encoding(device, records, tail, plan[kFirst], is_key, plan.slice(kPlanFields),
                                        plan[kSlot], plan[kCount]);
  if (!is_encodable(a)) return {};
  // The first due token that is a new one, and where it is to be read.
  const int64_t held = std::max<int64_t>(plan[kWrite] - plan[kFirst], 0);
  a.newer_start = plan[kSlot] + held;
  a.newer = exact_tokens(states, plan[kFirst] + held - plan[kWrite]);
  return a;
}

bool append_tokens(at::Tensor records, const at::Tensor& given_keys, const at::Tensor& given_values,
                   at::Tensor key_tail, at::Tensor value_tail, at::IntArrayRef key_plan, at::IntArrayRef value_plan,
                   const OptionalTensor& cos, const OptionalTensor& sin, const OptionalTensor& factors) {
  const Device device(given_keys);
  report_faults(device);
  check_side("key", given_keys, key_tail, key_plan);
  check_side("value", given_values, value_tail, value_plan);
  const at::Tensor keys = given_keys.stride(3) == 1 ? given_keys : given_keys.contiguous();
  const at::Tensor values = given_values.stride(3) == 1 ? given_values : given_values.contiguous();
  AppendArguments a{};
  a.key_new = describe_places(keys, key_tail, key_plan[kWrite]);
  a.value_new = describe_places(values, value_tail, value_plan[kWrite]);
  a.key = describe_due(device, records, keys, key_tail, key_plan, true);
  a.value = describe_due(device, records, values, value_tail, value_plan, false);
  const int64_t batch = keys.size(0), heads = keys.size(1);
  TORCH_CHECK_VALUE(values.size(0) == batch && values.size(1) == heads, "Invalid value_states: expected (", batch, ", ",
                    heads, ", n, D) as the keys are, got ", values.sizes(), ".");
  if (a.key.count > 0) {
    set_rotation(a.key, cos, sin);
    set_factors(a.key, factors, batch, heads);
  }
  const bool is_served_whole = a.key.count == key_plan[kCount] && a.value.count == value_plan[kCount];
  if (!is_served_whole) a.key.count = a.value.count = 0;
  if (batch * heads > 0)
    device.check(append_slots(a, static_cast<int>(batch), static_cast<int>(heads), device.stream()));
  return is_served_whole;
}

}  // namespace
}  // namespace kvcache

TORCH_LIBRARY_IMPL(KVCACHE_LIBRARY, KVCACHE_DISPATCH_KEY, library) {
  library.impl("append_tokens", TORCH_FN(kvcache::append_tokens));
}
