// From a record, sinks and exact segments to 64 tokens in fp32 (decode_attention_portable.inl, decode_tokens.inl,
// attend_latents.inl).
//
// The order of the codes is drawn in kvcache_plugins/quantizers/packing.py; a 32-bit word holds the codes of
// one lane, so that a vector of words, shifted and masked, is a vector of neighbouring tokens (keys) or
// channels (values). Bound: a load, a shift, a mask, a conversion, a multiply-add and a store per vector.
#pragma once

#include <memory>

#include "portable_numbers.inl"
#include "portable_transposition.inl"

namespace kvcache {
namespace {  // see portable_numbers.inl

constexpr int kTables = kMaxHeadDim / 2 * kBlockTokens;

// Cosines and sines of a block: [pair][token]. Of positions, these are distances from the first token's, whose own come
// beside them with the turn from a block to the next: (cos, sin) of every pair.
struct RotationTables {
  alignas(64) float cos[kTables], sin[kTables];
  double first[kMaxHeadDim / 2][2], step[kMaxHeadDim / 2][2];
};

// A decoded block, and what decoding it takes: 164 KB, and 2 KB a lane.
struct Workspace {
  alignas(64) float tile[kMaxHeadDim * kBlockTokens];  // keys [channel][token], or values [token][channel]
  alignas(64) float scale[kMaxMetadata], minimum[kMaxMetadata];
  alignas(64) float row_scale[kMaxHeadDim], row_minimum[kMaxHeadDim];
  alignas(64) float rows[kLanes][kMaxHeadDim];  // tokens as they lie
  std::unique_ptr<RotationTables> rotation;
  int64_t phase = -1;  // of the rotation the tables are for, or the slot; -1: none yet
};

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

inline int64_t high_plane(const Side& side) {
  return static_cast<int64_t>(kBlockTokens) * side.padded_dim / 4;
}

// What non-uniform codes stand for, of up to 4 bits.
class Levels {
 public:
  explicit Levels(const Side& side) {
    for (int code = 0; side.format == kNonUniform && code < 1 << side.nbits; ++code) levels_[code] = side.levels[code];
  }

  Floats of(Words codes) const {
#if defined(KVCACHE_LANES) && KVCACHE_LANES == 8
    const __m256i places = (__m256i)codes;
    const __m256 low = _mm256_permutevar8x32_ps(_mm256_load_ps(levels_), places);
    const __m256 high = _mm256_permutevar8x32_ps(_mm256_load_ps(levels_ + 8), places);
    return (Floats)_mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(places, 28)));
#elif defined(KVCACHE_LANES) && KVCACHE_LANES == 16
    return (Floats)_mm512_permutexvar_ps((__m512i)codes, _mm512_load_ps(levels_));
#else
    Floats found;
    for (int l = 0; l < kLanes; ++l) found[l] = levels_[codes[l]];
    return found;
#endif
  }

 private:
  alignas(64) float levels_[16] = {};
};

template <int kFormat>
inline __attribute__((always_inline)) Floats code_values(Words codes, const Levels& levels) {
  return kFormat == kNonUniform ? levels.of(codes) : code_values<kFormat>(codes);
}

