// A run of tokens of one side as codes and metadata, to the last bit what the torch codecs on the CPU write
// (kvcache_plugins/quantizers); shared by encode_tokens.cu and append_tokens.cu.
//
// A thread block owns the records of a unit, 64 tokens or a longer group, so that no two write to one word; words that
// already hold tokens are completed, and no others are looked at. Numbers are read twice, for the statistics and for
// the codes.
#pragma once

#include "encode_words.cuh"
#include "packed_codes.cuh"

namespace kvcache {

constexpr float kLargestHalf = 65504.0f;
constexpr float kSmallestScale = 5.9604644775390625e-8f;  // 2^-24
constexpr int kEncodeThreads = 256;

KVCACHE_DEVICE bool is_second_of_pair(const EncodeArguments& a, int channel) {
  return a.interleaved != 0 ? channel % 2 != 0 : channel >= a.pairs;
}
// The other channel of a rotary pair.
KVCACHE_DEVICE int partner_of(const EncodeArguments& a, int channel) {
  if (a.interleaved != 0) return channel ^ 1;
  return is_second_of_pair(a, channel) ? channel - a.pairs : channel + a.pairs;
}
// The rotation of `x` by the angles of its token undone; `other` is the number of its partner.
KVCACHE_DEVICE float turned_back(const EncodeArguments& a, float x, float other, int channel, const float* cos,
                                 const float* sin) {
  const int pair = a.interleaved != 0 ? channel / 2 : channel % a.pairs;
  const float signed_other = is_second_of_pair(a, channel) ? -other : other;
  const float product = multiply_rounded(x, cos[pair]);
  if (a.is_fused != 0) return fmaf(signed_other, sin[pair], product);
  return add_rounded(product, multiply_rounded(signed_other, sin[pair]));
}

// The tokens of one row and head.
struct Tokens {
  const EncodeArguments& a;
  int64_t batch, head;

