// Whole blocks of tokens to codes and metadata; included by one source file per instruction set.
//
// The arithmetic is that of encode_codes.inl, a vector of channels at a time, into bytes [slot][channel]. These are then
// brought into the order of packing.py: for keys, words of four channels are turned over, so that lanes are tokens; for
// values, lanes are channels as they stand. Bound: a division per number, and a few operations per word of codes; the
// bytes of a block stay in the first-level cache.
#pragma once

#include "encode_codes.inl"
#include "portable_transposition.inl"

namespace kvcache {
namespace {  // see portable_numbers.inl

constexpr int kFields = 16;  // 32-bit words of codes that lie side by side
typedef uint32_t Fields __attribute__((vector_size(4 * kFields)));
typedef uint8_t Codes __attribute__((vector_size(kFields)));
typedef uint8_t LaneCodes __attribute__((vector_size(kLanes)));

// Calls `visit(offset)` for vectors that cover `count` >= kLanes numbers; the last may overlap the one before.
template <class Visit>
inline __attribute__((always_inline)) void for_lanes(int64_t count, Visit visit) {
  for (int64_t offset = 0; offset < count; offset += kLanes)
    visit(offset + kLanes <= count ? offset : count - kLanes);
}

inline __attribute__((always_inline)) Floats smaller_of(Floats a, Floats b) { return a < b ? a : b; }
inline __attribute__((always_inline)) Floats larger_of(Floats a, Floats b) { return a > b ? a : b; }
inline __attribute__((always_inline)) Floats nearest_of(Floats v) { return (v + 12582912.0f) - 12582912.0f; }

template <int kFormat>
constexpr float kLargestCode = kFormat == kE4M3 ? 448.0f : kFormat == kE5M2 ? 57344.0f : 127.0f;

// See `to_float8`.
template <int kMantissaBits, int kBias>
inline __attribute__((always_inline)) Words float8_codes(Floats v) {
  constexpr int kDropped = 23 - kMantissaBits;
  constexpr float kSmallestNormal = kBias == 7 ? 0x1p-6f : 0x1p-14f;
  constexpr float kUnits = kBias == 7 ? 0x1p9f : 0x1p16f;  // 2 ** (kBias - 1 + kMantissaBits)
  const Words bits = bits_of(v), magnitude = bits & 0x7fffffffu;
  const Words rounded = magnitude + ((1u << (kDropped - 1)) - 1u) + (magnitude >> kDropped & 1u);
  const Words normal = (rounded >> kDropped) - (uint32_t(127 - kBias) << kMantissaBits);
  const Floats absolute = number_of(magnitude);
  const Words small = (Words)__builtin_convertvector(nearest_of(absolute * kUnits), Integers);
  const Words is_small = (Words)(absolute < kSmallestNormal);
  return (bits >> 24 & 0x80u) | (small & is_small) | (normal & ~is_small);
}

// See `encode`; `scale` is infinite where an affine one is zero.
template <int kFormat>
inline __attribute__((always_inline)) Words codes_of(Floats v, Floats scale, Floats minimum, float top) {
  if (kFormat == kAffine) {
    const Floats code = nearest_of((v - minimum) / scale);
    return (Words)__builtin_convertvector(smaller_of(larger_of(code, splat(0.0f)), splat(top)), Integers);
  }
  const Floats scaled = v / scale;
  if (kFormat == kSymmetric) {
    const Floats code = smaller_of(larger_of(nearest_of(scaled), splat(-127.0f)), splat(127.0f));
    return (Words)__builtin_convertvector(code + 128.0f, Integers);
  }
  const Floats limit = splat(kLargestCode<kFormat>);
  const Floats clamped = smaller_of(larger_of(scaled, -limit), limit);
  return kFormat == kE4M3 ? float8_codes<3, 7>(clamped) : float8_codes<2, 15>(clamped);
}

// Scales and minima of `count` groups from their extremes, in place, see `choose`; the arrays have room for whole
// vectors. `entry` is the first group's place among the metadata of `record`.
template <int kFormat>
void choose_scales(float* low, float* high, int64_t count, const Layout& layout, uint8_t* record, int64_t entry) {
  const auto put = [&](int64_t offset, int64_t i, Words halves) __attribute__((always_inline)) {
    if (offset < 0) return;
    uint8_t* at = record + offset + (entry + i) * layout.metadata_bytes;
    const int64_t taken = count - i < kLanes ? count - i : kLanes;
    if (layout.metadata_bytes == 4) {
      const Floats numbers = widen<5, 15, false>(halves);
      std::memcpy(at, &numbers, 4 * taken);
    } else {
      typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));
      const Halves narrow = __builtin_convertvector(halves, Halves);
      std::memcpy(at, &narrow, 2 * taken);
    }
  };
  for (int64_t i = 0; i < count; i += kLanes) {
    const Floats least = load<Floats>(low + i), most = load<Floats>(high + i);
    Floats scale;
    if (kFormat == kAffine) {
      const Words halves = narrow_to_half((most - least + 0.0f) / splat(float((1 << layout.nbits) - 1)));
      const Words minima = narrow_to_half(least + 0.0f);  // zero has no sign, see affine.py
      put(layout.scale_offset, i, halves);
      put(layout.minimum_offset, i, minima);
      scale = widen<5, 15, false>(halves);
      scale = scale > 0.0f ? scale : splat(kInfinity);
      store(low + i, widen<5, 15, false>(minima));
    } else {
      const Floats exact = number_of(bits_of(larger_of(most, -least)) & 0x7fffffffu) / splat(kLargestCode<kFormat>);
      Words halves = narrow_to_half(exact);
      halves += (Words)(widen<5, 15, false>(halves) < exact) & 1u;
      halves += (Words)(halves == 0u) & 1u;  // the smallest half
      put(layout.scale_offset, i, halves);
      scale = widen<5, 15, false>(halves);
      store(low + i, Floats{});
    }
    store(high + i, scale);
  }
}