// Decodes the keys of a record to tile[channel][token]. `kByChunk`: 16 neighbouring tokens share their
// metadata.
template <int kBits, int kFormat, bool kByChunk>
void decode_key_channels(const Side& side, const uint8_t* record, Workspace& ws) {
  using P = Planes<kBits>;
  constexpr int kParts = kBits == 8 ? 1 : 4 / P::kLow;
  const uint8_t* codes = record + side.codes_offset;
  const int half = side.padded_dim / 2;
  const int group = side.head_dim / side.width;
  const bool is_of_channel = side.channel_scale != nullptr, is_static = is_of_channel || side.scale_offset < 0;
  const bool has_minimum = !is_of_channel && side.minimum_offset >= 0;
  const bool is_interleaved = side.interleaved != 0;
  const Levels levels(side);
  load_metadata(side, record, ws);
  int rows[4];
  for (int k = 0; k < 4; ++k) rows[k] = is_static ? 0 : 16 * k / side.group_tokens * side.width;
  alignas(64) float scales[kBlockTokens];
  alignas(64) float minima[kBlockTokens];
  int column = -1;
  int next = 0;  // first channel of the next group
  for (int d = 0; d < side.head_dim; ++d) {
    if (d == next) {
      ++column;
      next += group;
      for (int t = 0; !kByChunk && t < kBlockTokens; ++t) {
        const int entry = t / side.group_tokens * side.width + column;
        scales[t] = ws.scale[entry];
        minima[t] = has_minimum ? ws.minimum[entry] : 0.0f;
      }
    }
    const bool is_upper = !is_interleaved && d >= half;
    const int pair = is_interleaved ? d / 2 : d - (is_upper ? half : 0);
    const int upper = is_interleaved ? d % 2 : is_upper;
    const uint8_t* lanes = codes + (kBits == 8 ? d / 4 * 256 : pair / kParts * 64);
    const uint8_t* lanes_high = codes + high_plane(side) + pair / 4 * 64;
    const int shift = kBits == 8 ? 8 * (d % 4) : 16 * upper + P::kLow * 4 * (pair % kParts);
    const int shift_high = 16 * upper + 4 * (pair % 4);
    const float fixed_scale = is_of_channel ? side.channel_scale[d] : side.static_scale;
    const float fixed_minimum = is_of_channel ? side.channel_offset[d] : 0.0f;
    float* out = ws.tile + d * kBlockTokens;
    for (int k = 0; k < 4; ++k) {
      Floats scale = splat(is_static ? fixed_scale : ws.scale[rows[k] + column]);
      Floats minimum = splat(kByChunk && has_minimum ? ws.minimum[rows[k] + column] : fixed_minimum);
#pragma GCC unroll 4
      for (int t = 0; t < 16; t += kLanes) {
        Words words;
        if (kBits == 8) {
          words = load<Words>(lanes + 4 * (16 * k + t)) >> shift & 255u;
        } else {
          words = load<Words>(lanes + 4 * t) >> (shift + P::kLow * k) & P::kMask;
          if (kBits == 3) words |= (load<Words>(lanes_high + 4 * t) >> (shift_high + k) & 1u) << 2;
        }
        if (!kByChunk) {
          scale = load<Floats>(scales + 16 * k + t);
          minimum = load<Floats>(minima + 16 * k + t);
        }
        store(out + 16 * k + t, code_values<kFormat>(words, levels) * scale + minimum);
      }
    }
    if (side.factors != nullptr) {
      const float factor = side.factors[d];
      for (int t = 0; t < kBlockTokens; t += kLanes) store(out + t, load<Floats>(out + t) * factor);
    }
  }
}

template <int kBits, int kFormat>
void decode_keys(const Side& side, const uint8_t* record, Workspace& ws) {
  if (side.scale_offset < 0 || side.group_tokens % 16 == 0) {
    decode_key_channels<kBits, kFormat, true>(side, record, ws);
  } else {
    decode_key_channels<kBits, kFormat, false>(side, record, ws);
  }
}

// Decodes the values of a record to tile[token][channel], rows of `padded_dim`. `kByChunk`: 16 channels share
// theirs.
template <int kBits, int kFormat, bool kByChunk>
void decode_value_tokens(const Side& side, const uint8_t* record, Workspace& ws) {
  using P = Planes<kBits>;
  constexpr int kPerWord = 16 / P::kLow;
  const uint8_t* codes = record + side.codes_offset;
  const int chunks = side.padded_dim / 16;
  const int group = side.head_dim / side.width;
  const bool is_static = side.scale_offset < 0;
  const bool has_minimum = side.minimum_offset >= 0;
  const Levels levels(side);
  load_metadata(side, record, ws);
  int columns[kMaxHeadDim / 16];
  for (int u = 0; u < chunks; ++u) columns[u] = is_static ? 0 : 16 * u / group;
  if (is_static) ws.scale[0] = side.static_scale;
  int expanded = -1;
  for (int t = 0; t < kBlockTokens; ++t) {
    const int row = is_static ? 0 : t / side.group_tokens;
    const float* row_scale = ws.scale + row * side.width;
    const float* row_minimum = ws.minimum + row * side.width;
    if (!kByChunk && row != expanded) {
      expanded = row;
      for (int d = 0; d < side.padded_dim; ++d) {
        const int entry = d < side.head_dim ? d / group : side.width - 1;
        ws.row_scale[d] = row_scale[entry];
        ws.row_minimum[d] = has_minimum ? row_minimum[entry] : 0.0f;
      }
    }
    float* out = ws.tile + t * side.padded_dim;
    for (int u = 0; u < chunks; ++u) {
      const int chunk = t / 2 * chunks + u;  // of 16 channels of a pair of tokens
      const uint8_t* lanes = codes + (kBits == 8 ? (t / 4 * chunks + u) * 64 : chunk / kPerWord * 64);
      const int shift = kBits == 8 ? 8 * (t % 4) : 16 * (t % 2) + P::kLow * (chunk % kPerWord);
      const uint8_t* lanes_high = codes + high_plane(side) + chunk / 16 * 64;
      const int shift_high = 16 * (t % 2) + chunk % 16;
      Floats scale = splat(row_scale[columns[u]]);
      Floats minimum = splat(has_minimum ? row_minimum[columns[u]] : 0.0f);
#pragma GCC unroll 4
      for (int c = 0; c < 16; c += kLanes) {
        Words words = load<Words>(lanes + 4 * c) >> shift & (kBits == 8 ? 255u : P::kMask);
        if (kBits == 3) words |= (load<Words>(lanes_high + 4 * c) >> shift_high & 1u) << 2;
        if (!kByChunk) {
          scale = load<Floats>(ws.row_scale + 16 * u + c);
          minimum = load<Floats>(ws.row_minimum + 16 * u + c);
        }
        store(out + 16 * u + c, code_values<kFormat>(words, levels) * scale + minimum);
      }
    }
    if (side.factors != nullptr) {
      for (int d = 0; d < side.head_dim; ++d) out[d] *= side.factors[d];
    }
  }
}

