// Rounds of encoding for sanitize.cpp: every kernel must write the bytes of the portable one.
#pragma once

#include <cstdio>

#include "encode_levels.h"
#include "sanitize_inputs.h"

namespace {

// Tokens to encode: whole blocks or what is left of one, or a group of several blocks.
struct Encoding {
  kvcache::Layout layout;
  kvcache::Rows rows;
  int64_t start, count, record_bytes, blocks;
  bool is_key;
};

Encoding make_encoding(Arena& arena) {
  Encoding made{};
  kvcache::Layout& layout = made.layout;
  layout.format = draw(0, 3);
  layout.nbits = layout.format == kvcache::kAffine ? pick<int64_t>({2, 3, 4, 8}) : 8;
  layout.head_dim = pick<int64_t>({8, 24, 40, 64, 80, 96, 128, 200, 512});
  made.is_key = draw(0, 1) != 0;
  layout.interleaved = draw(0, 1);
  layout.metadata_bytes = pick<int64_t>({2, 4});
  layout.group_tokens = made.is_key && layout.format == kvcache::kAffine ? pick<int64_t>({1, 16, 32, 64, 128}) : 1;
  layout.width = layout.group_tokens > 1 ? layout.head_dim : pick<int64_t>({1, 1, layout.head_dim / 8});
  const bool spans_blocks = layout.group_tokens > kvcache::kBlockTokens;
  const bool is_whole = spans_blocks || draw(0, 2) > 0;
  made.count = spans_blocks ? layout.group_tokens : kvcache::kBlockTokens;
  made.start = made.count * draw(0, 2);
  if (!is_whole) {
    const int64_t groups = kvcache::kBlockTokens / layout.group_tokens, first = draw(0, groups - 1);
    made.start += first * layout.group_tokens;
    made.count = draw(1, groups - first) * layout.group_tokens;
  }
  const int64_t codes = kvcache::kBlockTokens * layout.padded_dim() * layout.nbits / 8;
  const int64_t shared = std::min<int64_t>(layout.group_tokens, kvcache::kBlockTokens);
  const int64_t metadata = kvcache::kBlockTokens / shared * layout.width * layout.metadata_bytes;
  layout.codes_offset = 0;
  layout.scale_offset = codes;
  layout.minimum_offset = layout.format == kvcache::kAffine ? codes + metadata : -1;
  made.record_bytes = codes + metadata * (layout.format == kvcache::kAffine ? 2 : 1);
  made.blocks = (made.start + made.count + kvcache::kBlockTokens - 1) / kvcache::kBlockTokens;
  made.rows.dtype = pick<int32_t>({kvcache::kFloat32, kvcache::kBFloat16, kvcache::kFloat16});
  made.rows.stride = layout.head_dim + draw(0, 3);
  const int64_t numbers = (made.count - 1) * made.rows.stride + layout.head_dim;
  made.rows.data = arena.exact(numbers, made.rows.dtype);
  return made;
}

std::vector<char> encoded(const Encoding& made, const kvcache::UnitKernels& kernels, bool* is_plain) {
  Arena arena;
  const int64_t dim = made.layout.head_dim, bytes = made.record_bytes * made.blocks;
  float* states = arena.floats(made.count * dim);
  char* records = arena.bytes(bytes);
  std::memset(records, 0, bytes);
  kernels.load(made.rows, made.count, dim, states);
  *is_plain = kernels.are_below(made.rows, made.count, dim, 0.9f);
  kernels.encode(states, made.start, made.count, reinterpret_cast<uint8_t*>(records), made.record_bytes, made.layout,
                 made.is_key);
  return std::vector<char>(records, records + bytes);
}

// How many kernels write other bytes than the portable one.
int count_other_codes(int round) {
  Arena arena;
  const Encoding made = make_encoding(arena);
  bool is_plain, is_plain_here;
  const std::vector<char> expected = encoded(made, kvcache::unit_kernels_portable(), &is_plain);
  int failures = 0;
  const auto compare = [&](const char* name, const kvcache::UnitKernels& kernels) {
    if (encoded(made, kernels, &is_plain_here) == expected && is_plain == is_plain_here) return;
    ++failures;
    std::printf("round %d: other codes of %s (%d bits, format %d, D %d, %d tokens a group, width %d, %d from %d)\n",
                round, name, int(made.layout.nbits), int(made.layout.format), int(made.layout.head_dim),
                int(made.layout.group_tokens), int(made.layout.width), int(made.count), int(made.start));
  };
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) compare("avx2", kvcache::unit_kernels_avx2());
  if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
    compare("avx512", kvcache::unit_kernels_avx512());
#endif
  return failures;
}

// A block to encode by levels, of which everything but the outputs is made once.
struct LevelEncoding {
  kvcache::Layout layout;
  kvcache::LevelBlock block;
  bool is_key;
  int64_t numbers, record_bytes;
};