// Codes of 64 slots, bytes [slot][padded_dim], into keys' order: bytes, or `kBits` of every code from `shift` on.
template <int kBits>
void pack_keys(const uint8_t* codes, int shift, const Layout& layout, uint8_t* out) {
  const int64_t dim = layout.padded_dim(), half = dim / 2;
  alignas(64) uint32_t turned[kMaxHeadDim / 4 * kBlockTokens];  // [channel / 4][slot] of four codes
  uint32_t* words = kBits == 8 ? reinterpret_cast<uint32_t*>(out) : turned;
  for (int64_t q = 0; q < dim / 4; q += kLanes) {
    if (q + kLanes <= dim / 4) {
      for (int t = 0; t < kBlockTokens; t += kLanes)
        transpose_square(reinterpret_cast<const float*>(codes + t * dim) + q, dim / 4,
                         reinterpret_cast<float*>(words + q * kBlockTokens) + t, kBlockTokens);
      continue;
    }
    for (int64_t i = q; i < dim / 4; ++i)
      for (int t = 0; t < kBlockTokens; ++t) std::memcpy(words + i * kBlockTokens + t, codes + t * dim + 4 * i, 4);
  }
  if constexpr (kBits < 8) {
    constexpr int kParts = 4 / kBits;
    for (int64_t j = 0; j < half / kParts; ++j) {
      Fields word = {};
      for (int part = 0; part < kParts; ++part) {
        for (int side = 0; side < 2; ++side) {
          const int64_t pair = kParts * j + part, channel = layout.interleaved ? 2 * pair + side : side * half + pair;
          const uint32_t* of_channel = turned + channel / 4 * kBlockTokens;
          for (int step = 0; step < 4; ++step) {
            const Fields code = load<Fields>(of_channel + kFields * step) >> uint32_t(channel % 4 * 8 + shift);
            word |= (code & ((1u << kBits) - 1u)) << uint32_t(kBits * (4 * part + step) + 16 * side);
          }
        }
      }
      std::memcpy(out + j * sizeof(word), &word, sizeof(word));
    }
  }
}

// The same into values' order.
template <int kBits>
void pack_values(const uint8_t* codes, int shift, const Layout& layout, uint8_t* out) {
  const int64_t dim = layout.padded_dim(), chunks = dim / kFields;
  const auto codes_at = [&](int64_t slot, int64_t chunk) __attribute__((always_inline)) {
    return __builtin_convertvector(load<Codes>(codes + slot * dim + chunk * kFields), Fields);
  };
  if constexpr (kBits == 8) {
    for (int64_t slot = 0; slot < kBlockTokens; slot += 4) {
      for (int64_t chunk = 0; chunk < chunks; ++chunk, out += sizeof(Fields)) {
        const Fields word = codes_at(slot, chunk) | codes_at(slot + 1, chunk) << 8u | codes_at(slot + 2, chunk) << 16u |
                            codes_at(slot + 3, chunk) << 24u;
        std::memcpy(out, &word, sizeof(word));
      }
    }
  } else {
    constexpr int kPerWord = 16 / kBits;
    int64_t slot = 0, chunk = 0;
    for (int64_t w = 0; w < kBlockTokens / 2 * chunks / kPerWord; ++w, out += sizeof(Fields)) {
      Fields word = {};
      for (int i = 0; i < kPerWord; ++i) {
        for (int parity = 0; parity < 2; ++parity) {
          const Fields code = codes_at(slot + parity, chunk) >> uint32_t(shift) & ((1u << kBits) - 1u);
          word |= code << uint32_t(kBits * i + 16 * parity);
        }
        if (++chunk == chunks) chunk = 0, slot += 2;
      }
      std::memcpy(out, &word, sizeof(word));
    }
  }
}