template <int kBits, int kFormat>
void decode_values(const Side& side, const uint8_t* record, Workspace& ws) {
  if (side.scale_offset < 0 || side.width == 1 || side.head_dim / side.width % 16 == 0) {
    decode_value_tokens<kBits, kFormat, true>(side, record, ws);
  } else {
    decode_value_tokens<kBits, kFormat, false>(side, record, ws);
  }
}

using Decoder = void (*)(const Side&, const uint8_t*, Workspace&);

template <int kFormat>
Decoder choose_narrow_decoder(int nbits, bool is_key) {
  if (nbits == 2) return is_key ? decode_keys<2, kFormat> : decode_values<2, kFormat>;
  if (nbits == 3) return is_key ? decode_keys<3, kFormat> : decode_values<3, kFormat>;
  return is_key ? decode_keys<4, kFormat> : decode_values<4, kFormat>;
}

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
    case kNonUniform:
      return choose_narrow_decoder<kNonUniform>(side.nbits, is_key);
  }
  return side.nbits == 8 ? choose_wide_decoder<kAffine>(is_key) : choose_narrow_decoder<kAffine>(side.nbits, is_key);
}

// Adds to the decoded block what its codes lack.
void add_outliers(const Side& side, bool is_key, int64_t start, Workspace& ws) {
  const OutlierList list = outliers_of(side, start);
  for (const int32_t* entry = list.begin; entry < list.end; ++entry) {
    const int token = outlier_token(*entry), channel = outlier_channel(*entry);
    const uint16_t half = static_cast<uint16_t>(*entry);
    float residual;
    widen_row(&half, kFloat16, 0, 1, &residual);
    ws.tile[is_key ? channel * kBlockTokens + token : token * side.padded_dim + channel] += residual;
  }
}

// Turns (cos, sin) by another angle.
inline void turn(double (&angle)[2], const double (&by)[2]) {
  const double c = angle[0] * by[0] - angle[1] * by[1];
  angle[1] = angle[0] * by[1] + angle[1] * by[0];
  angle[0] = c;
}

// Rotates decoded keys of the block at slot `start` by their positions: by that of the first token, which advances in
// double precision, and by the distances of the others from it, which are the same in every block.
void rotate_positions(const Side& side, int64_t start, Workspace& ws) {
  const int pairs = side.rotary_dim / 2;
  if (ws.rotation == nullptr) {
    ws.rotation.reset(new RotationTables);
    for (int i = 0; i < pairs; ++i) {
      const double one[2] = {__builtin_cos(side.inv_freq[i]), __builtin_sin(side.inv_freq[i])};
      double (&distance)[2] = ws.rotation->step[i];
      distance[0] = 1.0;
      distance[1] = 0.0;
      for (int t = 0; t < kBlockTokens; ++t) {
        ws.rotation->cos[i * kBlockTokens + t] = static_cast<float>(distance[0]);
        ws.rotation->sin[i * kBlockTokens + t] = static_cast<float>(distance[1]);
        turn(distance, one);
      }
    }
  }
  RotationTables& tables = *ws.rotation;
  const double position = static_cast<double>(start + side.position);
  for (int i = 0; i < pairs; ++i) {
    if (start != ws.phase) {
      tables.first[i][0] = __builtin_cos(position * side.inv_freq[i]);
      tables.first[i][1] = __builtin_sin(position * side.inv_freq[i]);
    }
    const float first_cos = static_cast<float>(tables.first[i][0]), first_sin = static_cast<float>(tables.first[i][1]);
    turn(tables.first[i], tables.step[i]);
    float* low = ws.tile + (side.interleaved ? 2 * i : i) * kBlockTokens;
    float* high = ws.tile + (side.interleaved ? 2 * i + 1 : i + pairs) * kBlockTokens;
    for (int t = 0; t < kBlockTokens; t += kLanes) {
      const Floats near_cos = load<Floats>(tables.cos + i * kBlockTokens + t);
      const Floats near_sin = load<Floats>(tables.sin + i * kBlockTokens + t);
      const Floats c = near_cos * first_cos - near_sin * first_sin, s = near_sin * first_cos + near_cos * first_sin;
      const Floats a = load<Floats>(low + t), b = load<Floats>(high + t);
      store(low + t, a * c - b * s);
      store(high + t, b * c + a * s);
    }
  }
  ws.phase = start + kBlockTokens;
}