  KVCACHE_DEVICE float stored(int64_t slot, int channel) const {
    if (slot >= a.newer_start) return number(a.newer, slot - a.newer_start, channel);
    return number(a.states, slot - a.start, channel);
  }
  KVCACHE_DEVICE float number(const Exact& from, int64_t token, int channel) const {
    return read_number(from.data, a.dtype, from.row(batch, head, token) + channel);
  }
  // What is encoded: divided by the factor of its channel, or its rotation undone.
  KVCACHE_DEVICE float at(int64_t slot, int channel) const {
    const float x = stored(slot, channel);
    if (a.factors != nullptr) return divide_rounded(x, a.factors[(batch * gridDim.y + head) * a.head_dim + channel]);
    if (a.cos == nullptr || channel >= 2 * a.pairs) return x;
    const int period = a.period > 0 ? a.period : 1;  // the compiler may divide before it knows whether keys rotate
    const int row = static_cast<int>(slot) % period * a.pairs;
    const float other = stored(slot, partner_of(a, channel));
    return turned_back(a, x, other, channel, a.cos + row, a.sin + row);
  }
};

KVCACHE_DEVICE bool is_finite(float x) { return (float_bits(x) & 0x7f800000u) != 0x7f800000u; }

KVCACHE_DEVICE float round_to_half(float x) {
  const float half = half_float(float_half(x));
  return is_finite(half) ? half : x;
}

KVCACHE_DEVICE float round_up_to_half(float x) {
  uint16_t half = float_half(x);
  if (half_float(half) < x) ++half;
  const float up = half_float(half);
  return is_finite(up) ? up : x;
}

KVCACHE_DEVICE float largest_code(const EncodeArguments& a) {
  return a.format == kE4M3 ? 448.0f : a.format == kE5M2 ? 57344.0f : 127.0f;
}

struct Parameters {
  float scale, minimum;
};

// From the smallest and largest finite number of a group; (inf, -inf) if there is none.
KVCACHE_DEVICE Parameters choose(const EncodeArguments& a, float low, float high) {
  if (a.format == kAffine) {
    if (low > high) low = high = 0.0f;
    const float levels = static_cast<float>((1 << a.nbits) - 1);
    const float range = add_rounded(add_rounded(high, -low), 0.0f);  // zero has no sign, see affine.py
    const float scale = round_to_half(divide_rounded(range, levels));
    return {is_finite(scale) ? scale : 0.0f, round_to_half(add_rounded(low, 0.0f))};
  }
  const float largest = low > high ? 0.0f : fmaxf(high, -low);
  return {fmaxf(round_up_to_half(divide_rounded(largest, largest_code(a))), kSmallestScale), 0.0f};
}

// Nearest 8-bit float, ties to even; |x| is at most the largest number of the format.
KVCACHE_DEVICE uint32_t to_float8(float x, int mantissa_bits, int bias) {
  const uint32_t bits = float_bits(x), sign = bits >> 24 & 0x80u, magnitude = bits & 0x7fffffffu;
  const float smallest_normal = bits_float(static_cast<uint32_t>(128 - bias) << 23);
  const float size = bits_float(magnitude);
  if (size < smallest_normal) {  // subnormal; rounding up to the first normal number gives its code
    const float steps = size * bits_float(static_cast<uint32_t>(127 + bias - 1 + mantissa_bits) << 23);
    return sign | static_cast<uint32_t>(nearest_even(steps));
  }
  const int dropped = 23 - mantissa_bits;
  const uint32_t rounded = magnitude + (1u << (dropped - 1)) - 1 + (magnitude >> dropped & 1u);
  return sign | ((rounded >> dropped) - (static_cast<uint32_t>(127 - bias) << mantissa_bits));
}

KVCACHE_DEVICE uint32_t encode(const EncodeArguments& a, float x, Parameters p) {
  if (a.format == kAffine) {
    const float divisor = p.scale > 0.0f ? p.scale : infinity();
    const float code = nearest_even(divide_rounded(add_rounded(x, -p.minimum), divisor));
    const float top = static_cast<float>((1 << a.nbits) - 1);
    return static_cast<uint32_t>(fminf(fmaxf(code, 0.0f), top));  // what is not a number becomes 0
  }
  const float scaled = divide_rounded(x, p.scale);
  const float number = scaled == scaled ? scaled : 0.0f;
  if (a.format == kSymmetric)
    return static_cast<uint32_t>(static_cast<int>(fminf(fmaxf(nearest_even(number), -127.0f), 127.0f)) + 128);
  const float limit = largest_code(a), clamped = fminf(fmaxf(number, -limit), limit);
  return a.format == kE4M3 ? to_float8(clamped, 3, 7) : to_float8(clamped, 2, 15);
}

KVCACHE_DEVICE void store_metadata(const EncodeArguments& a, uint8_t* field, int entry, float value) {
  if (a.metadata_bytes == 4) {
    reinterpret_cast<float*>(field)[entry] = value;
    return;
  }
  if (fabsf(value) > kLargestHalf) {
    raise_flag(a.overflow);
    value = value > 0.0f ? kLargestHalf : -kLargestHalf;
  }
  reinterpret_cast<uint16_t*>(field)[entry] = float_half(value);
}

KVCACHE_DEVICE void widen_range(float x, float* low, float* high) {
  if (!is_finite(x)) return;
  *low = fminf(*low, x);
  *high = fmaxf(*high, x);
}

// Parameters of every group that meets slots [low, high) of the unit from slot `first` on, to shared memory.
KVCACHE_DEVICE void choose_parameters(const EncodeArguments& a, const Tokens& tokens, int64_t first, int64_t low,
                                      int64_t high, Parameters* parameters) {
  const int thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  const int channels = a.head_dim / a.width;
  const int begin = static_cast<int>(low - first) / a.group_tokens;
  const int end = static_cast<int>(high - first + a.group_tokens - 1) / a.group_tokens;
  if (channels == 1) {  // a thread per channel and group of tokens
    for (int i = begin * a.width + thread; i < end * a.width; i += threads) {
      float smallest = infinity(), largest = -infinity();
      for (int t = 0; t < a.group_tokens; ++t)
        widen_range(tokens.at(first + i / a.width * a.group_tokens + t, i % a.width), &smallest, &largest);
      parameters[i] = choose(a, smallest, largest);
    }
    return;
  }
  for (int i = begin * a.width + thread / 32; i < end * a.width; i += threads / 32) {  // a warp per group
    float smallest = infinity(), largest = -infinity();
    for (int j = thread % 32; j < channels * a.group_tokens; j += 32)
      widen_range(tokens.at(first + i / a.width * a.group_tokens + j / channels, i % a.width * channels + j % channels),
                  &smallest, &largest);
    for (int mask = 16; mask > 0; mask /= 2) {
      smallest = fminf(smallest, shuffle_xor(smallest, mask));
      largest = fmaxf(largest, shuffle_xor(largest, mask));
    }
    if (thread % 32 == 0) parameters[i] = choose(a, smallest, largest);
  }
}

// Completes a plane of one record with the codes, shifted right by `drop`, of slots [low, high).
KVCACHE_DEVICE void put_plane(const EncodeArguments& a, const Tokens& tokens, int64_t first, int64_t record_start,
                              int64_t low, int64_t high, const Parameters* parameters, uint8_t* plane, int bits,
                              int drop) {
  const TouchedWords touched(bits, a.padded_dim, a.is_key != 0, static_cast<int>(low - record_start),
                             static_cast<int>(high - record_start));
  const int codes = bits == 8 ? 1 : 16 / bits, channels = a.head_dim / a.width;
  for (int n = static_cast<int>(threadIdx.x); n < touched.count; n += static_cast<int>(blockDim.x)) {
    const int word = touched.word(n);
    uint32_t found = 0;
    for (int i = 0; i < codes; ++i) {
      const CodeOwner owner = code_owner(bits, a.padded_dim, a.is_key != 0, a.interleaved != 0, word, i);
      const int64_t slot = record_start + owner.token;
      if (slot < low || slot >= high || owner.channel >= a.head_dim) continue;
      const int entry = static_cast<int>(slot - first) / a.group_tokens * a.width + owner.channel / channels;
      const uint32_t code = encode(a, tokens.at(slot, owner.channel), parameters[entry]);
      found |= (code >> drop & ((1u << bits) - 1)) << bits * i;
    }
    if (found == 0) continue;
    if (bits == 8) {
      plane[word] = static_cast<uint8_t>(plane[word] | found);
    } else {
      uint16_t* at = reinterpret_cast<uint16_t*>(plane) + word;
      *at = static_cast<uint16_t>(*at | found);
    }
  }
}

// Encodes unit `index` of the run, of the row and head of this thread block; `shared` has room for its parameters.
KVCACHE_DEVICE void encode_unit(const EncodeArguments& a, int index, uint8_t* shared) {
  Parameters* parameters = reinterpret_cast<Parameters*>(shared);
  const int64_t batch = blockIdx.z, head = blockIdx.y;
  const Tokens tokens{a, batch, head};
  const int64_t unit = a.unit_tokens(), first = (a.start / unit + index) * unit;
  const int64_t low = first > a.start ? first : a.start;
  const int64_t high = first + unit < a.start + a.count ? first + unit : a.start + a.count;
  choose_parameters(a, tokens, first, low, high, parameters);
  block_barrier();
  const int rows = kBlockTokens / (a.group_tokens < kBlockTokens ? a.group_tokens : kBlockTokens);
  const int row_tokens = kBlockTokens / rows;
  for (int64_t start = low / kBlockTokens * kBlockTokens; start < high; start += kBlockTokens) {
    uint8_t* record = a.records + batch * a.batch_stride + head * a.head_stride + start / kBlockTokens * a.record_bytes;
    const int64_t from = start > low ? start : low, to = start + kBlockTokens < high ? start + kBlockTokens : high;
    const int begin = static_cast<int>(from - start) / row_tokens * a.width;
    const int end = (static_cast<int>(to - start) + row_tokens - 1) / row_tokens * a.width;
    for (int i = begin + static_cast<int>(threadIdx.x); i < end; i += static_cast<int>(blockDim.x)) {
      const int64_t slot = start + i / a.width * row_tokens;
      const Parameters p = parameters[static_cast<int>(slot - first) / a.group_tokens * a.width + i % a.width];
      store_metadata(a, record + a.scale_offset, i, p.scale);
      if (a.minimum_offset >= 0) store_metadata(a, record + a.minimum_offset, i, p.minimum);
    }
    uint8_t* codes = record + a.codes_offset;
    if (a.nbits == 3) {
      put_plane(a, tokens, first, start, from, to, parameters, codes, 2, 0);
      put_plane(a, tokens, first, start, from, to, parameters, codes + plane_bytes(2, a.padded_dim), 1, 2);
    } else {
      put_plane(a, tokens, first, start, from, to, parameters, codes, a.nbits, 0);
    }
  }
}

// Dynamic shared memory of a thread block that encodes units of the run.
inline int encoding_shared_bytes(const EncodeArguments& a) {
  return a.count == 0 ? 0 : a.unit_rows() * a.width * static_cast<int>(sizeof(Parameters));
}

}  // namespace kvcache
