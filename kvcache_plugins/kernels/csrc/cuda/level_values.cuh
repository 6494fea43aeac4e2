// p.v of 64 packed tokens on the tensor core, by one warp, where values are levels of a table with a scale and an
// offset per token, and outliers beside them. Scales are multiplied into the weights and offsets are one more row, as
// in fast_values.cuh. By count in the machine code for sm_90, not measured, of 128 channels: 2.0 instructions per code
// of 2 bits, 2.7 of 3, 3.5 of 4; 0.6 more where one number in a hundred is an outlier.
#pragma once

#include "fast_values.cuh"
#include "level_codes.cuh"
#include "outlier_patches.cuh"

namespace kvcache {

struct LevelValueUnit {
  ValueUnit unit;  // of width 1, scales and minima of every token
  const uint8_t* table;
  uint8_t* patches;
};

constexpr int kLeastLevelExponent = -14;

// Smallest exponent that lets weights of up to 256 times the scales, the offsets and the listed numbers fit fp16, up to
// 14. `listed`: bits of the largest magnitude this lane knows of.
KVCACHE_DEVICE int needed_exponent(const ValueUnit& unit, uint32_t listed) {
  const auto larger = [](uint32_t x, uint32_t y) { return larger_halves(x & 0x7FFF7FFFu, y & 0x7FFF7FFFu); };
  const uint32_t scale = larger_half(fold_field<true, false>(unit.scale, kBlockTokens, larger));
  const uint32_t offset = larger_half(larger(fold_field<true, false>(unit.minimum, kBlockTokens, larger), listed));
  const int of_scale = static_cast<int>(warp_max(scale) >> 10) - 15;
  const int of_offset = static_cast<int>(warp_max(offset) >> 10) - 15 - 12;
  const int exponent = of_scale > of_offset ? of_scale : of_offset;
  return exponent < kLeastLevelExponent ? kLeastLevelExponent : exponent > 14 ? 14 : exponent;
}

// How the chunks of a token fill words: whole ones, a power of two of them; whole ones; a multiple of four chunks; or
// anyhow.
enum class Words { kPower, kWhole, kFours, kAny };

// Codes of four chunks for the tokens of a quad, where words begin with a first chunk or, of 2 and 3 bits, with one of
// four.
template <int kBits, Words kWords>
struct LevelChunks {
  static constexpr int kGroups = LevelWord<kBits>::kGroups;
  LevelWord<kBits> words[4];  // of a[0] .. a[3]

  // Of quad 4k + t. `group`: of four chunks, of all that its tokens have; an even one, or a word holds only one.
  KVCACHE_DEVICE void load(const ValueUnit& unit, int k, int t, int group, int g) {
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      int first = 0, word = ((2 * (4 * k + t) + pair) * (unit.chunks / 4) + group) / kGroups;
      if (kWords == Words::kPower) {
        const int count = unit.chunks / 4 / kGroups;  // of a token pair
        first = 8 * k * count;
        word = (2 * t + pair) * count + group / kGroups;
      }
      const uint2 codes = load_word(unit, first, word, g);
      uint2 high{0, 0};
      if (kBits == 3) high = load_word(unit, unit.chunks * 4 + first / 2, word / 2, g);
      words[2 * pair].load(codes.x, high.x, word % 2);
      words[2 * pair + 1].load(codes.y, high.y, word % 2);
    }
  }
  KVCACHE_DEVICE void decode(const LevelTable<kBits>& table, int low, int high, uint32_t (&a)[4][4]) const {
    words[0].decode(table, low, a[0]);
    words[1].decode(table, low, a[1]);
    words[2].decode(table, high, a[2]);
    words[3].decode(table, high, a[3]);
  }

 private:
  // Word `first + word`; of a power of two of words both have no bit in common, and only the first depends on the tile.
  KVCACHE_DEVICE static uint2 load_word(const ValueUnit& unit, int first, int word, int g) {
    if (kWords != Words::kPower) return load_8(unit.codes, (first + word) * 64 + 8 * g, unit.swizzle);
    const int spread = swizzled(word * 64 + 8 * g, unit.swizzle);
    return *reinterpret_cast<const uint2*>(unit.codes + swizzled_step(first * 64, spread, unit.swizzle));
  }
};

// A listed number, times 2^-exponent.
KVCACHE_DEVICE PatchEntry value_patch(const LevelValueUnit& value, int32_t entry, bool is_listed) {
  const uint32_t token = static_cast<uint32_t>(entry) >> 26, channel = static_cast<uint32_t>(entry) >> 16 & 1023;
  if (!is_listed || channel >= static_cast<uint32_t>(16 * value.unit.chunks)) return {kNoPatch, 0, 0};
  // chunk and g, t, register, half
  const uint32_t place = channel / 2 << 6 | (token << 2 & 0x38) | (channel << 2 & 4) | (token << 1 & 2);
  return {static_cast<int>(token / 16), static_cast<int>(place),
          half2_multiply(static_cast<uint32_t>(entry), value.unit.shrink)};
}

