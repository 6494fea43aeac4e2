// Runs the kernels on random tasks whose buffers are exactly as large as they may read, for the address and
// undefined-behaviour sanitizers. Unused metadata is NaN. Every kernel must agree with the portable one, those that
// encode to the last bit. A round is one of attention, of one of its two halves by itself, or of attention over latents,
// and one of what tokens receive and of either kind of encoding.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "attend_latents.h"
#include "decode_attention.h"
#include "receive_weights.h"
#include "sanitize_encoding.h"
#include "sanitize_inputs.h"

using kvcache::Side;
using kvcache::Task;

namespace {

void fill_metadata(uint8_t* field, const Side& side, int64_t used_tokens) {
  for (int row = 0; row < 64 / side.group_tokens; ++row) {
    const bool is_used = row * side.group_tokens < used_tokens;
    for (int i = 0; i < side.width; ++i) {
      const int64_t entry = row * side.width + i;
      if (side.metadata_bytes == 4) {
        const float value = is_used ? 0.1f * std::fabs(real()) : NAN;  // scales are not negative
        std::memcpy(field + 4 * entry, &value, 4);
      } else {
        const uint16_t value = is_used ? static_cast<uint16_t>(draw(0x2000, 0x2e00)) : 0x7e00;
        std::memcpy(field + 2 * entry, &value, 2);
      }
    }
  }
}

// Makes a side of uniform codes one of non-uniform ones: levels, outliers, and for keys static ranges and positions.
void make_nonuniform(Arena& arena, bool is_key, Side& side) {
  side.format = kvcache::kNonUniform;
  side.factors = side.cos = side.sin = nullptr;
  float* levels = arena.floats(1 << side.nbits);
  for (int i = 0; i < 1 << side.nbits; ++i) levels[i] = std::round(levels[i] * 64) / 64;  // exact in bf16
  side.levels = levels;
  if (is_key) {
    side.scale_offset = side.minimum_offset = -1;
    side.channel_scale = arena.floats(side.head_dim);
    side.channel_offset = arena.floats(side.head_dim);
    side.rotary_dim = static_cast<int32_t>(draw(0, 1) * pick({side.head_dim, side.head_dim / 2 / 2 * 2}));
    if (side.rotary_dim > 0) {
      double* frequencies = reinterpret_cast<double*>(arena.bytes(side.rotary_dim / 2 * 8));
      for (int i = 0; i < side.rotary_dim / 2; ++i) frequencies[i] = std::fabs(real());
      side.inv_freq = frequencies;
      side.position = -draw(0, 70);
    }
  }
  if (draw(0, 2) == 0) return;
  const int64_t blocks = (side.packed_length + 63) / 64;
  side.outlier_capacity = draw(1, 30);
  side.outlier_stride = 2;  // one head
  int32_t* entries = reinterpret_cast<int32_t*>(arena.bytes(blocks * side.outlier_capacity * 4));
  int16_t* starts = reinterpret_cast<int16_t*>(arena.bytes(blocks * 4));
  for (int64_t block = 0; block < blocks; ++block) {
    starts[2 * block] = static_cast<int16_t>(draw(0, side.outlier_capacity));
    starts[2 * block + 1] = static_cast<int16_t>(draw(starts[2 * block], side.outlier_capacity));
    for (int64_t i = 0; i < side.outlier_capacity; ++i) {
      const int64_t place = draw(0, 63) << 10 | draw(0, side.head_dim - 1);
      entries[block * side.outlier_capacity + i] = static_cast<int32_t>(place << 16 | draw(0x2000, 0x3c00));
    }
  }
  side.outliers = entries;
  side.outlier_starts = starts;
}

Side make_side(Arena& arena, bool is_key, int32_t head_dim, int64_t length) {
  Side side{};
  side.head_dim = head_dim;
  side.padded_dim = (head_dim + 15) / 16 * 16;
  side.nbits = pick({2, 3, 4, 8});
  side.format = side.nbits == 8 ? static_cast<int32_t>(draw(0, 3)) : 0;
  const bool is_per_channel = is_key && draw(0, 1) == 1;
  side.group_tokens = is_per_channel ? pick({16, 32, 64}) : pick({1, 1, 1, 64});
  side.width = is_per_channel       ? head_dim
               : head_dim % 16 == 0 ? pick({1, head_dim / 16})
                                    : pick({1, head_dim / 8});
  side.metadata_bytes = pick({2, 4});
  side.interleaved = is_key ? static_cast<int32_t>(draw(0, 1)) : 0;
  side.packed_length = draw(0, length) / side.group_tokens * side.group_tokens;
  const bool is_static = side.format != kvcache::kAffine && draw(0, 3) == 0;
  const int64_t code_bytes = 8 * side.padded_dim * side.nbits;
  const int64_t metadata_bytes =
      static_cast<int64_t>(64 / side.group_tokens) * side.width * side.metadata_bytes;
  const int64_t align = (metadata_bytes + 3) / 4 * 4;
  side.codes_offset = pick({0, 64});
  int64_t offset = side.codes_offset + code_bytes;
  side.scale_offset = is_static ? -1 : offset;
  offset += is_static ? 0 : align;
  side.minimum_offset = side.format == kvcache::kAffine ? offset : -1;
  offset += side.minimum_offset >= 0 ? align : 0;
  side.record_bytes = (offset + 63) / 64 * 64;
  side.static_scale = 0.02f;
  const int64_t blocks = (side.packed_length + 63) / 64;
  char* records = arena.bytes(blocks * side.record_bytes);
  side.records = reinterpret_cast<uint8_t*>(records);
  for (int64_t block = 0; block < blocks; ++block) {
    uint8_t* record = reinterpret_cast<uint8_t*>(records) + block * side.record_bytes;
    for (const int64_t field : {side.scale_offset, side.minimum_offset}) {
      if (field >= 0) fill_metadata(record + field, side, side.packed_length - 64 * block);
    }
    if (side.format == kvcache::kE4M3 || side.format == kvcache::kE5M2) {  // neither NaN nor infinity
      for (int64_t i = 0; i < code_bytes; ++i) record[side.codes_offset + i] &= 0xbf;
    }
  }
  if (draw(0, 3) == 0) {
    side.factors = arena.floats(head_dim);
  } else if (is_per_channel && draw(0, 1) == 1) {
    side.period = pick({32, 64, 128});
    side.rotary_dim = pick({head_dim / 2 / 2 * 2, head_dim / 2 * 2});
    side.cos = arena.floats(side.period * side.rotary_dim / 2);
    side.sin = arena.floats(side.period * side.rotary_dim / 2);
  }
  if (side.nbits <= 4 && (is_key || (side.width == 1 && side.group_tokens == 1)) && draw(0, 2) == 0) {
    make_nonuniform(arena, is_key, side);
  }
  side.dtype = static_cast<int32_t>(draw(0, 2));
  int64_t start = side.packed_length;
  while (start < length) {
    const int64_t count = side.num_segments == 2 ? length - start : draw(1, length - start);
    const int64_t stride = head_dim + pick({0, 8});
    side.segments[side.num_segments++] = {arena.exact((count - 1) * stride + head_dim, side.dtype), start,
                                          count, stride};
    start += count;
  }
  if (draw(0, 3) == 0) {
    side.sink_length = draw(1, 5);
    side.sink_start = draw(0, 70);
    side.sinks = arena.exact(side.sink_length * head_dim, side.dtype);
  }
  return side;
}

// Of latents, the value is what is beside them in a query.
int32_t query_dim(const Task& task, bool is_latent) {
  return task.key.head_dim + (is_latent ? task.value.head_dim : 0);
}

Task make_task(Arena& arena, bool is_latent) {
  Task task{};
  task.length = pick<int64_t>({1, 63, 64, 65, 200, 333});
  task.query_length = static_cast<int32_t>(pick<int64_t>({1, 1, 3, 8}));
  if (task.query_length > task.length) task.query_length = 1;
  const int32_t group = is_latent ? pick({1, 5, 6, 7, 16}) : pick({1, 2, 3, 4, 7, 8});
  task.queries = group * task.query_length;
  task.key = make_side(arena, true, pick({16, 40, 64, 80, 128, 192, 256, 320, 512}), task.length);
  task.value = make_side(arena, false, pick({16, 40, 64, 80, 128, 192, 256, 320, 512}), task.length);
  const int64_t numbers = int64_t{task.queries} * query_dim(task, is_latent);
  float* query = arena.floats(numbers);
  for (int64_t i = 0; i < numbers; ++i) query[i] *= 0.2f;
  task.query = query;
  task.precise = 1;
  const int64_t blocks = (task.length + 63) / 64;
  task.begin = draw(0, blocks - 1) * 64;
  task.end = std::min(task.length, draw(task.begin / 64 + 1, blocks) * 64);
  task.is_causal = static_cast<int32_t>(draw(0, 1));
  task.window = task.is_causal != 0 ? pick<int64_t>({0, 1, 50, 500}) : 0;
  task.softcap = pick({0.0f, 0.0f, 5.0f});
  if (!is_latent && draw(0, 2) == 0) task.alibi = arena.floats(group);
  if (draw(0, 1) == 0) {
    task.bias_row_stride = draw(0, 1) * task.length;
    const int64_t count = task.bias_row_stride == 0 ? task.length : task.queries * task.length;
    float* bias = arena.floats(count);
    for (int64_t i = 0; i < count; ++i) bias[i] = draw(0, 2) == 0 ? -INFINITY : bias[i];
    task.bias = bias;
  }
  return task;
}

// Leaves out one half of attention, and the side it reads.
void halve(Arena& arena, Task& task, bool has_weights) {
  Side none{};
  none.format = kvcache::kNonUniform;
  none.width = none.group_tokens = 1;
  none.scale_offset = none.minimum_offset = -1;
  task.first_slot = draw(0, task.length - 1);
  const int64_t numbers = int64_t{task.queries} * (task.length - task.first_slot);
  float* const floats = arena.floats(numbers);
  if (!has_weights) {
    task.value = none;
    task.logits = floats;
    return;
  }
  for (int64_t i = 0; i < numbers; ++i) floats[i] = draw(0, 3) == 0 ? 0.0f : std::fabs(floats[i]);
  task.bias = task.alibi = nullptr;
  task.window = task.softcap = 0;
  task.key = none;
  task.query = nullptr;
  task.weights = floats;
}

// What `halve` has left of a kernel: logits, or sums of values.
std::vector<float> run_half(const Task& prototype, kvcache::Kernel kernel) {
  Arena arena;
  Task task = prototype;
  const int64_t seen = task.length - task.first_slot;
  const int64_t count = task.queries * (task.logits != nullptr ? seen : task.value.head_dim);
  float* const out = arena.floats(count);
  if (task.logits != nullptr) {
    task.logits = out;
    std::fill(out, out + count, -INFINITY);  // of other tasks, and where nothing is seen
  } else {
    task.output = out;
    task.maximum = arena.floats(task.queries);
    task.sum = arena.floats(task.queries);
  }
  kernel(task);
  for (int64_t i = 0; i < count; ++i) out[i] = std::max(out[i], -1e30f);  // finite, for `error`
  return {out, out + count};
}

std::vector<float> run(const Task& prototype, kvcache::Kernel kernel, bool is_latent) {
  if (prototype.logits != nullptr || prototype.weights != nullptr) return run_half(prototype, kernel);
  Arena arena;
  Task task = prototype;
  const int32_t width = is_latent ? task.key.head_dim : task.value.head_dim;
  task.maximum = arena.floats(task.queries);
  task.sum = arena.floats(task.queries);
  task.output = arena.floats(int64_t{task.queries} * width);
  kernel(task);
  std::vector<float> result;
  for (int r = 0; r < task.queries; ++r) {
    const bool is_empty = std::isinf(task.maximum[r]);
    result.push_back(is_empty ? -1e30f : task.maximum[r] + std::log(task.sum[r]));
    for (int d = 0; d < width; ++d) {
      result.push_back(is_empty ? 0.0f : task.output[r * width + d] / task.sum[r]);
    }
  }
  return result;
}

// Root mean square of the difference over that of `a`, which counts as at least 0.1.
double error(const std::vector<float>& a, const std::vector<float>& b) {
  double difference = 0, size = 0.01 * static_cast<double>(a.size());
  for (size_t i = 0; i < a.size(); ++i) {
    if (!std::isfinite(a[i]) || !std::isfinite(b[i])) return INFINITY;
    if (a[i] == b[i]) continue;
    difference += std::pow(double{a[i]} - b[i], 2);
    size += std::pow(double{a[i]}, 2);
  }
  return std::sqrt(difference / size);
}

// Logits of several rows, and what their tokens receive of each after the other.
int count_other_shares(int round) {
  int failures = 0;
  const int64_t length = draw(1, 300);
  const float sink = draw(0, 1) == 0 ? -INFINITY : 3 * real();
  const bool is_strongest = draw(0, 1) == 0;
  std::vector<float> rows(3 * length);
  for (float& logit : rows) logit = draw(0, 4) == 0 ? -INFINITY : 8 * real();
  const auto run = [&](kvcache::Receive receive) {
    Arena arena;
    float* const received = arena.floats(length);
    std::fill(received, received + length, 0.0f);
    for (int r = 0; r < 3; ++r) {
      float* const logits = arena.floats(length);
      std::copy_n(rows.data() + r * length, length, logits);
      receive(logits, length, sink, is_strongest, received);
    }
    return std::vector<float>(received, received + length);
  };
  std::vector<kvcache::Receive> others;
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) {
    others.push_back(kvcache::receive_weights_avx2);
  }
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq")) {
    others.push_back(kvcache::receive_weights_avx512);
  }