LevelEncoding make_level_encoding(Arena& arena) {
  LevelEncoding made{};
  kvcache::Layout& layout = made.layout;
  layout.nbits = draw(2, 4);
  layout.head_dim = pick<int64_t>({4, 8, 24, 64, 80, 200});
  layout.interleaved = draw(0, 1);
  layout.group_tokens = layout.width = 1;
  layout.metadata_bytes = pick<int64_t>({2, 4});
  made.is_key = draw(0, 1) != 0;
  const int64_t padded = layout.padded_dim(), codes = int64_t(1) << layout.nbits;
  const int64_t code_bytes = kvcache::kBlockTokens * padded * layout.nbits / 8;
  const int64_t row_bytes = kvcache::kBlockTokens * layout.metadata_bytes;
  layout.scale_offset = made.is_key ? -1 : code_bytes;
  layout.minimum_offset = made.is_key ? -1 : code_bytes + row_bytes;
  made.record_bytes = code_bytes + (made.is_key ? 0 : 2 * row_bytes);
  kvcache::LevelBlock& block = made.block;
  block.heads = draw(1, 3);
  made.numbers = block.heads * kvcache::kBlockTokens * padded;
  block.head_stride = kvcache::kBlockTokens * padded + pick<int64_t>({0, 16});
  float* numbers = arena.floats((block.heads - 1) * block.head_stride + kvcache::kBlockTokens * padded);
  const bool has_few = draw(0, 2) == 0;  // different numbers, so that many are equal
  for (int64_t i = 0; i < made.numbers; ++i) {
    const int64_t of_head = kvcache::kBlockTokens * padded;
    float& number = numbers[i / of_head * block.head_stride + i % of_head];
    if (has_few) number = float(draw(-3, 3));
    if (i % padded >= layout.head_dim) number = 0.0f;
  }
  block.numbers = numbers;
  float* boundaries = arena.floats(codes - 1);
  std::sort(boundaries, boundaries + codes - 1);
  block.boundaries = boundaries;
  block.levels = arena.floats(codes);
  if (made.is_key) {
    const int64_t channels = block.heads * padded;
    float* scale = arena.floats(channels);
    for (int64_t i = 0; i < channels; ++i) scale[i] = 0.1f + scale[i] * scale[i];
    block.scale = scale;
    block.offset = arena.floats(channels);
    block.meanings = arena.floats(codes * channels);
  }
  block.side = draw(0, std::min<int64_t>(kvcache::kMaxSide, 2 + block.heads * layout.head_dim / 2));
  block.first_plain = pick<int64_t>({0, 0, 1, 30, 64});
  block.width = block.side == 0 ? 0 : 2 * block.side * kvcache::kBlockTokens + draw(0, 2);
  return made;
}

std::vector<char> encoded(const LevelEncoding& made, const kvcache::LevelKernels& kernels) {
  Arena arena;
  kvcache::LevelBlock block = made.block;
  const int64_t bytes = made.record_bytes * block.heads, listed = 4 * block.width, bounds = 2 * (block.heads + 1);
  char *record = arena.bytes(bytes), *entries = arena.bytes(listed), *starts = arena.bytes(bounds);
  block.record = reinterpret_cast<uint8_t*>(record);
  block.head_bytes = made.record_bytes;
  if (block.side > 0) {
    block.entries = reinterpret_cast<uint32_t*>(entries);
    block.starts = reinterpret_cast<int16_t*>(starts);
  }
  block.scratch = reinterpret_cast<uint32_t*>(arena.bytes(8 * made.numbers));
  (made.is_key ? kernels.encode_keys : kernels.encode_values)(block, made.layout);
  std::vector<char> all(record, record + bytes);
  if (block.side > 0) {
    all.insert(all.end(), entries, entries + listed);
    all.insert(all.end(), starts, starts + bounds);
  }
  return all;
}

// How many kernels write other bytes than the portable one.
int count_other_levels(int round) {
  Arena arena;
  const LevelEncoding made = make_level_encoding(arena);
  const std::vector<char> expected = encoded(made, kvcache::level_kernels_portable());
  int failures = 0;
  const auto compare = [&](const char* name, const kvcache::LevelKernels& kernels) {
    if (encoded(made, kernels) == expected) return;
    ++failures;
    std::printf("round %d: other levels of %s (%s, %d bits, D %d, %d heads, side %d)\n", round, name,
                made.is_key ? "keys" : "values", int(made.layout.nbits), int(made.layout.head_dim),
                int(made.block.heads), int(made.block.side));
  };
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) compare("avx2", kvcache::level_kernels_avx2());
  if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
    compare("avx512", kvcache::level_kernels_avx512());
#endif
  return failures;
}

}  // namespace
