// One token of one side into its record, as most steps of decoding do: what `encode_unit` writes, by a shorter way. A
// number is read once, by a thread of its own, and where a code goes follows from the token without a division.
// Bound: the latency of a load; what is written to is asked for before the codes are known.
#pragma once

#include "encoding.cuh"

namespace kvcache {

// The words of a plane of `bits` bits that hold the codes of one token, as `key_place` and `value_place` have them.
struct TokenWords {
  int count;  // words of 16 bits, or bytes if bits is 8

  KVCACHE_DEVICE TokenWords(const EncodeArguments& a, int bits, int token) : a_(a), bits_(bits), token_(token) {
    dim_ = a.padded_dim;
    chunks_ = dim_ / 16;
    shift_ = bits == 1 ? 0 : bits == 2 ? 1 : bits == 4 ? 2 : 3;
    first_ = token / 2 * chunks_ >> (4 - shift_);
    const int last = (token / 2 * chunks_ + chunks_ - 1) >> (4 - shift_);
    count = bits == 8 ? dim_ : a.is_key != 0 ? 2 * (dim_ * bits / 8) : (last - first_ + 1) * 16;
  }
  // Where word number `n` lies in the plane.
  KVCACHE_DEVICE int place(int n) const {
    if (a_.is_key != 0) return bits_ == 8 ? n / 4 * 256 + token_ * 4 + n % 4 : n / 2 * 32 + token_ % 16 * 2 + n % 2;
    return bits_ == 8 ? token_ / 4 * dim_ * 4 + n * 4 + token_ % 4 : (first_ * 16 + n) * 2 + token_ % 2;
  }
  // What it holds of the token, of whose channels `codes` are the codes, shifted right by `drop`.
  KVCACHE_DEVICE uint32_t bits_of(int n, const uint8_t* codes, int drop) const {
    if (bits_ == 8) return codes[n];
    const uint32_t mask = (1u << bits_) - 1;
    uint32_t found = 0;
    if (a_.is_key != 0) {
      const int parts = 4 >> shift_, upper = n % 2;
      for (int i = 0; i < parts; ++i) {
        const int pair = n / 2 * parts + i,
                  channel = a_.interleaved != 0 ? 2 * pair + upper : pair + upper * (dim_ / 2);
        found |= (codes[channel] >> drop & mask) << bits_ * (4 * i + token_ / 16);
      }
      return found;
    }
    const int per_word = 16 >> shift_, begin = (first_ + n / 16) * per_word - token_ / 2 * chunks_;
    for (int i = 0; i < per_word; ++i) {
      const int chunk = begin + i;
      if (chunk >= 0 && chunk < chunks_) found |= (codes[16 * chunk + n % 16] >> drop & mask) << bits_ * i;
    }
    return found;
  }

 private:
  const EncodeArguments& a_;
  int bits_, token_, dim_, chunks_, shift_, first_;  // of values, `first_` counts groups of 16 words
};

KVCACHE_DEVICE uint32_t read_word(const uint8_t* plane, int bits, int place) {
  return bits == 8 ? plane[place] : reinterpret_cast<const uint16_t*>(plane)[place];
}

// Completes a plane; `held` is what this thread's first word holds already.
KVCACHE_DEVICE void put_token(const TokenWords& words, const uint8_t* codes, uint8_t* plane, int bits, int drop,
                              uint32_t held) {
  for (int n = static_cast<int>(threadIdx.x); n < words.count; n += kEncodeThreads) {
    const int place = words.place(n);
    const uint32_t before = n < kEncodeThreads ? held : read_word(plane, bits, place);
    const uint32_t word = before | words.bits_of(n, codes, drop);
    if (bits == 8) {
      plane[place] = static_cast<uint8_t>(word);
    } else {
      reinterpret_cast<uint16_t*>(plane)[place] = static_cast<uint16_t>(word);
    }
  }
}

// Whether a run is one token whose numbers have metadata of their own, shared by several channels.
KVCACHE_BOTH bool is_one_token(const EncodeArguments& a) {
  return a.count == 1 && a.group_tokens == 1 && a.width < a.head_dim;
}

// Numbers of a token, parameters of its groups, and codes.
inline int token_shared_bytes(const EncodeArguments& a) {
  return a.width * static_cast<int>(sizeof(Parameters)) + a.padded_dim * 5;
}

KVCACHE_DEVICE void encode_token(const EncodeArguments& a, uint8_t* shared) {
  Parameters* const parameters = reinterpret_cast<Parameters*>(shared);
  float* const numbers = reinterpret_cast<float*>(parameters + a.width);
  uint8_t* const codes = reinterpret_cast<uint8_t*>(numbers + a.padded_dim);
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
  const int64_t batch = blockIdx.z, head = blockIdx.y;
  const Tokens tokens{a, batch, head};
  const int token = static_cast<int>(a.start % kBlockTokens);
  uint8_t* const record =
      a.records + batch * a.batch_stride + head * a.head_stride + a.start / kBlockTokens * a.record_bytes;
  uint8_t* const plane = record + a.codes_offset;
  const int bits = a.nbits == 3 ? 2 : a.nbits;
  const TokenWords words(a, bits, token);
  const uint32_t held = thread < words.count ? read_word(plane, bits, words.place(thread)) : 0;
  for (int channel = thread; channel < a.head_dim; channel += kEncodeThreads)
    numbers[channel] = tokens.at(a.start, channel);
  block_barrier();
  const int channels = a.head_dim / a.width;
  for (int group = thread / 32; group < a.width; group += kEncodeThreads / 32) {  // a warp per group
    float smallest = infinity(), largest = -infinity();
    for (int i = lane; i < channels; i += 32) widen_range(numbers[group * channels + i], &smallest, &largest);
    for (int mask = 16; mask > 0; mask /= 2) {
      smallest = fminf(smallest, shuffle_xor(smallest, mask));
      largest = fmaxf(largest, shuffle_xor(largest, mask));
    }
    const Parameters chosen = choose(a, smallest, largest);
    if (lane > 0) continue;
    parameters[group] = chosen;
    const int entry = token * a.width + group;
    store_metadata(a, record + a.scale_offset, entry, chosen.scale);
    if (a.minimum_offset >= 0) store_metadata(a, record + a.minimum_offset, entry, chosen.minimum);
  }
  block_barrier();
  for (int channel = thread; channel < a.padded_dim; channel += kEncodeThreads)
    codes[channel] =
        channel < a.head_dim ? static_cast<uint8_t>(encode(a, numbers[channel], parameters[channel / channels])) : 0;
  block_barrier();
  put_token(words, codes, plane, bits, 0, held);
  if (a.nbits != 3) return;
  uint8_t* const high = plane + plane_bytes(2, a.padded_dim);
  const TokenWords third(a, 1, token);
  put_token(third, codes, high, 1, 2, thread < third.count ? read_word(high, 1, third.place(thread)) : 0);
}

}  // namespace kvcache
