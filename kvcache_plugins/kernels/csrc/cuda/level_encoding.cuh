// Numbers to codes of non-uniform levels, and what the codes lack: what layers/nonuniform.py and quantizers/outliers.py
// of the package compute, operation by operation in fp32.
#pragma once

#include "encoding.cuh"

namespace kvcache {

constexpr float kSmallestRange = 6.103515625e-05f;  // 2^-14, the smallest normal half
constexpr uint32_t kNoOutlier = 0xffffffffu;          // in the place of what a number lacks

// What codes of a channel of keys, or of a token of values, stand for.
struct Range {
  float scale, offset;
};

KVCACHE_DEVICE Range range_of_key(const LevelArguments& a, int64_t batch, int64_t head, int channel) {
  const int64_t at = batch * a.range_batch_stride + head * a.run.head_dim + channel;
  return {a.scale[at], a.offset[at]};
}

KVCACHE_DEVICE uint8_t* record_of(const LevelArguments& a, int64_t batch, int64_t head, int64_t block) {
  const EncodeArguments& run = a.run;
  return run.records + batch * run.batch_stride + head * run.head_stride +
         (run.start / kBlockTokens + block) * run.record_bytes;
}

KVCACHE_DEVICE Range range_of_value(const EncodeArguments& run, const uint8_t* record, int token) {
  return {read_metadata(record + run.scale_offset, run.metadata_bytes, token),
          read_metadata(record + run.minimum_offset, run.metadata_bytes, token)};
}

// The numbers of one token and head, their rotation undone; or as they are stored.
struct NumbersOfRow {
  const EncodeArguments& run;
  int64_t first;
  const float *cos, *sin;

  KVCACHE_DEVICE NumbersOfRow(const LevelArguments& a, int64_t batch, int64_t head, int64_t token)
      : run(a.run), first(a.run.states.row(batch, head, token)), cos(nullptr), sin(nullptr) {
    if (run.cos == nullptr) return;
    const int64_t row = batch * a.turn_batch_stride + token * run.pairs;
    cos = run.cos + row;
    sin = run.sin + row;
  }
  KVCACHE_DEVICE float stored(int channel) const { return read_number(run.states.data, run.dtype, first + channel); }
  KVCACHE_DEVICE float at(int channel) const {
    const float x = stored(channel);
    if (cos == nullptr || channel >= 2 * run.pairs) return x;
    return turned_back(run, x, stored(partner_of(run, channel)), channel, cos, sin);
  }
};

struct Coded {
  int code;
  float missing;
};

// `boundaries`, which ascend, and `levels` may lie in shared memory. What is not a number takes the last code.
KVCACHE_DEVICE Coded code_number(float x, Range range, const float* boundaries, const float* levels, int nbits) {
  const float u = divide_rounded(add_rounded(x, -range.offset), range.scale);
  int code = 0;  // how many boundaries are below, bit by bit
  for (int bit = 1 << nbits >> 1; bit > 0; bit >>= 1) code += u <= boundaries[code + bit - 1] ? 0 : bit;
  const float meant = add_rounded(multiply_rounded(levels[code], range.scale), range.offset);
  return {code, fminf(fmaxf(add_rounded(x, -meant), -kLargestHalf), kLargestHalf)};
}

KVCACHE_DEVICE int64_t first_plain(const LevelArguments& a, int64_t batch) {
  return a.first_plain == nullptr ? 0 : a.first_plain[batch];
}

// ---- numbers as keys of `Largest`: see there

// What keys lack, [heads][64][head_dim] of a block, in the thread block that shares it: a warp looks after every so
// many numbers, so that what lacks most in one head is spread over all warps.
struct MissingOfBlock {
  static constexpr int kPlaceBits = 21, kKeyBits = 31 + kPlaceBits;
  const float* missing;
  int size, warp, warps;

  KVCACHE_DEVICE static uint64_t key_of(float missing, int i) {
    const uint32_t bits = float_bits(missing);
    if (bits == kNoOutlier) return 0;
    return static_cast<uint64_t>((bits & 0x7fffffffu) + 1) << kPlaceBits | ((1u << kPlaceBits) - 1 - i);
  }
  template <class Visit>
  KVCACHE_DEVICE void each(Visit visit) const {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    for (int i = warp * 32 + lane; i - lane < size; i += 32 * warps) visit(i < size ? key_of(missing[i], i) : 0);
  }
};

// Unsigned integers in the order of finite numbers; neither they nor their complements are 0.
KVCACHE_DEVICE uint32_t ordered(float x) {
  const uint32_t bits = float_bits(add_rounded(x, 0.0f));  // zero has no sign
  return bits >> 31 != 0 ? ~bits : bits | 0x80000000u;
}
KVCACHE_DEVICE float number_of_order(uint32_t x) { return bits_float(x >> 31 != 0 ? x & 0x7fffffffu : ~x); }

// The numbers of a token in all heads, as values are; with a `flip` of ~0, the smallest are the largest keys.
struct NumbersOfToken {
  static constexpr int kPlaceBits = 15, kKeyBits = 32 + kPlaceBits;
  const LevelArguments& a;
  int64_t first;  // number of the token in the first head
  uint32_t flip;

  KVCACHE_DEVICE static uint64_t key_of(float x, int place, uint32_t flip) {
    if (!is_finite(x)) return 0;
    return static_cast<uint64_t>(ordered(x) ^ flip) << kPlaceBits | ((1u << kPlaceBits) - 1 - place);
  }
  template <class Visit>
  KVCACHE_DEVICE void each(Visit visit) const {
    const int lane = static_cast<int>(threadIdx.x) % 32, dim = a.run.head_dim;
    int64_t number = first + lane;
    for (int place = lane; place < a.heads * dim + lane; place += dim, number += a.run.states.head_stride) {
      for (int i = 0; i < dim; i += 32) {
        const bool is_channel = i + lane < dim;
        visit(is_channel ? key_of(read_number(a.run.states.data, a.run.dtype, number + i), place + i, flip) : 0);
      }
    }
  }
};

}  // namespace kvcache