template <int kEntries>
KVCACHE_DEVICE void write_value_patch(const LevelValueUnit& value, const OutlierList<kEntries>& list,
                                      const PatchEntry (&entries)[kEntries], int which, bool is_cleared) {
  const auto write = [&](const PatchEntry& entry) {
    if (entry.patch == which)
      *reinterpret_cast<uint16_t*>(value.patches + entry.place) = is_cleared ? 0 : static_cast<uint16_t>(entry.number);
  };
#pragma unroll
  for (int i = 0; i < kEntries; ++i) write(entries[i]);
  list.for_the_rest([&](int32_t entry) { write(value_patch(value, entry, true)); });
  warp_barrier();
}

template <int kBits, Words kWords, int kUnroll, int kEntries, int kTiles>
KVCACHE_DEVICE void level_value_products(const LevelValueUnit& value, const OutlierList<kEntries>& list,
                                         float (&o)[kTiles][4], float (&minima)[4]) {
  const ValueUnit& unit = value.unit;
  const int lane = opaque_lane(), g = lane / 4, t = lane % 4;
  const LevelTable<kBits> table(value.table);
  PatchEntry entries[kEntries];
#pragma unroll
  for (int i = 0; i < kEntries; ++i) entries[i] = value_patch(value, list.entries[i], list.has(i));
#pragma unroll kUnroll
  for (int k = 0; k < 4; ++k) {
    const int quad = 4 * k + t;
    const uint2 plain = unit.weights[k * 32 + lane];
    const uint2 scale = load_tokens<1>(unit, unit.scale, quad, 0), offset = load_tokens<1>(unit, unit.minimum, quad, 0);
    const uint2 scaled{half2_multiply(plain.x, half2_multiply(scale.x, unit.shrink)),
                       half2_multiply(plain.y, half2_multiply(scale.y, unit.shrink))};
    multiply_accumulate(minima, g == 0 ? half2_multiply(offset.x, unit.shrink) : 0, 0,
                        g == 0 ? half2_multiply(offset.y, unit.shrink) : 0, 0, plain.x, plain.y);
    if (kWords != Words::kAny) {
      using Chunks = LevelChunks<kBits, kWords>;
      Chunks codes{};
#pragma unroll
      for (int group = 0; group < kTiles / 4; ++group) {
        if (4 * group < unit.chunks) {
          uint32_t a[4][4];
          if (kWords != Words::kFours) {
            if (group % Chunks::kGroups == 0) codes.load(unit, k, t, group, g);
            codes.decode(table, group % Chunks::kGroups, group % Chunks::kGroups, a);
          } else {  // an odd number of groups per token: those of the pairs lie in different halves
            codes.load(unit, k, t, group, g);
            codes.decode(table, group % 2, (group + 1) % 2, a);
          }
#pragma unroll
          for (int u = 0; u < 4; ++u)
            multiply_accumulate(o[4 * group + u], a[0][u], a[1][u], a[2][u], a[3][u], scaled.x, scaled.y);
        }
      }
    } else {
#pragma unroll
      for (int u = 0; u < kTiles; ++u) {
        if (u < unit.chunks) {
          uint32_t a[4];
          load_narrow<kBits>(unit, quad, u, g, a);
#pragma unroll
          for (int i = 0; i < 4; ++i) a[i] = level_pair(table, a[i]);
          multiply_accumulate(o[u], a[0], a[1], a[2], a[3], scaled.x, scaled.y);
        }
      }
    }
    if (list.is_empty()) continue;
    write_value_patch(value, list, entries, k, false);
    const uint4* patch = reinterpret_cast<const uint4*>(value.patches) + lane;
#pragma unroll
    for (int u = 0; u < kTiles; ++u) {  // all there could be: beyond the last chunk the patch is zero
      const uint4 numbers = patch[32 * u];
      multiply_accumulate(o[u], numbers.x, numbers.y, numbers.z, numbers.w, plain.x, plain.y);
    }
    warp_barrier();
    write_value_patch(value, list, entries, k, true);
  }
}

template <int kBits, int kEntries, int kTiles>
KVCACHE_DEVICE void level_value_products(const LevelValueUnit& value, const OutlierList<kEntries>& list,
                                         float (&o)[kTiles][4], float (&minima)[4]) {
  if (value.unit.chunks % 4 != 0) return level_value_products<kBits, Words::kAny, 1>(value, list, o, minima);
  if (kBits < 4 && value.unit.chunks % 8 != 0)
    return level_value_products<kBits, (kBits < 4) ? Words::kFours : Words::kWhole, 1>(value, list, o, minima);
  return level_value_products<kBits, Words::kWhole, 1>(value, list, o, minima);
}

template <typename Format, int kEntries, int kTiles>
KVCACHE_DEVICE void multiply_level_values(const Side& side, const LevelValueUnit& value,
                                          const OutlierList<kEntries>& list, float (&o)[kTiles][4],
                                          float (&minima)[4]) {
  if constexpr (Format::kIsKnown) return level_value_products<Format::kNbits, Words::kPower, 2>(value, list, o, minima);
  if (side.nbits == 2) return level_value_products<2>(value, list, o, minima);
  if (side.nbits == 3) return level_value_products<3>(value, list, o, minima);
  return level_value_products<4>(value, list, o, minima);
}

}  // namespace kvcache