// Rotates decoded keys of the block at slot `start`: token t by the angles of t % period.
void rotate(const Side& side, int64_t start, Workspace& ws) {
  const int pairs = side.rotary_dim / 2;
  const int64_t phase = start % side.period;
  if (ws.rotation == nullptr) ws.rotation.reset(new RotationTables);
  RotationTables& tables = *ws.rotation;
  if (phase != ws.phase) {
    ws.phase = phase;
    for (int t = 0; t < kBlockTokens; ++t) {
      const int64_t row = (start + t) % side.period * pairs;
      for (int i = 0; i < pairs; ++i) {
        tables.cos[i * kBlockTokens + t] = side.cos[row + i];
        tables.sin[i * kBlockTokens + t] = side.sin[row + i];
      }
    }
  }
  for (int i = 0; i < pairs; ++i) {
    float* first = ws.tile + (side.interleaved ? 2 * i : i) * kBlockTokens;
    float* second = ws.tile + (side.interleaved ? 2 * i + 1 : i + pairs) * kBlockTokens;
    for (int t = 0; t < kBlockTokens; t += kLanes) {
      const Floats a = load<Floats>(first + t), b = load<Floats>(second + t);
      const Floats c = load<Floats>(tables.cos + i * kBlockTokens + t);
      const Floats s = load<Floats>(tables.sin + i * kBlockTokens + t);
      store(first + t, a * c - b * s);
      store(second + t, b * c + a * s);
    }
  }
}

// Copies exact tokens [first, first + count) of the block at slot `start` into the tile; `offset` is that of
// the first. Keys are turned over, as many at a time as a vector has lanes.
void copy_exact(const Side& side, bool is_key, const void* data, int64_t offset, int64_t stride,
                int64_t first, int64_t count, Workspace& ws) {
  for (int64_t i = 0; i < count && !is_key; ++i)
    widen_row(data, side.dtype, offset + i * stride, side.head_dim, ws.tile + (first + i) * side.padded_dim);
  for (int64_t i = 0; i < count && is_key; i += kLanes) {
    const int64_t tokens = smaller(kLanes, count - i);
    for (int64_t n = 0; n < tokens; ++n)
      widen_row(data, side.dtype, offset + (i + n) * stride, side.head_dim, ws.rows[n]);
    float* const out = ws.tile + first + i;
    for (int d = 0; d < side.head_dim && tokens == kLanes; d += kLanes)
      transpose_square(ws.rows[0] + d, kMaxHeadDim, out + d * kBlockTokens, kBlockTokens);
    for (int d = 0; d < side.head_dim && tokens < kLanes; ++d)
      for (int64_t n = 0; n < tokens; ++n) out[d * kBlockTokens + n] = ws.rows[n][d];
  }
}

// Brings slots [start, start + count) of one side into the tile.
void load_block(const Side& side, bool is_key, Decoder decode, int64_t start, int64_t count, Workspace& ws) {
  const int64_t packed = smaller(kBlockTokens, side.packed_length - start);
  if (packed > 0) {
    const uint8_t* record = side.records + start / kBlockTokens * side.record_bytes;
    decode(side, record, ws);
    if (side.outliers != nullptr) add_outliers(side, is_key, start, ws);
    if (side.inv_freq != nullptr) rotate_positions(side, start, ws);
    if (side.cos != nullptr) rotate(side, start, ws);
    if (side.sinks != nullptr) {
      const int64_t low = larger(side.sink_start, start);
      const int64_t high = smaller(side.sink_start + side.sink_length, start + packed);
      copy_exact(side, is_key, side.sinks, (low - side.sink_start) * side.head_dim, side.head_dim,
                 low - start, high - low, ws);
    }
  }
  for (int i = 0; i < side.num_segments; ++i) {
    const Segment& segment = side.segments[i];
    const int64_t low = larger(segment.start, start);
    const int64_t high = smaller(segment.start + segment.length, start + count);
    copy_exact(side, is_key, segment.data, (low - segment.start) * segment.stride, segment.stride,
               low - start, high - low, ws);
  }
}

}  // namespace
}  // namespace kvcache