void pack_block(const uint8_t* codes, const Layout& layout, bool is_key, uint8_t* record) {
  uint8_t* out = record + layout.codes_offset;
  const auto pack = [&]<int kBits>(int shift, uint8_t* at) {
    return is_key ? pack_keys<kBits>(codes, shift, layout, at) : pack_values<kBits>(codes, shift, layout, at);
  };
  switch (layout.nbits) {
    case 2:
      return pack.template operator()<2>(0, out);
    case 3:
      pack.template operator()<2>(0, out);
      return pack.template operator()<1>(2, out + kBlockTokens * layout.padded_dim() / 4);
    case 4:
      return pack.template operator()<4>(0, out);
    default:
      return pack.template operator()<8>(0, out);
  }
}

// A vector of codes as bytes.
inline __attribute__((always_inline)) void put_codes(uint8_t* to, Words codes) {
  const LaneCodes bytes = __builtin_convertvector(codes, LaneCodes);
  std::memcpy(to, &bytes, sizeof(bytes));
}

// A block of which every token has scales of its own.
template <int kFormat>
void encode_token_scales(const float* states, uint8_t* record, const Layout& layout, bool is_key, uint8_t* codes) {
  const int64_t dim = layout.head_dim, padded = layout.padded_dim(), width = layout.width, group = dim / width;
  const float top = float((1 << layout.nbits) - 1);
  float low[kMaxMetadata + kLanes], high[kMaxMetadata + kLanes];
  for (int64_t t = 0; t < kBlockTokens; ++t) {
    for (int64_t g = 0; g < width; ++g) {
      const float* numbers = states + t * dim + g * group;
      Floats least = load<Floats>(numbers), most = least;
      for_lanes(group, [&](int64_t i) __attribute__((always_inline)) {
        const Floats v = load<Floats>(numbers + i);
        least = smaller_of(v, least);
        most = larger_of(v, most);
      });
      float smallest = least[0], largest = most[0];
      for (int l = 1; l < kLanes; ++l) {
        smallest = least[l] < smallest ? least[l] : smallest;
        largest = most[l] > largest ? most[l] : largest;
      }
      low[t * width + g] = smallest;
      high[t * width + g] = largest;
    }
  }
  choose_scales<kFormat>(low, high, kBlockTokens * width, layout, record, 0);
  for (int64_t t = 0; t < kBlockTokens; ++t) {
    for (int64_t g = 0; g < width; ++g) {
      const Floats scale = splat(high[t * width + g]), minimum = splat(low[t * width + g]);
      const int64_t first = g * group;
      for_lanes(group, [&](int64_t i) __attribute__((always_inline)) {
        const Floats v = load<Floats>(states + t * dim + first + i);
        put_codes(codes + t * padded + first + i, codes_of<kFormat>(v, scale, minimum, top));
      });
    }
  }
  pack_block(codes, layout, is_key, record);
}

