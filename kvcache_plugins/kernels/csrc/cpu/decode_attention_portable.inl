// Decode attention in plain C++ with compiler vectors; included by one source file per instruction set.
//
// A block of 64 slots at a time: its keys are decoded to fp32 as [channel][token], its values as [token][channel], so
// that both products are sums of scaled contiguous rows and neither needs a horizontal sum. Decoding costs about one
// operation per value and vector lane and is shared by all query rows; with four rows per kv head both are bound by
// the multiplications. The aim is a quarter of the time of attention over dense bf16 keys and values that repeats
// them per query head, on any x86-64 or other 64-bit machine; the AVX-512 kernel is the one that nears the bandwidth.
//
// Whatever a masked or unused slot holds must not reach the result: its score is replaced, not shifted, and its value
// is left out where it is not finite (0 * NaN).

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__F16C__)
#include <immintrin.h>
#endif

#include "decode_attention.h"

namespace kvcache {
namespace {  // everything: two translation units compile this for different machines

#if defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
constexpr int kTables = kMaxHeadDim / 2 * kBlockTokens;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

typedef float Floats __attribute__((vector_size(4 * kLanes)));
typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
typedef int32_t Integers __attribute__((vector_size(4 * kLanes)));

template <typename Vector>
inline __attribute__((always_inline)) Vector load(const void* from) {
  Vector v;
  __builtin_memcpy(&v, from, sizeof(v));
  return v;
}

inline __attribute__((always_inline)) void store(float* to, Floats v) { __builtin_memcpy(to, &v, sizeof(v)); }
inline __attribute__((always_inline)) Floats splat(float x) { return x - Floats{}; }
inline __attribute__((always_inline)) Floats to_floats(Words v) {
  return __builtin_convertvector((Integers)v, Floats);
}

struct Workspace {
  alignas(64) float tile[kMaxHeadDim * kBlockTokens];  // keys [channel][token], then values [token][channel]
  alignas(64) float scores[kMaxQueries * kBlockTokens];
  alignas(64) float output[kMaxQueries * kMaxHeadDim];
  alignas(64) float cos[kTables], sin[kTables];  // [pair][token]
  alignas(64) float scale[kMaxMetadata], minimum[kMaxMetadata];
  alignas(64) float row_scale[kMaxHeadDim], row_minimum[kMaxHeadDim], row[kMaxHeadDim];
  int64_t phase;  // of the rotation the tables are for; -1: none yet
};

// ---- numbers

// Widens floats of `kExponent` exponent bits, given right-aligned in a word of which bit `kSign` is the sign. Finite
// ones only, unless `kSpecial`. Subnormals are rebuilt by a subtraction: they survive a CPU that flushes denormals.
template <int kExponentBits, int kSign, bool kSpecial>
inline __attribute__((always_inline)) Floats widen(Words bits) {
  constexpr int kMantissaBits = kSign - kExponentBits;
  constexpr uint32_t kRebias = 127 - ((1 << (kExponentBits - 1)) - 1);
  constexpr uint32_t kExponentMask = ((1u << kExponentBits) - 1) << 23;
  const Words magnitude = (bits & ((1u << kSign) - 1)) << (23 - kMantissaBits);
  const Words exponent = magnitude & kExponentMask;
  const Words is_small = (Words)(exponent == 0);
  Words rebiased = magnitude + (kRebias << 23) + (is_small & (1u << 23));
  if (kSpecial) rebiased += (Words)(exponent == kExponentMask) & (kRebias << 23);
  const Words correction = is_small & ((kRebias + 1) << 23);
  Floats value;
  Floats subtracted;
  __builtin_memcpy(&value, &rebiased, sizeof(value));
  __builtin_memcpy(&subtracted, &correction, sizeof(value));
  value -= subtracted;
  Words result;
  __builtin_memcpy(&result, &value, sizeof(value));
  result |= (bits >> kSign) << 31;
  __builtin_memcpy(&value, &result, sizeof(value));
  return value;
}

template <int kFormat>
inline __attribute__((always_inline)) Floats code_values(Words codes) {
  if (kFormat == kSymmetric) return to_floats(codes) - 128.0f;
  if (kFormat == kE4M3) return widen<4, 7, false>(codes);
  if (kFormat == kE5M2) return widen<5, 7, false>(codes);
  return to_floats(codes);
}

inline void widen_halves(const uint16_t* from, int64_t count, float* to) {
  int64_t i = 0;
#if defined(__F16C__)
  for (; i + 8 <= count; i += 8) {
    _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
  }
#else
  for (; i + kLanes <= count; i += kLanes) {
    Words bits;
    for (int l = 0; l < kLanes; ++l) bits[l] = from[i + l];
    store(to + i, widen<5, 15, true>(bits));
  }
#endif
  for (; i < count; ++i) {
    Words bits = {from[i]};
    to[i] = widen<5, 15, true>(bits)[0];
  }
}

void widen_row(const void* data, int32_t dtype, int64_t offset, int64_t count, float* to) {
  if (dtype == kFloat32) {
    std::memcpy(to, static_cast<const float*>(data) + offset, count * sizeof(float));
  } else if (dtype == kFloat16) {
    widen_halves(static_cast<const uint16_t*>(data) + offset, count, to);
  } else {
    const uint16_t* from = static_cast<const uint16_t*>(data) + offset;
    for (int64_t i = 0; i < count; ++i) {
      const uint32_t bits = static_cast<uint32_t>(from[i]) << 16;
      std::memcpy(to + i, &bits, sizeof(bits));
    }
  }
}

// exp(x) for x <= 0, to 2 units in the last place (the polynomial of Cephes); 0 below -87.3, NaN stays.
inline __attribute__((always_inline)) Floats exponential(Floats x) {
  constexpr float kLowest = -87.3f;
  const Integers is_zero = x < kLowest;
  x = is_zero ? splat(kLowest) : x;
  const Floats n = (x * 1.44269504f + 12582912.0f) - 12582912.0f;  // rounds to the nearest integer
  const Floats r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  Floats y = r * 1.9875691500e-4f + 1.3981999507e-3f;
  y = y * r + 8.3334519073e-3f;
  y = y * r + 4.1665795894e-2f;
  y = y * r + 1.6666665459e-1f;
  y = y * r + 5.0000001201e-1f;
  y = y * r * r + r + 1.0f;
  const Integers power = (__builtin_convertvector(n, Integers) + 127) << 23;
  Floats scale;
  __builtin_memcpy(&scale, &power, sizeof(scale));
  return is_zero ? Floats{} : y * scale;
}

inline __attribute__((always_inline)) Floats hyperbolic_tangent(Floats x) {
  const Floats magnitude = x < 0.0f ? -x : x;
  const Floats e = exponential(-2.0f * magnitude);
  const Floats far = (1.0f - e) / (1.0f + e);
  const Floats z = x * x;
  Floats near = z * -5.70498872745e-3f + 2.06390887954e-2f;
  near = near * z - 5.37397155531e-2f;
  near = near * z + 1.33314422036e-1f;
  near = near * z - 3.33332819422e-1f;
  near = near * z * x + x;
  return magnitude < 0.625f ? near : (x < 0.0f ? -far : far);
}

// ---- decoding

// Reads the metadata of a record as fp32: rows * width numbers, or one for a static scale.
void load_metadata(const Side& side, const uint8_t* record, Workspace& ws) {
  const int64_t count = static_cast<int64_t>(kBlockTokens / side.group_tokens) * side.width;
  const int32_t dtype = side.metadata_bytes == 4 ? kFloat32 : kFloat16;
  if (side.scale_offset >= 0) widen_row(record + side.scale_offset, dtype, 0, count, ws.scale);
  if (side.minimum_offset >= 0) widen_row(record + side.minimum_offset, dtype, 0, count, ws.minimum);
}

// The codes of 3 bits are a plane of 2 bits and, after it, one of 1 bit.
template <int kBits>
struct Planes {
  static constexpr int kLow = kBits == 3 ? 2 : kBits;
  static constexpr uint32_t kMask = (1u << kLow) - 1;
};

inline int64_t high_plane(const Side& side) { return static_cast<int64_t>(kBlockTokens) * side.padded_dim / 4; }

// Decodes the keys of a record to tile[channel][token].
template <int kBits, int kFormat>
void decode_keys(const Side& side, const uint8_t* record, Workspace& ws) {
  using P = Planes<kBits>;
  constexpr int kParts = kBits == 8 ? 1 : 4 / P::kLow;
  const uint8_t* codes = record + side.codes_offset;
  const int half = side.padded_dim / 2;
  const int group = side.head_dim / side.width;
  const bool has_minimum = side.minimum_offset >= 0;
  const bool by_chunk = side.scale_offset < 0 || side.group_tokens % 16 == 0;
  load_metadata(side, record, ws);
  alignas(64) float scales[kBlockTokens];
  alignas(64) float minima[kBlockTokens];
  int gathered = -1;
  for (int d = 0; d < side.head_dim; ++d) {
    const int pair = side.interleaved ? d / 2 : d % half;
    const int upper = side.interleaved ? d % 2 : d / half;
    const uint8_t* lanes = codes + (kBits == 8 ? d / 4 * 256 : pair / kParts * 64);
    const uint8_t* lanes_high = codes + high_plane(side) + pair / 4 * 64;
    const int shift = kBits == 8 ? 8 * (d % 4) : 16 * upper + P::kLow * 4 * (pair % kParts);
    const int shift_high = 16 * upper + 4 * (pair % 4);
    const int column = d / group;
    const float factor = side.factors != nullptr ? side.factors[d] : 1.0f;
    if (!by_chunk && column != gathered) {
      gathered = column;
      for (int t = 0; t < kBlockTokens; ++t) {
        const int entry = t / side.group_tokens * side.width + column;
        scales[t] = ws.scale[entry];
        minima[t] = has_minimum ? ws.minimum[entry] : 0.0f;
      }
    }
    float* out = ws.tile + d * kBlockTokens;
    for (int k = 0; k < 4; ++k) {
      Floats scale = splat(side.static_scale);
      Floats minimum = Floats{};
      if (by_chunk && side.scale_offset >= 0) {
        const int entry = 16 * k / side.group_tokens * side.width + column;
        scale = splat(ws.scale[entry]);
        if (has_minimum) minimum = splat(ws.minimum[entry]);
      }
      for (int t = 0; t < 16; t += kLanes) {
        Words words;
        if (kBits == 8) {
          words = load<Words>(lanes + 4 * (16 * k + t)) >> shift & 255u;
        } else {
          words = load<Words>(lanes + 4 * t) >> (shift + P::kLow * k) & P::kMask;
          if (kBits == 3) words |= (load<Words>(lanes_high + 4 * t) >> (shift_high + k) & 1u) << 2;
        }
        if (!by_chunk) {
          scale = load<Floats>(scales + 16 * k + t);
          minimum = load<Floats>(minima + 16 * k + t);
        }
        Floats value = code_values<kFormat>(words) * scale + minimum;
        if (side.factors != nullptr) value *= factor;
        store(out + 16 * k + t, value);
      }
    }
  }
}

// Decodes the values of a record to tile[token][channel], rows of `padded_dim`.
template <int kBits, int kFormat>
void decode_values(const Side& side, const uint8_t* record, Workspace& ws) {
  using P = Planes<kBits>;
  constexpr int kPerWord = 16 / P::kLow;
  const uint8_t* codes = record + side.codes_offset;
  const int chunks = side.padded_dim / 16;
  const int group = side.head_dim / side.width;
  const bool is_static = side.scale_offset < 0;
  const bool has_minimum = side.minimum_offset >= 0;
  const bool by_chunk = is_static || side.width == 1 || group % 16 == 0;
  load_metadata(side, record, ws);
  int expanded = -1;
  for (int t = 0; t < kBlockTokens; ++t) {
    const int upper = t % 2;
    const int row = is_static ? 0 : t / side.group_tokens;
    const float* row_scale = ws.scale + static_cast<int64_t>(row) * side.width;
    const float* row_minimum = ws.minimum + static_cast<int64_t>(row) * side.width;
    if (!by_chunk && row != expanded) {
      expanded = row;
      for (int d = 0; d < side.padded_dim; ++d) {
        const int entry = d < side.head_dim ? d / group : side.width - 1;
        ws.row_scale[d] = row_scale[entry];
        ws.row_minimum[d] = has_minimum ? row_minimum[entry] : 0.0f;
      }
    }
    float* out = ws.tile + t * side.padded_dim;
    for (int u = 0; u < chunks; ++u) {
      const int chunk = t / 2 * chunks + u;
      const uint8_t* lanes = codes + (kBits == 8 ? (t / 4 * chunks + u) * 64 : chunk / kPerWord * 64);
      const int shift = kBits == 8 ? 8 * (t % 4) : 16 * upper + P::kLow * (chunk % kPerWord);
      const uint8_t* lanes_high = codes + high_plane(side) + chunk / 16 * 64;
      const int shift_high = 16 * upper + chunk % 16;
      Floats scale = splat(side.static_scale);
      Floats minimum = Floats{};
      if (by_chunk && !is_static) {
        const int column = 16 * u / group;
        scale = splat(row_scale[column]);
        if (has_minimum) minimum = splat(row_minimum[column]);
      }
      for (int c = 0; c < 16; c += kLanes) {
        Words words = load<Words>(lanes + 4 * c) >> shift & (kBits == 8 ? 255u : P::kMask);
        if (kBits == 3) words |= (load<Words>(lanes_high + 4 * c) >> shift_high & 1u) << 2;
        if (!by_chunk) {
          scale = load<Floats>(ws.row_scale + 16 * u + c);
          minimum = load<Floats>(ws.row_minimum + 16 * u + c);
        }
        store(out + 16 * u + c, code_values<kFormat>(words) * scale + minimum);
      }
    }
    if (side.factors != nullptr) {
      for (int d = 0; d < side.head_dim; ++d) out[d] *= side.factors[d];
    }
  }
}

using Decoder = void (*)(const Side&, const uint8_t*, Workspace&);

template <int kFormat>
Decoder choose_wide_decoder(bool is_key) {
  return is_key ? decode_keys<8, kFormat> : decode_values<8, kFormat>;
}

Decoder choose_decoder(const Side& side, bool is_key) {
  switch (side.format) {
    case kSymmetric:
      return choose_wide_decoder<kSymmetric>(is_key);
    case kE4M3:
      return choose_wide_decoder<kE4M3>(is_key);
    case kE5M2:
      return choose_wide_decoder<kE5M2>(is_key);
  }
  switch (side.nbits) {
    case 2:
      return is_key ? decode_keys<2, kAffine> : decode_values<2, kAffine>;
    case 3:
      return is_key ? decode_keys<3, kAffine> : decode_values<3, kAffine>;
    case 4:
      return is_key ? decode_keys<4, kAffine> : decode_values<4, kAffine>;
    default:
      return choose_wide_decoder<kAffine>(is_key);
  }
}

// Rotates decoded keys of the block at slot `start`: token t by the angles of t % period.
void rotate(const Side& side, int64_t start, Workspace& ws) {
  const int pairs = side.rotary_dim / 2;
  const int64_t phase = start % side.period;
  if (phase != ws.phase) {
    ws.phase = phase;
    for (int t = 0; t < kBlockTokens; ++t) {
      const int64_t row = (start + t) % side.period * pairs;
      for (int i = 0; i < pairs; ++i) {
        ws.cos[i * kBlockTokens + t] = side.cos[row + i];
        ws.sin[i * kBlockTokens + t] = side.sin[row + i];
      }
    }
  }
  for (int i = 0; i < pairs; ++i) {
    float* first = ws.tile + (side.interleaved ? 2 * i : i) * kBlockTokens;
    float* second = ws.tile + (side.interleaved ? 2 * i + 1 : i + pairs) * kBlockTokens;
    for (int t = 0; t < kBlockTokens; t += kLanes) {
      const Floats a = load<Floats>(first + t), b = load<Floats>(second + t);
      const Floats c = load<Floats>(ws.cos + i * kBlockTokens + t);
      const Floats s = load<Floats>(ws.sin + i * kBlockTokens + t);
      store(first + t, a * c - b * s);
      store(second + t, b * c + a * s);
    }
  }
}

// Copies exact tokens [first, first + count) of the block at slot `start` into the tile; `offset` is that of the first.
void copy_exact(const Side& side, bool is_key, const void* data, int64_t offset, int64_t stride, int64_t first,
                int64_t count, Workspace& ws) {
  for (int64_t i = 0; i < count; ++i) {
    if (!is_key) {
      widen_row(data, side.dtype, offset + i * stride, side.head_dim, ws.tile + (first + i) * side.padded_dim);
      continue;
    }
    widen_row(data, side.dtype, offset + i * stride, side.head_dim, ws.row);
    for (int d = 0; d < side.head_dim; ++d) ws.tile[d * kBlockTokens + first + i] = ws.row[d];
  }
}

inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

// Brings slots [start, start + count) of one side into the tile.
void load_block(const Side& side, bool is_key, Decoder decode, int64_t start, int64_t count, Workspace& ws) {
  const int64_t packed = smaller(kBlockTokens, side.packed_length - start);
  if (packed > 0) {
    decode(side, side.records + start / kBlockTokens * side.record_bytes, ws);
    if (side.cos != nullptr) rotate(side, start, ws);
    if (side.sinks != nullptr) {
      const int64_t low = larger(side.sink_start, start);
      const int64_t high = smaller(side.sink_start + side.sink_length, start + packed);
      copy_exact(side, is_key, side.sinks, (low - side.sink_start) * side.head_dim, side.head_dim, low - start,
                 high - low, ws);
    }
  }
  for (int i = 0; i < side.num_segments; ++i) {
    const Segment& segment = side.segments[i];
    const int64_t low = larger(segment.start, start);
    const int64_t high = smaller(segment.start + segment.length, start + count);
    copy_exact(side, is_key, segment.data, (low - segment.start) * segment.stride, segment.stride, low - start,
               high - low, ws);
  }
}

// ---- products

// c[r][n] (+)= sum over k of a[r][k] * b[k][n], for kRows rows; n is a multiple of 16.
template <int kRows>
void multiply_rows(const float* a, int64_t a_stride, const float* b, int64_t b_stride, int64_t depth, int64_t width,
                   float* c, int64_t c_stride, bool accumulate) {
  for (int64_t n = 0; n < width; n += 2 * kLanes) {
    Floats left[kRows], right[kRows];
    for (int r = 0; r < kRows; ++r) {
      left[r] = accumulate ? load<Floats>(c + r * c_stride + n) : Floats{};
      right[r] = accumulate ? load<Floats>(c + r * c_stride + n + kLanes) : Floats{};
    }
    for (int64_t k = 0; k < depth; ++k) {
      const Floats b_left = load<Floats>(b + k * b_stride + n);
      const Floats b_right = load<Floats>(b + k * b_stride + n + kLanes);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        const Floats weight = splat(a[r * a_stride + k]);
        left[r] += weight * b_left;
        right[r] += weight * b_right;
      }
    }
    for (int r = 0; r < kRows; ++r) {
      store(c + r * c_stride + n, left[r]);
      store(c + r * c_stride + n + kLanes, right[r]);
    }
  }
}

void multiply(const float* a, int64_t a_stride, const float* b, int64_t b_stride, int64_t rows, int64_t depth,
              int64_t width, float* c, int64_t c_stride, bool accumulate) {
  int64_t r = 0;
  for (; r + 4 <= rows; r += 4) {
    multiply_rows<4>(a + r * a_stride, a_stride, b, b_stride, depth, width, c + r * c_stride, c_stride, accumulate);
  }
  a += r * a_stride;
  c += r * c_stride;
  if (rows - r == 3) multiply_rows<3>(a, a_stride, b, b_stride, depth, width, c, c_stride, accumulate);
  if (rows - r == 2) multiply_rows<2>(a, a_stride, b, b_stride, depth, width, c, c_stride, accumulate);
  if (rows - r == 1) multiply_rows<1>(a, a_stride, b, b_stride, depth, width, c, c_stride, accumulate);
}

// ---- softmax

// Whether any query may see any of the slots [start, start + count).
bool is_visible(const Task& task, int64_t start, int64_t count) {
  const int64_t oldest_query = task.length - task.query_length;
  if (task.window > 0 && start + count - 1 <= oldest_query - task.window) return false;
  if (task.bias == nullptr) return true;
  const int rows = task.bias_row_stride == 0 ? 1 : task.queries;
  for (int r = 0; r < rows; ++r) {
    const float* bias = task.bias + r * task.bias_row_stride + start;
    for (int64_t t = 0; t < count; ++t) {
      if (bias[t] != -kInfinity) return true;
    }
  }
  return false;
}

// Turns the products of one row into logits; returns whether any slot of the block is hidden from it.
bool adjust(const Task& task, int row, int64_t start, int64_t count, float* scores) {
  if (task.softcap > 0.0f) {
    for (int t = 0; t < kBlockTokens; t += kLanes) {
      store(scores + t, hyperbolic_tangent(load<Floats>(scores + t) / task.softcap) * task.softcap);
    }
  }
  if (task.alibi != nullptr) {
    const float slope = task.alibi[row / task.query_length];
    const float first = static_cast<float>(start - task.length + 1);
    for (int t = 0; t < kBlockTokens; ++t) scores[t] += slope * (first + static_cast<float>(t));
  }
  bool is_hidden = false;
  if (task.bias != nullptr) {
    const float* bias = task.bias + row * task.bias_row_stride + start;
    for (int64_t t = 0; t < count; ++t) {
      is_hidden |= bias[t] == -kInfinity;
      scores[t] = bias[t] == -kInfinity ? -kInfinity : scores[t] + bias[t];
    }
  }
  const int64_t query_slot = task.length - task.query_length + row % task.query_length;
  const int64_t low = task.window > 0 ? smaller(larger(query_slot - task.window + 1 - start, 0), count) : 0;
  const int64_t high = larger(task.is_causal != 0 ? smaller(count, query_slot + 1 - start) : count, 0);
  for (int64_t t = 0; t < low; ++t) scores[t] = -kInfinity;
  for (int64_t t = high; t < kBlockTokens; ++t) scores[t] = -kInfinity;
  return is_hidden || low > 0 || high < count;
}

// Replaces the logits of one row by weights, and brings its sum and output to the new maximum.
void soften(const Task& task, int row, int width, float* scores, float* output) {
  Floats best = load<Floats>(scores);
  for (int t = kLanes; t < kBlockTokens; t += kLanes) {
    const Floats v = load<Floats>(scores + t);
    best = v > best ? v : best;
  }
  const float before = task.maximum[row];
  float now = before;
  for (int l = 0; l < kLanes; ++l) now = best[l] > now ? best[l] : now;
  if (now == -kInfinity) {
    std::memset(scores, 0, kBlockTokens * sizeof(float));
    return;
  }
  Floats total = Floats{};
  for (int t = 0; t < kBlockTokens; t += kLanes) {
    const Floats weight = exponential(load<Floats>(scores + t) - now);
    store(scores + t, weight);
    total += weight;
  }
  float sum = 0.0f;
  for (int l = 0; l < kLanes; ++l) sum += total[l];
  if (now != before) {
    const float decay = exponential(splat(before - now))[0];
    task.sum[row] *= decay;
    for (int d = 0; d < width; d += kLanes) store(output + d, load<Floats>(output + d) * decay);
    task.maximum[row] = now;
  }
  task.sum[row] += sum;
}

// Takes values that are not finite out of the tile of a partly hidden block, and adds them where they are seen.
void separate_non_finite(const Task& task, int64_t count, Workspace& ws) {
  const int width = task.value.head_dim;
  for (int64_t t = 0; t < count; ++t) {
    float* values = ws.tile + t * task.value.padded_dim;
    Floats checks = Floats{};
    int d = 0;
    for (; d + kLanes <= width; d += kLanes) checks += load<Floats>(values + d) * 0.0f;
    float check = 0.0f;
    for (; d < width; ++d) check += values[d] * 0.0f;
    for (int l = 0; l < kLanes; ++l) check += checks[l];
    if (check == 0.0f) continue;
    for (int r = 0; r < task.queries; ++r) {
      const float weight = ws.scores[r * kBlockTokens + t];
      if (weight == 0.0f) continue;
      for (d = 0; d < width; ++d) ws.output[r * kMaxHeadDim + d] += weight * values[d];
    }
    std::memset(values, 0, width * sizeof(float));
  }
}

void run(const Task& task) {
  Workspace ws;
  ws.phase = -1;
  const int queries = task.queries;
  const int key_dim = task.key.head_dim, value_dim = task.value.head_dim, value_width = task.value.padded_dim;
  const Decoder decode_key = choose_decoder(task.key, true), decode_value = choose_decoder(task.value, false);
  std::memset(ws.tile, 0, sizeof(float) * kBlockTokens * larger(key_dim, value_width));
  for (int r = 0; r < queries; ++r) {
    task.maximum[r] = -kInfinity;
    task.sum[r] = 0.0f;
    std::memset(ws.output + r * kMaxHeadDim, 0, value_width * sizeof(float));
  }
  for (int64_t start = task.begin; start < task.end; start += kBlockTokens) {
    const int64_t count = smaller(kBlockTokens, task.end - start);
    if (!is_visible(task, start, count)) continue;
    load_block(task.key, true, decode_key, start, count, ws);
    multiply(task.query, key_dim, ws.tile, kBlockTokens, queries, key_dim, kBlockTokens, ws.scores, kBlockTokens, false);
    bool is_hidden = false;
    for (int r = 0; r < queries; ++r) {
      float* scores = ws.scores + r * kBlockTokens;
      is_hidden |= adjust(task, r, start, count, scores);
      soften(task, r, value_width, scores, ws.output + r * kMaxHeadDim);
    }
    load_block(task.value, false, decode_value, start, count, ws);
    if (is_hidden) separate_non_finite(task, count, ws);
    multiply(ws.scores, kBlockTokens, ws.tile, value_width, queries, count, value_width, ws.output, kMaxHeadDim, true);
  }
  for (int r = 0; r < queries; ++r) {
    std::memcpy(task.output + static_cast<int64_t>(r) * value_dim, ws.output + r * kMaxHeadDim,
                value_dim * sizeof(float));
  }
}

}  // namespace
}  // namespace kvcache
