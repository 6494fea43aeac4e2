// Random inputs for sanitize.cpp, in buffers that are exactly as large as they may be.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <memory>
#include <random>
#include <vector>

#include "decode_attention.h"

namespace {

std::mt19937 generator(7);

int64_t draw(int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(generator);
}

template <typename T>
T pick(std::initializer_list<T> choices) {
  return choices.begin()[draw(0, static_cast<int64_t>(choices.size()) - 1)];
}

float real() { return std::uniform_real_distribution<float>(-1.0f, 1.0f)(generator); }

// Buffers of exactly the size asked for: a vector may own more.
struct Arena {
  std::vector<std::unique_ptr<char[]>> buffers;

  char* bytes(int64_t count) {
    buffers.emplace_back(new char[count]);
    char* data = buffers.back().get();
    for (int64_t i = 0; i < count; i += 4) {
      const uint32_t word = static_cast<uint32_t>(generator());
      std::memcpy(data + i, &word, std::min<int64_t>(4, count - i));
    }
    return data;
  }

  float* floats(int64_t count) {
    float* data = reinterpret_cast<float*>(bytes(count * 4));
    for (int64_t i = 0; i < count; ++i) data[i] = real();
    return data;
  }

  const void* exact(int64_t count, int32_t dtype) {
    if (dtype == kvcache::kFloat32) return floats(count);
    uint16_t* data = reinterpret_cast<uint16_t*>(bytes(count * 2));
    for (int64_t i = 0; i < count; ++i) {
      const float value = real();
      uint32_t bits;
      std::memcpy(&bits, &value, 4);
      data[i] = dtype == kvcache::kBFloat16 ? bits >> 16 : (bits >> 16 & 0x8000) | draw(0x2000, 0x3c00);
    }
    return data;
  }
};

}  // namespace