// `count` tokens of which every `group_tokens` have a scale per channel: groups of a block, or one of several blocks.
template <int kFormat>
void encode_channel_scales(const float* states, int64_t count, uint8_t* record, int64_t record_bytes,
                           const Layout& layout, bool is_key, uint8_t* codes) {
  const int64_t dim = layout.head_dim, padded = layout.padded_dim(), group_tokens = layout.group_tokens;
  const float top = float((1 << layout.nbits) - 1);
  float low[kMaxHeadDim + kLanes], high[kMaxHeadDim + kLanes];
  for (int64_t first = 0; first < count; first += group_tokens) {
    for_lanes(dim, [&](int64_t c) __attribute__((always_inline)) {
      Floats least = load<Floats>(states + first * dim + c), most = least;
      for (int64_t t = 1; t < group_tokens; ++t) {
        const Floats v = load<Floats>(states + (first + t) * dim + c);
        least = smaller_of(v, least);
        most = larger_of(v, most);
      }
      store(low + c, least);
      store(high + c, most);
    });
    const bool is_large = group_tokens > kBlockTokens;
    if (is_large) {  // the same metadata in every block
      float least[kMaxHeadDim + kLanes], most[kMaxHeadDim + kLanes];
      for (int64_t block = 1; block < count / kBlockTokens; ++block) {
        std::memcpy(least, low, sizeof(low));
        std::memcpy(most, high, sizeof(high));
        choose_scales<kFormat>(least, most, dim, layout, record + block * record_bytes, 0);
      }
    }
    choose_scales<kFormat>(low, high, dim, layout, record, is_large ? 0 : first / group_tokens * dim);
    for (int64_t t = 0; t < group_tokens; ++t) {
      const int64_t slot = (first + t) % kBlockTokens;
      for_lanes(dim, [&](int64_t c) __attribute__((always_inline)) {
        const Floats v = load<Floats>(states + (first + t) * dim + c);
        put_codes(codes + slot * padded + c,
                  codes_of<kFormat>(v, load<Floats>(high + c), load<Floats>(low + c), top));
      });
      if (slot == kBlockTokens - 1)
        pack_block(codes, layout, is_key, record + (first + t) / kBlockTokens * record_bytes);
    }
  }
}

template <int kFormat>
void encode_blocks(const float* states, int64_t count, uint8_t* record, int64_t record_bytes, const Layout& layout,
                   bool is_key) {
  alignas(64) uint8_t codes[kBlockTokens * kMaxHeadDim];
  std::memset(codes, 0, kBlockTokens * layout.padded_dim());  // channels of the padding have code 0
  if (layout.group_tokens == 1)
    encode_token_scales<kFormat>(states, record, layout, is_key, codes);
  else
    encode_channel_scales<kFormat>(states, count, record, record_bytes, layout, is_key, codes);
}

// Whether tokens are whole blocks whose groups are wide enough for vectors.
bool are_blocks(int64_t start, int64_t count, const Layout& layout) {
  const bool are_whole = layout.group_tokens <= kBlockTokens
                             ? count == kBlockTokens && kBlockTokens % layout.group_tokens == 0
                             : count == layout.group_tokens && count % kBlockTokens == 0;
  const int64_t group = layout.group_tokens == 1 ? layout.head_dim / layout.width : layout.head_dim;
  return start % kBlockTokens == 0 && are_whole && group >= kLanes && kBlockTokens * layout.width <= kMaxMetadata;
}

void encode_unit(const float* states, int64_t start, int64_t count, uint8_t* records, int64_t record_bytes,
                 const Layout& layout, bool is_key) {
  if (!are_blocks(start, count, layout))
    return encode_one_by_one(states, start, count, records, record_bytes, layout, is_key);
  uint8_t* record = records + start / kBlockTokens * record_bytes;
  switch (layout.format) {
    case kAffine:
      return encode_blocks<kAffine>(states, count, record, record_bytes, layout, is_key);
    case kSymmetric:
      return encode_blocks<kSymmetric>(states, count, record, record_bytes, layout, is_key);
    case kE4M3:
      return encode_blocks<kE4M3>(states, count, record, record_bytes, layout, is_key);
    default:
      return encode_blocks<kE5M2>(states, count, record, record_bytes, layout, is_key);
  }
}

void load_rows(const Rows& rows, int64_t count, int64_t dim, float* out) {
  for (int64_t t = 0; t < count; ++t) widen_row(rows.data, rows.dtype, t * rows.stride, dim, out + t * dim);
}

bool are_below(const Rows& rows, int64_t count, int64_t dim, float limit) {
  float numbers[kMaxHeadDim];
  bool are = true;
  for (int64_t t = 0; t < count && are; ++t) {
    const float* row = numbers;
    if (rows.dtype == kFloat32)
      row = static_cast<const float*>(rows.data) + t * rows.stride;
    else
      widen_row(rows.data, rows.dtype, t * rows.stride, dim, numbers);
    int32_t is_outside = 0;
    for (int64_t c = 0; c < dim; ++c) is_outside |= !(__builtin_fabsf(row[c]) < limit);  // also of NaN
    are = is_outside == 0;
  }
  return are;
}

constexpr UnitKernels kUnitKernels{load_rows, are_below, encode_unit};

}  // namespace
}  // namespace kvcache
