// Keys turned back before they are encoded, to the last bit as `Rotary.turn` in kvcache_plugins/models/rotary.py does.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/addcmul.h>
#include <ATen/ops/from_blob.h>

#include <cmath>

#include "encode_unit.h"

namespace kvcache {
namespace {

// Cosines and sines `[period][pairs]`: a key of slot t is rotated back by row t % period.
struct Rotation {
  const float *cos = nullptr, *sin = nullptr;
  int64_t period = 0, pairs = 0;
};

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
  const auto as_tensor = [](float* numbers) { return at::from_blob(numbers, {count}, at::kFloat); };
  const at::Tensor sum = at::addcmul(as_tensor(c), as_tensor(a), as_tensor(b));
  int fused = 0, separate = 0;
  for (int i = 0; i < count; ++i) {
    const float given = sum.const_data_ptr<float>()[i];
    fused += given == std::fma(a[i], b[i], c[i]);
    separate += given == multiply_add_separately(a[i], b[i], c[i]);
  }
  if ((fused == count) == (separate == count)) return nullptr;
  return fused == count ? rotate_back_fused : rotate_back_separately;
}

RotateBack find_rotate_back() {
  static const RotateBack chosen = choose_rotate_back();
  return chosen;
}

}  // namespace
}  // namespace kvcache
