// Whole blocks to codes of non-uniform levels and lists of outliers; included by one source file per instruction set.
//
// What layers/nonuniform.py and quantizers/outliers.py of the package compute, operation by operation in fp32. A code is
// found by comparing with every boundary between two levels. What codes mean is looked up in tables, whose numbers are
// rounded twice on every machine. Bound: a division and two operations per boundary for every number, and of keys two
// passes more over what their codes lack.
#pragma once

#include "encode_levels.h"
#include "encode_unit.inl"

namespace kvcache {
namespace {  // see portable_numbers.inl

constexpr float kSmallestRange = 0x1p-14f;  // the smallest normal half

// What becomes of one number: its code, and what it lacks.
struct Coded {
  int code;
  float missing;
};

// `means(code)` says what a code means.
template <class Means>
inline __attribute__((always_inline)) Coded code_number(float number, float scale, float offset,
                                                        const float* boundaries, int count, Means means) {
  const float u = (number - offset) / scale;
  int code = 0;
  for (int i = 0; i < count; ++i) code += u > boundaries[i];
  const float missing = number - means(code);
  const float most = kLargestHalf;
  return {code, missing > most ? most : missing < -most ? -most : missing};
}

inline uint32_t outlier_entry(int64_t token, int64_t channel, float missing) {
  return uint32_t(token << 10 | channel) << 16 | half_of(missing);
}

inline __attribute__((always_inline)) bool any_of(Words mask) {
#if defined(KVCACHE_F16C) && KVCACHE_LANES == 16
  return _mm512_movepi32_mask((__m512i)mask) != 0;
#elif defined(KVCACHE_F16C) && KVCACHE_LANES == 8
  return _mm256_movemask_ps((__m256)mask) != 0;
#else
  uint32_t found = 0;
  for (int i = 0; i < kLanes; ++i) found |= mask[i];
  return found != 0;
#endif
}

// ---- keys ----

// Codes of one head, and how much each number lacks: bits of the magnitude and one, zero of what is no outlier's place.
template <int kBits>
void encode_key_head(const LevelBlock& block, const Layout& layout, int64_t head, uint8_t* codes) {
  constexpr int kBoundaries = (1 << kBits) - 1;
  const int64_t padded = layout.padded_dim(), dim = layout.head_dim, all = block.heads * padded;
  const float* numbers = block.numbers + head * block.head_stride;
  uint32_t* missing = block.scratch + head * kBlockTokens * padded;
  for (int64_t c = 0; c < padded; c += kLanes) {
    const int64_t channel = head * padded + c;
    const Floats scale = load<Floats>(block.scale + channel), offset = load<Floats>(block.offset + channel);
    Words is_channel = {};
    for (int l = 0; l < kLanes; ++l) is_channel[l] = c + l < dim ? ~0u : 0u;
    Floats means[kBoundaries + 1];
    for (int i = 0; i <= kBoundaries; ++i) means[i] = load<Floats>(block.meanings + i * all + channel);
    for (int64_t t = 0; t < kBlockTokens; ++t) {
      const Floats number = load<Floats>(numbers + t * padded + c);
      const Floats u = (number - offset) / scale;
      Words code = {};
      Floats meant = means[0];
      for (int i = 0; i < kBoundaries; ++i) {
        const auto is_above = u > block.boundaries[i];
        code -= (Words)is_above;
        meant = is_above ? means[i + 1] : meant;
      }
      put_codes(codes + t * padded + c, code & is_channel);
      const Floats lacks = number_of(bits_of(number - meant) & 0x7fffffffu);
      const Words bits = bits_of(smaller_of(lacks, splat(kLargestHalf))) + 1u;
      const Words kept = t < block.first_plain ? Words{} : bits & is_channel;
      std::memcpy(missing + t * padded + c, &kept, sizeof(kept));
    }
  }
  pack_block(codes, layout, true, block.record + head * block.head_bytes);
}

// The `count`-th largest of `size` numbers that are not zero (1 if there are no more), and how many equal ones count.
struct Threshold {
  uint32_t least;
  int64_t equal;
};

Threshold select(const uint32_t* numbers, int64_t size, int64_t count) {
  constexpr int kCopies = 4;  // that neighbours seldom count in the same place
  uint32_t counts[kCopies][2048] = {};
  for (int64_t i = 0; i < size; ++i) ++counts[i % kCopies][numbers[i] >> 20];
  int64_t place = 2047, above = 0;
  const auto at = [&](int64_t i) { return int64_t(counts[0][i]) + counts[1][i] + counts[2][i] + counts[3][i]; };
  while (place > 0 && above + at(place) < count) above += at(place--);
  uint32_t prefix = uint32_t(place);
  for (int shift = 10; shift >= 0; shift -= 10) {
    uint32_t finer[1024] = {};
    for (int64_t i = 0; i < size; ++i)
      if (numbers[i] >> (shift + 10) == prefix) ++finer[numbers[i] >> shift & 1023u];
    int64_t digit = 1023;
    while (digit > 0 && above + finer[digit] < count) above += finer[digit--];
    prefix = prefix << 10 | uint32_t(digit);
  }
  // zeros are only ever in the last place, where the search ends if nothing else is left
  return prefix == 0 ? Threshold{1, size} : Threshold{prefix, count - above};
}

// The same of many numbers. Of parts that each name their largest, the `count`-th largest is a bound that leaves few.
// `room` is for as many numbers; `size` is a multiple of 64.
Threshold find_threshold(const uint32_t* numbers, int64_t size, int64_t count, uint32_t* room) {
  const int64_t part = size / (3 * count) < 32 ? size / (3 * count) : 32;
  if (part < 2) return select(numbers, size, count);
  int64_t held = 0;
  for (int64_t first = 0; first < size; first += part * kLanes, held += kLanes) {
    const int64_t end = first + part * kLanes < size ? first + part * kLanes : size;
    Words most = load<Words>(numbers + first);
    for (int64_t i = first + kLanes; i < end; i += kLanes) {
      const Words more = load<Words>(numbers + i);
      most = more > most ? more : most;
    }
    std::memcpy(room + held, &most, sizeof(most));
  }
  const uint32_t bound = select(room, held, count).least;
  held = 0;
  for (int64_t first = 0; first < size; first += kLanes) {
    if (!any_of((Words)(load<Words>(numbers + first) >= bound))) continue;
    for (int64_t i = first; i < first + kLanes; ++i) {
      room[held] = numbers[i];
      held += numbers[i] >= bound;
    }
  }
  return select(room, held, count);
}

template <int kBits>
void encode_key_levels(const LevelBlock& block, const Layout& layout) {
  constexpr int kBoundaries = (1 << kBits) - 1;
  const int64_t padded = layout.padded_dim(), all = block.heads * padded, size = kBlockTokens * all;
  alignas(64) uint8_t codes[kBlockTokens * kMaxHeadDim];
  for (int64_t head = 0; head < block.heads; ++head) encode_key_head<kBits>(block, layout, head, codes);
  if (block.entries == nullptr) return;
  const Threshold threshold =
      find_threshold(block.scratch, size, 2 * block.side * kBlockTokens, block.scratch + size);
  int64_t equal = threshold.equal, listed = 0;
  for (int64_t head = 0; head < block.heads; ++head) {
    block.starts[head] = int16_t(listed);
    for (int64_t t = 0; t < kBlockTokens; ++t) {
      const int64_t first = (head * kBlockTokens + t) * padded;
      for (int64_t c = 0; c < padded; c += kLanes) {
        if (!any_of((Words)(load<Words>(block.scratch + first + c) >= threshold.least))) continue;
        for (int64_t channel = c; channel < c + kLanes; ++channel) {
          const uint32_t missing = block.scratch[first + channel];
          if (missing < threshold.least || (missing == threshold.least && equal-- <= 0)) continue;
          const int64_t at = head * padded + channel;
          const float number = block.numbers[head * block.head_stride + t * padded + channel];
          const Coded coded = code_number(number, block.scale[at], block.offset[at],
                                          block.boundaries, kBoundaries,
                                          [&](int code) { return block.meanings[code * all + at]; });
          block.entries[listed++] = outlier_entry(t, channel, coded.missing);
        }
      }
    }
  }
  block.starts[block.heads] = int16_t(listed);
  std::memset(block.entries + listed, 0, sizeof(uint32_t) * (block.width - listed));
}

// ---- values ----

// The first `size` numbers of a sequence in an order, with their places.
template <class Precedes>
struct Ranking {
  int64_t size, held = 0;
  float numbers[kMaxSide + 1];
  int32_t places[kMaxSide + 1];

