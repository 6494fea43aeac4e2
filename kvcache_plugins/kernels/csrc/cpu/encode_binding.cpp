// Encoding tokens into records: statistics, codes and metadata of one pass, written in place.
//
// The arithmetic is that of kvcache_plugins/quantizers (affine.py, float8.py) and of Rotary.turn in models/rotary.py,
// operation by operation in fp32, so the bytes are the same to the last bit. What is rare there, numbers that are not
// finite or metadata beyond fp16, is not done here: the op looks first, writes nothing, and says so. One unit of work
// is a block (or a group of tokens that spans two) of one row and head, so that no two threads write to one record.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/addcmul.h>
#include <ATen/ops/from_blob.h>
#include <c10/util/Half.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <vector>

#include "decode_attention.h"

namespace kvcache {
namespace {

constexpr float kLargestHalf = 65504.0f;
constexpr float kSmallestScale = 5.9604644775390625e-8f;  // 2^-24

// The integers of the op, in the order of `encode_tokens` in ops.py.
struct Layout {
  int64_t nbits, format, head_dim, group_tokens, width, metadata_bytes, interleaved;
  int64_t codes_offset, scale_offset, minimum_offset;
  int64_t padded_dim() const { return (head_dim + 15) / 16 * 16; }
};

// Cosines and sines `[period][pairs]`: a key of slot t is rotated back by row t % period.
struct Rotation {
  const float *cos = nullptr, *sin = nullptr;
  int64_t period = 0, pairs = 0;
};

// Nearest integer, ties to even, for |value| < 2^22; no library call, so that loops of it are vector code.
inline float nearest(float value) { return (value + 12582912.0f) - 12582912.0f; }

float round_to_half(float value) {
  return c10::detail::fp16_ieee_to_fp32_value(c10::detail::fp16_ieee_from_fp32_value(value));
}

float round_up_to_half(float value) {
  uint16_t half = c10::detail::fp16_ieee_from_fp32_value(value);
  if (c10::detail::fp16_ieee_to_fp32_value(half) < value) ++half;
  return c10::detail::fp16_ieee_to_fp32_value(half);
}

void store_metadata(uint8_t* at, int64_t bytes, float value) {
  if (bytes == 4) {
    std::memcpy(at, &value, 4);
  } else {
    const uint16_t half = c10::detail::fp16_ieee_from_fp32_value(value);  // exact: it has been rounded
    std::memcpy(at, &half, 2);
  }
}

// Nearest 8-bit float, ties to even; |value| is at most the largest number of the format.
uint8_t to_float8(float value, int mantissa_bits, int bias) {
  const uint8_t sign = std::signbit(value) ? 0x80 : 0;
  const float magnitude = std::fabs(value);
  const float smallest_normal = std::ldexp(1.0f, 1 - bias);
  if (magnitude < smallest_normal)  // subnormal; rounding up to the first normal number gives its code
    return sign | uint8_t(nearest(std::ldexp(magnitude, bias - 1 + mantissa_bits)));
  uint32_t bits;
  std::memcpy(&bits, &magnitude, 4);
  const int dropped = 23 - mantissa_bits;
  bits += (1u << (dropped - 1)) - 1 + (bits >> dropped & 1);
  return sign | uint8_t((bits >> dropped) - (uint32_t(127 - bias) << mantissa_bits));
}

// Writes the codes of one token: see packing.py for the orders.
template <int B>
void put_words(uint8_t* plane, const uint8_t* codes, int shift, const Layout& layout, bool is_key, int slot) {
  const int dim = int(layout.padded_dim()), channels = int(layout.head_dim);
  constexpr uint16_t mask = (1 << B) - 1;
  auto put = [plane](int word, int place, uint16_t code) {
    uint16_t value;
    std::memcpy(&value, plane + 2 * word, 2);
    value = uint16_t(value | code << (B * place));
    std::memcpy(plane + 2 * word, &value, 2);
  };
  if (is_key) {
    constexpr int per_word = 4 / B;
    const int half = dim / 2, lane = slot % 16, step = slot / 16;
    for (int c = 0; c < channels; ++c) {
      const int side = layout.interleaved ? c % 2 : c / half;
      const int pair = layout.interleaved ? c / 2 : c % half;
      put((pair / per_word * 16 + lane) * 2 + side, 4 * (pair % per_word) + step, codes[c] >> shift & mask);
    }
  } else {
    constexpr int per_word = 16 / B;
    const int chunks = dim / 16;
    for (int c = 0; c < channels; ++c) {
      const int chunk = slot / 2 * chunks + c / 16;
      put((chunk / per_word * 16 + c % 16) * 2 + slot % 2, chunk % per_word, codes[c] >> shift & mask);
    }
  }
}

void put_token(uint8_t* record, const uint8_t* codes, const Layout& layout, bool is_key, int slot) {
  uint8_t* at = record + layout.codes_offset;
  const int64_t dim = layout.padded_dim();
  switch (layout.nbits) {
    case 2:
      return put_words<2>(at, codes, 0, layout, is_key, slot);
    case 4:
      return put_words<4>(at, codes, 0, layout, is_key, slot);
    case 3:
      put_words<2>(at, codes, 0, layout, is_key, slot);
      return put_words<1>(at + kBlockTokens * dim / 4, codes, 2, layout, is_key, slot);
    default:
      for (int64_t c = 0; c < layout.head_dim; ++c) {
        const int64_t place = is_key ? c / 4 * 256 + slot * 4 + c % 4
                                     : slot / 4 * dim * 4 + c / 16 * 64 + c % 16 * 4 + slot % 4;
        at[place] = codes[c];
      }
  }
}

float largest_code(const Layout& layout) {
  return layout.format == kE4M3 ? 448.0f : layout.format == kE5M2 ? 57344.0f : 127.0f;
}

uint8_t encode(float value, float scale, float minimum, const Layout& layout) {
  if (layout.format == kAffine) {
    const float divisor = scale > 0 ? scale : std::numeric_limits<float>::infinity();
    const float code = nearest((value - minimum) / divisor), top = float((1 << layout.nbits) - 1);
    return uint8_t(code < 0.0f ? 0.0f : code > top ? top : code);
  }
  const float scaled = value / scale;
  if (layout.format == kSymmetric) {
    const float code = nearest(scaled);
    return uint8_t((code < -127.0f ? -127.0f : code > 127.0f ? 127.0f : code) + 128.0f);
  }
  const float limit = largest_code(layout);
  const float clamped = std::fmin(std::fmax(scaled, -limit), limit);
  return layout.format == kE4M3 ? to_float8(clamped, 3, 7) : to_float8(clamped, 2, 15);
}

void choose(float low, float high, const Layout& layout, float* scale, float* minimum) {
  if (layout.format == kAffine) {
    *scale = round_to_half((high - low) / float((1 << layout.nbits) - 1));
    *minimum = round_to_half(low);
  } else {
    *scale = std::fmax(round_up_to_half(std::fmax(high, -low) / largest_code(layout)), kSmallestScale);
    *minimum = 0.0f;
  }
}

void store_row(uint8_t* record, const Layout& layout, int64_t entry, float scale, float minimum) {
  store_metadata(record + layout.scale_offset + entry * layout.metadata_bytes, layout.metadata_bytes, scale);
  if (layout.minimum_offset >= 0)
    store_metadata(record + layout.minimum_offset + entry * layout.metadata_bytes, layout.metadata_bytes, minimum);
}

// `count` tokens `[count][head_dim]` from slot `start` on; `records` is the first record of the row and head.
void encode_unit(const float* states, int64_t start, int64_t count, uint8_t* records, int64_t record_bytes,
                 const Layout& layout, bool is_key) {
  const int64_t dim = layout.head_dim;
  uint8_t codes[kMaxHeadDim];
  if (layout.group_tokens == 1) {
    const int64_t group = dim / layout.width;
    for (int64_t t = 0; t < count; ++t) {
      const float* token = states + t * dim;
      const int64_t slot = (start + t) % kBlockTokens;
      uint8_t* record = records + (start + t) / kBlockTokens * record_bytes;
      for (int64_t g = 0; g < layout.width; ++g) {
        float low = token[g * group], high = low, scale, minimum;
        for (int64_t c = g * group + 1; c < (g + 1) * group; ++c) {
          low = token[c] < low ? token[c] : low;
          high = token[c] > high ? token[c] : high;
        }
        choose(low, high, layout, &scale, &minimum);
        for (int64_t c = g * group; c < (g + 1) * group; ++c) codes[c] = encode(token[c], scale, minimum, layout);
        store_row(record, layout, slot * layout.width + g, scale, minimum);
      }
      put_token(record, codes, layout, is_key, int(slot));
    }
    return;
  }
  // per channel: groups of tokens
  const int64_t rows = layout.group_tokens < kBlockTokens ? layout.group_tokens : kBlockTokens;
  float low[kMaxHeadDim], high[kMaxHeadDim], scale[kMaxHeadDim], minimum[kMaxHeadDim];
  for (int64_t first = 0; first < count; first += layout.group_tokens) {
    const float* group = states + first * dim;
    std::memcpy(low, group, sizeof(float) * dim);
    std::memcpy(high, group, sizeof(float) * dim);
    for (int64_t t = 1; t < layout.group_tokens; ++t) {
      for (int64_t c = 0; c < dim; ++c) {
        const float value = group[t * dim + c];
        low[c] = value < low[c] ? value : low[c];
        high[c] = value > high[c] ? value : high[c];
      }
    }
    for (int64_t c = 0; c < dim; ++c) choose(low[c], high[c], layout, scale + c, minimum + c);
    for (int64_t t = 0; t < layout.group_tokens; ++t) {
      const int64_t at = start + first + t, slot = at % kBlockTokens;
      uint8_t* record = records + at / kBlockTokens * record_bytes;
      for (int64_t c = 0; c < dim; ++c) codes[c] = encode(group[t * dim + c], scale[c], minimum[c], layout);
      put_token(record, codes, layout, is_key, int(slot));
      if (t % rows == 0)
        for (int64_t c = 0; c < dim; ++c) store_row(record, layout, slot / rows * dim + c, scale[c], minimum[c]);
    }
  }
}

// a * b + c, rounded twice whatever the compiler may contract: the product passes through memory.
inline float multiply_add_separately(float a, float b, float c) {
  float product = a * b;
  asm volatile("" : "+m"(product));
  return product + c;
}

// `count` tokens `[count][head_dim]` from slot `start` on, in place; as `Rotary.turn` in rotary.py with -sin.
template <class MultiplyAdd>
inline __attribute__((always_inline)) void rotate_back_by(float* tokens, int64_t start, int64_t count,
                                                          const Layout& layout, const Rotation& rotation,
                                                          MultiplyAdd multiply_add) {
  for (int64_t t = 0; t < count; ++t) {
    const int64_t row = (start + t) % rotation.period * rotation.pairs;
    const float *cos = rotation.cos + row, *sin = rotation.sin + row;
    float* token = tokens + t * layout.head_dim;
    auto turn = [&](int64_t i, float& first, float& second) __attribute__((always_inline)) {
      const float turned = multiply_add(second, sin[i], first * cos[i]);
      second = multiply_add(-first, sin[i], second * cos[i]);
      first = turned;
    };
    if (layout.interleaved) {
      for (int64_t i = 0; i < rotation.pairs; ++i) turn(i, token[2 * i], token[2 * i + 1]);
    } else {
      for (int64_t i = 0; i < rotation.pairs; ++i) turn(i, token[i], token[rotation.pairs + i]);
    }
  }
}

// Called where torch itself rounds once, hence where the processor can.
#if defined(__x86_64__)
__attribute__((target("fma")))
#endif
void rotate_back_fused(float* tokens, int64_t start, int64_t count, const Layout& layout, const Rotation& rotation) {
  rotate_back_by(tokens, start, count, layout, rotation, [](float a, float b, float c) { return std::fma(a, b, c); });
}

void rotate_back_separately(float* tokens, int64_t start, int64_t count, const Layout& layout,
                            const Rotation& rotation) {
  rotate_back_by(tokens, start, count, layout, rotation, multiply_add_separately);
}

using RotateBack = void (*)(float*, int64_t, int64_t, const Layout&, const Rotation&);

// The one that rounds as torch's `addcmul` does, by which the codec rotates; none if neither does. That depends on the
// build of torch and on the processor, so torch is asked, with numbers enough for vectors and a remainder.
RotateBack choose_rotate_back() {
  constexpr int count = 101;
  float a[count], b[count], c[count];
  for (int i = 0; i < count; ++i) {
    a[i] = 1.0f / float(i + 3);
    b[i] = 1.0f / float(i + 7);
    c[i] = 1.0f / float(i + 11);
  }
  const at::Tensor sum = at::addcmul(at::from_blob(c, {count}), at::from_blob(a, {count}), at::from_blob(b, {count}));
  int fused = 0, separate = 0;
  for (int i = 0; i < count; ++i) {
    const float given = sum.const_data_ptr<float>()[i];
    fused += given == std::fma(a[i], b[i], c[i]);
    separate += given == multiply_add_separately(a[i], b[i], c[i]);
  }
  if ((fused == count) == (separate == count)) return nullptr;
  return fused == count ? rotate_back_fused : rotate_back_separately;
}

void load_tokens(const at::Tensor& states, int64_t row, int64_t head, int64_t first, int64_t count, float* out) {
  const int64_t dim = states.size(3);
  for (int64_t t = 0; t < count; ++t) {
    const int64_t at = row * states.stride(0) + head * states.stride(1) + (first + t) * states.stride(2);
    if (states.scalar_type() == at::kFloat) {
      std::memcpy(out + t * dim, states.const_data_ptr<float>() + at, sizeof(float) * dim);
    } else if (states.scalar_type() == at::kBFloat16) {
      const at::BFloat16* data = states.const_data_ptr<at::BFloat16>() + at;
      for (int64_t c = 0; c < dim; ++c) out[t * dim + c] = float(data[c]);
    } else {
      const at::Half* data = states.const_data_ptr<at::Half>() + at;
      for (int64_t c = 0; c < dim; ++c) out[t * dim + c] = float(data[c]);
    }
  }
}

Rotation check_rotation(const std::optional<at::Tensor>& cos, const std::optional<at::Tensor>& sin, int64_t dim) {
  TORCH_CHECK_VALUE(cos.has_value() == sin.has_value(), "Invalid rotation: cos and sin come together or not at all.");
  if (!cos.has_value()) return {};
  for (const at::Tensor& table : {*cos, *sin})
    TORCH_CHECK_VALUE(table.device().is_cpu() && table.scalar_type() == at::kFloat && table.dim() == 2 &&
                          table.is_contiguous() && table.sizes() == cos->sizes() && table.size(0) > 0 &&
                          2 * table.size(1) <= dim,
                      "Invalid rotation: expected two contiguous float32 CPU tensors (period, up to ", dim / 2,
                      "), got ", cos->toString(), " ", cos->sizes(), " and ", sin->toString(), " ", sin->sizes(), ".");
  return {cos->const_data_ptr<float>(), sin->const_data_ptr<float>(), cos->size(0), cos->size(1)};
}

bool encode_tokens(at::Tensor records, const at::Tensor& states, bool is_key, at::IntArrayRef integers, int64_t start,
                   const std::optional<at::Tensor>& cos, const std::optional<at::Tensor>& sin) {
  TORCH_CHECK_VALUE(integers.size() == 10, "Invalid layout: expected 10 integers, got ", integers.size(), ".");
  const Layout layout{integers[0], integers[1], integers[2], integers[3], integers[4],
                      integers[5], integers[6], integers[7], integers[8], integers[9]};
  const int64_t batch = states.size(0), heads = states.size(1), count = states.size(2), dim = states.size(3);
  const int64_t unit = layout.group_tokens > kBlockTokens ? layout.group_tokens : kBlockTokens;
  TORCH_CHECK_VALUE(records.dim() == 4 && records.size(0) == batch && records.size(1) == heads &&
                        records.is_contiguous() && (start + count + kBlockTokens - 1) / kBlockTokens <= records.size(2),
                    "Invalid records: expected contiguous (", batch, ", ", heads, ", N, bytes) with room for ",
                    start + count, " tokens, got ", records.sizes(), ".");
  TORCH_CHECK_VALUE(dim == layout.head_dim && dim <= kMaxHeadDim && states.stride(3) == 1 &&
                        start % layout.group_tokens == 0 && count % layout.group_tokens == 0,
                    "Invalid states: expected whole groups of ", layout.group_tokens, " tokens of ", layout.head_dim,
                    " contiguous channels, got ", states.sizes(), " from slot ", start, ".");
  const Rotation rotation = check_rotation(cos, sin, dim);
  RotateBack rotate_back = nullptr;
  if (rotation.period > 0) {
    static const RotateBack chosen = choose_rotate_back();
    if (chosen == nullptr) return false;
    rotate_back = chosen;
  }
  // A rotation adds at most a factor of sqrt(2).
  const float limit = rotate_back == nullptr ? kLargestHalf : kLargestHalf / 1.5f;
  if (states.scalar_type() != at::kFloat && states.scalar_type() != at::kBFloat16 &&
      states.scalar_type() != at::kHalf)
    return false;
  const int64_t first_unit = start / unit, units = (start + count + unit - 1) / unit - first_unit;
  const int64_t tasks = batch * heads * units;
  const int64_t grain = std::max<int64_t>(1, (1 << 14) / (std::min(count, unit) * dim));
  std::atomic<bool> is_plain{true};
  auto for_units = [&](auto visit) {
    at::parallel_for(0, tasks, grain, [&](int64_t begin, int64_t end) {
      std::vector<float> tokens(size_t(std::min(unit, count) * dim));
      for (int64_t task = begin; task < end && is_plain.load(std::memory_order_relaxed); ++task) {
        const int64_t row = task / units / heads, head = task / units % heads;
        const int64_t low = std::max(start, (first_unit + task % units) * unit);
        const int64_t high = std::min(start + count, (first_unit + task % units + 1) * unit);
        load_tokens(states, row, head, low - start, high - low, tokens.data());
        visit(row, head, low, high - low, tokens.data());
      }
    });
  };
  for_units([&](int64_t, int64_t, int64_t, int64_t length, const float* tokens) {
    bool plain = true;
    for (int64_t i = 0; i < length * dim; ++i) plain &= std::fabs(tokens[i]) < limit;  // false for NaN
    if (!plain) is_plain.store(false, std::memory_order_relaxed);
  });
  if (!is_plain.load()) return false;
  for_units([&](int64_t row, int64_t head, int64_t low, int64_t length, float* tokens) {
    if (rotate_back != nullptr) rotate_back(tokens, low, length, layout, rotation);
    uint8_t* first = records.mutable_data_ptr<uint8_t>() + row * records.stride(0) + head * records.stride(1);
    encode_unit(tokens, low, length, first, records.size(3), layout, is_key);
  });
  return true;
}

}  // namespace
}  // namespace kvcache

TORCH_LIBRARY_IMPL(kvcache_plugins, CPU, library) { library.impl("encode_tokens", TORCH_FN(kvcache::encode_tokens)); }
