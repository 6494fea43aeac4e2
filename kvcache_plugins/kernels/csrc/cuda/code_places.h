// Where a code lies in a record: the byte order of kvcache_plugins/quantizers/packing.py, one code at a time, for host
// and device. Kernels that must be fast know more of the order (fast_keys.cuh, fast_values.cuh, decode_words.cuh,
// encode_words.cuh).
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define KVCACHE_BOTH __host__ __device__ __forceinline__
#else
#define KVCACHE_BOTH inline
#endif

namespace kvcache {

constexpr int kBlockTokens = 64;
constexpr int kMaxHeadDim = 512;

// A place in the codes of a block: bits [shift, shift + bits) of the 16-bit word, or of the byte if bits is 8.
struct CodePlace {
  int32_t offset;  // bytes
  int32_t shift;
};

// Plane of `bits` (1, 2, 4 or 8) bits; `dim` is a multiple of 16.
KVCACHE_BOTH CodePlace key_place(int bits, int dim, bool interleaved, int token, int channel) {
  if (bits == 8) return {channel / 4 * 256 + token * 4 + channel % 4, 0};
  const int half = dim / 2, parts = 4 / bits;
  const int upper = interleaved ? channel % 2 : channel >= half;
  const int pair = interleaved ? channel / 2 : channel - upper * half;
  return {((pair / parts * 16 + token % 16) * 2 + upper) * 2, bits * (4 * (pair % parts) + token / 16)};
}

KVCACHE_BOTH CodePlace value_place(int bits, int dim, int token, int channel) {
  if (bits == 8) return {token / 4 * dim * 4 + channel * 4 + token % 4, 0};
  const int per_word = 16 / bits, chunk = token / 2 * (dim / 16) + channel / 16;
  return {((chunk / per_word * 16 + channel % 16) * 2 + token % 2) * 2, bits * (chunk % per_word)};
}

KVCACHE_BOTH CodePlace code_place(int bits, int dim, bool is_key, bool interleaved, int token, int channel) {
  return is_key ? key_place(bits, dim, interleaved, token, channel) : value_place(bits, dim, token, channel);
}

// The exponent of a power of two of at most 64.
KVCACHE_BOTH int power_of(int x) { return (x >= 2) + (x >= 4) + (x >= 8) + (x >= 16) + (x >= 32) + (x >= 64); }

// Bytes of a plane of `bits` bits.
KVCACHE_BOTH int plane_bytes(int bits, int dim) { return kBlockTokens * dim * bits / 8; }

KVCACHE_BOTH uint32_t read_plane(const uint8_t* plane, int bits, int dim, bool is_key, bool interleaved, int token,
                                 int channel) {
  const CodePlace place = code_place(bits, dim, is_key, interleaved, token, channel);
  if (bits == 8) return plane[place.offset];
  const uint32_t word = *reinterpret_cast<const uint16_t*>(plane + place.offset);
  return word >> place.shift & ((1u << bits) - 1);
}

// Byte `offset` of the codes in shared memory. Lanes of different t would meet in the same banks; the exclusive or
// spreads them. Copies write 16 bytes at a time, loads read 8, and both stay together.
KVCACHE_BOTH int swizzle_bits(int offset, int swizzle) { return offset << 5 >> (4 + swizzle) & 0x60; }
KVCACHE_BOTH int swizzled(int offset, int swizzle) { return offset ^ swizzle_bits(offset, swizzle); }
// The same for offset `step + lane` of which `spread` is swizzled(lane, swizzle), if they have no bit in common.
KVCACHE_BOTH int swizzled_step(int step, int spread, int swizzle) {
  return step + (spread ^ swizzle_bits(step, swizzle));
}

// A token and channel of a block.
struct CodeOwner {
  int32_t token, channel;
};

// Inverse of `key_place` and `value_place`: whose code is number `index` of the 16-bit word (or, of 8 bits, the byte)
// `word` of a plane. A word of 16 bits holds 16 / bits codes.
KVCACHE_BOTH CodeOwner key_owner(int bits, int dim, bool interleaved, int word, int index) {
  if (bits == 8) return {word % 256 / 4, word / 256 * 4 + word % 4};
  const int parts = 4 / bits, upper = word % 2;
  const int pair = word / 32 * parts + index / 4;
  return {index % 4 * 16 + word / 2 % 16, interleaved ? 2 * pair + upper : pair + upper * (dim / 2)};
}

KVCACHE_BOTH CodeOwner value_owner(int bits, int dim, int word, int index) {
  if (bits == 8) return {word / (4 * dim) * 4 + word % 4, word % (4 * dim) / 4};
  const int chunks = dim / 16, chunk = word / 32 * (16 / bits) + index;
  return {chunk / chunks * 2 + word % 2, chunk % chunks * 16 + word / 2 % 16};
}

KVCACHE_BOTH CodeOwner code_owner(int bits, int dim, bool is_key, bool interleaved, int word, int index) {
  return is_key ? key_owner(bits, dim, interleaved, word, index) : value_owner(bits, dim, word, index);
}

}  // namespace kvcache