  void offer(float number, int32_t place) {
    if (held == size && !Precedes()(number, numbers[size - 1])) return;
    int64_t i = held == size ? size - 1 : held++;
    for (; i > 0 && Precedes()(number, numbers[i - 1]); --i) {
      numbers[i] = numbers[i - 1];
      places[i] = places[i - 1];
    }
    numbers[i] = number;
    places[i] = place;
  }
};

struct Greater {
  bool operator()(float a, float b) const { return a > b; }
};
struct Less {
  bool operator()(float a, float b) const { return a < b; }
};

// A number that at least `size` of all are not below (with `kSign` -1: above), times the sign: of lanes that each hold
// their largest, the `size`-th largest. Minus infinity where lanes are too few.
template <int kSign>
float find_bound(const LevelBlock& block, const Layout& layout, int64_t token, int64_t size) {
  constexpr int64_t kMostLanes = 64;
  float lanes[kMostLanes];
  const int64_t padded = layout.padded_dim(), whole = layout.head_dim / kLanes * kLanes;
  // some more than are asked for, as the last ones' bound is a bad one
  const int64_t parts = (size + size / 2 + kLanes - 1) / kLanes, used = parts * kLanes;
  if (used > kMostLanes) return -kInfinity;
  for (int64_t i = 0; i < used; ++i) lanes[i] = -kInfinity;
  int64_t part = 0;
  for (int64_t head = 0; head < block.heads; ++head) {
    const float* numbers = block.numbers + head * block.head_stride + token * padded;
    for (int64_t c = 0; c < whole; c += kLanes, part = part + 1 == parts ? 0 : part + 1) {
      float* at = lanes + part * kLanes;
      store(at, larger_of(load<Floats>(at), float(kSign) * load<Floats>(numbers + c)));
    }
  }
  for (int64_t i = 0; i < size; ++i) {  // the largest so far to the front
    int64_t most = i;
    for (int64_t k = i + 1; k < used; ++k) most = lanes[k] > lanes[most] ? k : most;
    const float moved = lanes[i];
    lanes[i] = lanes[most];
    lanes[most] = moved;
  }
  return lanes[size - 1];
}

// Range of a token, see TokenNonUniformCodec; marks its outliers, a bit for every channel of every head.
void choose_range(const LevelBlock& block, const Layout& layout, int64_t token, float* scale, float* offset,
                  uint16_t* marks) {
  const int64_t padded = layout.padded_dim(), dim = layout.head_dim, all = block.heads * dim;
  const int64_t size = block.side + 1 < all ? block.side + 1 : all;
  Ranking<Greater> most{size};
  Ranking<Less> least{size};
  const float high = find_bound<1>(block, layout, token, size), low = -find_bound<-1>(block, layout, token, size);
  for (int64_t head = 0; head < block.heads; ++head) {
    const float* numbers = block.numbers + head * block.head_stride + token * padded;
    for (int64_t c = 0; c < padded; c += kLanes) {
      const Floats of_lanes = load<Floats>(numbers + c);
      if (!any_of((Words)(of_lanes >= high) | (Words)(of_lanes <= low))) continue;
      for (int64_t channel = c; channel < c + kLanes && channel < dim; ++channel) {
        const float number = numbers[channel];
        if (number >= high) most.offer(number, int32_t(head * padded + channel));
        if (number <= low) least.offer(number, int32_t(head * padded + channel));
      }
    }
  }
  float top = 0.0f, bottom = 0.0f;
  if (size > block.side && most.numbers[size - 1] >= least.numbers[size - 1]) {
    top = most.numbers[size - 1];
    bottom = least.numbers[size - 1];
  }
  const float range = round_to_half((top - bottom) / 2.0f);
  *scale = range > kSmallestRange ? range : kSmallestRange;
  *offset = round_to_half((top + bottom) / 2.0f + 0.0f);  // zero has no sign, see affine.py
  if (block.entries == nullptr || token < block.first_plain) return;
  for (int64_t i = 0; i < block.side && i < all; ++i) {
    for (const int32_t place : {most.places[i], least.places[i]}) marks[place / 16] |= uint16_t(1u << place % 16);
  }
}

template <int kBits>
void encode_value_levels(const LevelBlock& block, const Layout& layout) {
  constexpr int kBoundaries = (1 << kBits) - 1;
  const int64_t padded = layout.padded_dim(), dim = layout.head_dim, words = block.heads * padded / 16;
  float scale[kBlockTokens], offset[kBlockTokens], means[kBlockTokens][kBoundaries + 1];
  uint16_t* marks = reinterpret_cast<uint16_t*>(block.scratch);  // [64][heads][padded_dim / 16]
  std::memset(marks, 0, sizeof(uint16_t) * kBlockTokens * words);
  for (int64_t t = 0; t < kBlockTokens; ++t) {
    choose_range(block, layout, t, scale + t, offset + t, marks + t * words);
    for (int i = 0; i <= kBoundaries; ++i)
      means[t][i] = multiply_add_separately(block.levels[i], scale[t], offset[t]);
  }
  alignas(64) uint8_t codes[kBlockTokens * kMaxHeadDim];
  int64_t listed = 0;
  for (int64_t head = 0; head < block.heads; ++head) {
    const float* numbers = block.numbers + head * block.head_stride;
    uint8_t* record = block.record + head * block.head_bytes;
    for (int64_t t = 0; t < kBlockTokens; ++t) {
      const Floats width = splat(scale[t]), middle = splat(offset[t]);
      for (int64_t c = 0; c < padded; c += kLanes) {
        const Floats u = (load<Floats>(numbers + t * padded + c) - middle) / width;
        Words code = {};
        for (int i = 0; i < kBoundaries; ++i) code -= (Words)(u > block.boundaries[i]);
        put_codes(codes + t * padded + c, code);
      }
      std::memset(codes + t * padded + dim, 0, padded - dim);
      store_row(record, layout, t, scale[t], offset[t]);
    }
    pack_block(codes, layout, false, record);
    if (block.entries == nullptr) continue;
    block.starts[head] = int16_t(listed);
    for (int64_t t = 0; t < kBlockTokens; ++t) {
      for (int64_t word = 0; word < padded / 16; ++word) {
        for (uint32_t left = marks[t * words + head * padded / 16 + word]; left != 0; left &= left - 1) {
          const int64_t channel = word * 16 + __builtin_ctz(left);
          const Coded coded = code_number(numbers[t * padded + channel], scale[t], offset[t], block.boundaries,
                                          kBoundaries, [&](int code) { return means[t][code]; });
          block.entries[listed++] = outlier_entry(t, channel, coded.missing);
        }
      }
    }
  }
  if (block.entries == nullptr) return;
  block.starts[block.heads] = int16_t(listed);
  std::memset(block.entries + listed, 0, sizeof(uint32_t) * (block.width - listed));
}

void encode_keys_by_levels(const LevelBlock& block, const Layout& layout) {
  switch (layout.nbits) {
    case 2:
      return encode_key_levels<2>(block, layout);
    case 3:
      return encode_key_levels<3>(block, layout);
    default:
      return encode_key_levels<4>(block, layout);
  }
}

void encode_values_by_levels(const LevelBlock& block, const Layout& layout) {
  switch (layout.nbits) {
    case 2:
      return encode_value_levels<2>(block, layout);
    case 3:
      return encode_value_levels<3>(block, layout);
    default:
      return encode_value_levels<4>(block, layout);
  }
}

constexpr LevelKernels kLevelKernels{encode_keys_by_levels, encode_values_by_levels};

}  // namespace
}  // namespace kvcache
