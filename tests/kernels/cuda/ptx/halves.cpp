#include "halves.h"

#include <array>
#include <cmath>
#include <limits>

#include "machine.h"

namespace ptx {
namespace {

double computed_value(uint16_t bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  double x = exponent == 0 ? std::ldexp(fraction, -24) : std::ldexp(1024 + fraction, exponent - 25);
  if (exponent == 31) x = fraction != 0 ? std::nan("") : std::numeric_limits<double>::infinity();
  return bits >> 15 ? -x : x;
}

uint16_t sum(uint16_t a, uint16_t b) { return nearest_half(half_value(a) + half_value(b)); }
uint16_t product(uint16_t a, uint16_t b) { return nearest_half(half_value(a) * half_value(b)); }

uint16_t product_and_sum(uint16_t a, uint16_t b, uint16_t c) {
  const double product = half_value(a) * half_value(b), addend = half_value(c), sum = product + addend;
  if (!std::isfinite(sum)) return nearest_half(sum);
  // What the sum has lost must not make a tie: rounded to odd, it is rounded to a half as if it were exact.
  const double part = sum - product, lost = (product - (sum - part)) + (addend - part);
  auto bits = std::bit_cast<uint64_t>(sum);
  if (lost != 0 && bits % 2 == 0) bits += (lost > 0) == (sum > 0) ? 1 : -1;
  return nearest_half(std::bit_cast<double>(bits));
}

template <auto kBody>
constexpr auto both = [](uint32_t a, auto... others) {
  const auto high = [](uint32_t x) { return static_cast<uint16_t>(x >> 16); };
  return kBody(static_cast<uint16_t>(a), static_cast<uint16_t>(others)...) |
         static_cast<uint32_t>(kBody(high(a), high(others)...)) << 16;
};
constexpr auto kNegate = [](uint32_t a) { return a ^ 0x80008000u; };
constexpr auto kPair = [](float high, float low) {
  return static_cast<uint32_t>(nearest_half(high)) << 16 | nearest_half(low);
};

}  // namespace

double half_value(uint16_t bits) {
  static const auto values = [] {
    std::array<double, 65536> all;
    for (size_t i = 0; i < all.size(); ++i) all[i] = computed_value(static_cast<uint16_t>(i));
    return all;
  }();
  return values[bits];
}

uint16_t nearest_half(double x) {
  if (x != x) return 0x7fff;
  const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  x = std::fabs(x);
  if (x >= 65520.0) return sign | 0x7c00;
  // Of subnormal numbers the unit is 2^-24; one more than the largest of them is the smallest that is normal.
  if (x < 0x1p-14) return sign | static_cast<uint16_t>(std::nearbyint(x * 0x1p24));
  const int exponent = std::ilogb(x);
  const double fraction = std::nearbyint(std::ldexp(x, 10 - exponent));  // 1024 to 2048, which carries
  return sign | static_cast<uint16_t>(((exponent + 14) << 10) + static_cast<int>(fraction));
}

void add_halves(Operations& table) {
  table["add.rn.f16x2"] = binary<uint32_t, both<sum>>;
  table["mul.rn.f16x2"] = binary<uint32_t, both<product>>;
  table["fma.rn.f16x2"] = ternary<uint32_t, both<product_and_sum>>;
  table["neg.f16x2"] = unary<uint32_t, uint32_t, kNegate>;
  table["cvt.rn.f16x2.f32"] = binary<float, kPair, uint32_t>;
  table["cvt.rn.f16.f32"] = unary<float, uint16_t, nearest_half>;
  table["cvt.f32.f16"] = unary<uint16_t, float, half_value>;
}

}  // namespace ptx