#endif
  const std::vector<float> expected = run(kvcache::receive_weights_portable);
  for (const kvcache::Receive other : others) {
    const double difference = error(expected, run(other));
    if (difference <= 1e-5) continue;
    ++failures;
    std::printf("round %d: error %.2e of what %d tokens receive\n", round, difference, int(length));
  }
  return failures;
}

struct Candidate {
  const char* name;
  kvcache::Kernel kernel, latents;
  int precise;
  double bound;
};

std::vector<Candidate> candidates() {
  std::vector<Candidate> all = {
      {"portable", kvcache::decode_attention_portable, kvcache::attend_latents_portable, 1, 0}};
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) {
    all.push_back({"avx2", kvcache::decode_attention_avx2, kvcache::attend_latents_avx2, 1, 1e-5});
  }
#if !defined(KVCACHE_NO_AVX512)
  if (__builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16")) {
    const kvcache::Kernel kernel = kvcache::decode_attention_avx512, latents = kvcache::attend_latents_avx512;
    all.push_back({"avx512, precise", kernel, latents, 1, 1e-5});
    all.push_back({"avx512", kernel, latents, 0, 5e-2});
  }
#endif
#endif
  return all;
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 300;
  int failures = 0;
  for (int round = 0; round < rounds; ++round) {
    Arena arena;
    failures += count_other_codes(round) + count_other_levels(round) + count_other_shares(round);
    const bool is_latent = round % 3 == 2;
    Task task = make_task(arena, is_latent);
    if (round % 3 == 1 && round % 2 == 0) halve(arena, task, round % 4 == 0);
    const kvcache::Kernel portable =
        is_latent ? kvcache::attend_latents_portable : kvcache::decode_attention_portable;
    const std::vector<float> expected = run(task, portable, is_latent);
    for (const Candidate& candidate : candidates()) {
      task.precise = candidate.precise;
      const double difference =
          error(expected, run(task, is_latent ? candidate.latents : candidate.kernel, is_latent));
      if (difference <= candidate.bound) continue;
      ++failures;
      std::printf(
          "round %d: error %.2e of %s%s (keys: %d bits, format %d, D %d; values: %d bits, format %d, D %d)\n",
          round, difference, candidate.name, is_latent ? ", latents" : "", task.key.nbits, task.key.format,
          task.key.head_dim, task.value.nbits, task.value.format, task.value.head_dim);
    }
  }
  std::printf("%d rounds, %d failures\n", rounds, failures);
  return failures == 0 ? 0 : 1;
}
