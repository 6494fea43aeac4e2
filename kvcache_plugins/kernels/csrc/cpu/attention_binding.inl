// The CPU implementations of kvcache_plugins::decode_attention and kvcache_plugins::attend_latents (schemas:
// kvcache_plugins/kernels/ops.py): which kernel serves, and how its inputs are read. How a call is cut into tasks is
// said in attention_call.h.
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdlib>
#include <string>
#include <vector>

#include "attend_latents.h"
#include "attention_call.h"
#include "binding_inputs.h"
#include "decode_attention.h"
#include "receive_weights.h"

namespace kvcache {
namespace {

struct InstructionSet {
  const char* name;
  Kernel kernel, latents;
  Receive receive;
  bool is_supported;
};

std::vector<InstructionSet> instruction_sets() {
  std::vector<InstructionSet> sets;
#if defined(__x86_64__)
#if !defined(KVCACHE_NO_AVX512)
  sets.push_back({"avx512", decode_attention_avx512, attend_latents_avx512, receive_weights_avx512,
                  __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16") &&
                      __builtin_cpu_supports("avx512vbmi")});
#else
  sets.push_back({"avx512", nullptr, nullptr, nullptr, false});
#endif
  sets.push_back(
      {"avx2", decode_attention_avx2, attend_latents_avx2, receive_weights_avx2,
       __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")});
#else
  sets.push_back({"avx512", nullptr, nullptr, nullptr, false});
  sets.push_back({"avx2", nullptr, nullptr, nullptr, false});
#endif
  sets.push_back({"portable", decode_attention_portable, attend_latents_portable, receive_weights_portable, true});
  return sets;
}

// The best instruction set, or the one KVCACHE_CPU_ISA names; read at every call, so that it can be changed.
InstructionSet choose_instruction_set() {
  static const std::vector<InstructionSet> sets = instruction_sets();
  const char* forced = std::getenv("KVCACHE_CPU_ISA");
  if (forced == nullptr || *forced == '\0') {
    return *std::find_if(sets.begin(), sets.end(),
                         [](const InstructionSet& set) { return set.is_supported; });
  }
  for (const InstructionSet& set : sets) {
    if (set.name != std::string(forced)) continue;
    TORCH_CHECK_VALUE(
        set.is_supported, "KVCACHE_CPU_ISA=", forced, ", but ",
        set.kernel == nullptr ? "that kernel was not built." : "this processor does not support it.");
    return set;
  }
  TORCH_CHECK_VALUE(false, "KVCACHE_CPU_ISA must be one of avx512, avx2, portable, got ", forced, ".");
}

at::Tensor decode_attention(const at::Tensor& query, const at::Tensor& records, at::TensorList key_segments,
                            at::TensorList value_segments, const c10::List<OptionalTensor>& key_extras,
                            const c10::List<OptionalTensor>& value_extras, const OptionalTensor& sink_start,
                            at::IntArrayRef key_layout, at::IntArrayRef value_layout, double scaling,
                            const OptionalTensor& bias, bool is_causal, int64_t window, double softcap,
                            const OptionalTensor& sink_logits, const OptionalTensor& alibi_slopes) {
  const InstructionSet instruction_set = choose_instruction_set();
  dtype_of(query, "query");
  check_records(records);
  const Inputs keys = describe("key", records, key_segments, key_extras, key_layout, query);
  const Inputs values = describe("value", records, value_segments, value_extras, value_layout, query);
  return attend({
      .operation = "decode_attention",
      .kernel = instruction_set.kernel,
      .query = query,
      .records = records,
      .keys = keys,
      .values = values,
      .sink_start = sink_start,
      .bias = bias,
      .sink_logits = sink_logits,
      .alibi_slopes = alibi_slopes,
      .scaling = static_cast<float>(scaling),
      .is_causal = is_causal,
      .window = window,
      .softcap = static_cast<float>(softcap),
      .is_precise = query.scalar_type() != at::kBFloat16,  // fp16 has three bits more than bf16
      .query_dim = keys.side.head_dim,
      .output_dim = values.side.head_dim,
      .most_rows = kMaxQueries,
  });
}

// Latents are the keys of a record, rotated keys its values, each in the order of codes that is theirs.
at::Tensor attend_latents(const at::Tensor& query, const at::Tensor& records, at::TensorList latent_segments,
                          at::TensorList rotated_segments, const c10::List<OptionalTensor>& latent_extras,
                          const c10::List<OptionalTensor>& rotated_extras, const OptionalTensor& sink_start,
                          at::IntArrayRef latent_layout, at::IntArrayRef rotated_layout, double scaling,
                          bool is_bfloat16, const OptionalTensor& bias, bool is_causal, int64_t window, double softcap,
                          const OptionalTensor& sink_logits) {
  const InstructionSet instruction_set = choose_instruction_set();
  KVCACHE_CHECK(query.scalar_type() == at::kFloat, "dtype", "query", "float32", query.scalar_type());
  check_records(records);
  KVCACHE_CHECK(records.size(1) == 1, "heads", "records", 1, records.size(1));
  const Inputs latents =
      describe("latent", records, latent_segments, latent_extras, latent_layout, sinks_or(latent_extras, query));
  const Inputs rotated =
      describe("rotated", records, rotated_segments, rotated_extras, rotated_layout, sinks_or(rotated_extras, query));
  const OptionalTensor no_slopes;
  return attend({
      .operation = "attend_latents",
      .kernel = instruction_set.latents,
      .query = query,
      .records = records,
      .keys = latents,
      .values = rotated,
      .sink_start = sink_start,
      .bias = bias,
      .sink_logits = sink_logits,
      .alibi_slopes = no_slopes,
      .scaling = static_cast<float>(scaling),
      .is_causal = is_causal,
      .window = window,
      .softcap = static_cast<float>(softcap),
      .is_precise = !is_bfloat16,
      .query_dim = latents.side.head_dim + rotated.side.head_dim,
      .output_dim = latents.side.head_dim,
      .most_rows = kMaxLatentRows,
  });
}

}  // namespace

Kernel best_kernel() { return choose_instruction_set().kernel; }
Receive best_receive() { return choose_instruction_set().receive; }

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
  library.impl("attend_latents", TORCH_FN(kvcache::attend_latents));
}
