// Numbers of 32 and 64 bits. Compiled without contraction: every operation rounds, as PTX says. What PTX approximates
// is correctly rounded here, with subnormal numbers flushed.
#include <cmath>

#include "machine.h"

namespace ptx {
namespace {

float flushed(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }

template <double (*kFunction)(double)>
constexpr auto approximate = [](float x) { return flushed(static_cast<float>(kFunction(flushed(x)))); };

double power_of_two(double x) { return std::exp2(x); }
double reciprocal(double x) { return 1.0 / x; }
double cosine(double x) { return std::cos(x); }
double sine(double x) { return std::sin(x); }

constexpr auto kAdd = [](auto a, auto b) { return a + b; };
constexpr auto kSubtract = [](auto a, auto b) { return a - b; };
constexpr auto kMultiply = [](auto a, auto b) { return a * b; };
constexpr auto kDivide = [](auto a, auto b) { return a / b; };
constexpr auto kMultiplyAdd = [](auto a, auto b, auto c) { return std::fma(a, b, c); };
constexpr auto kReciprocal = [](float a) { return 1.0f / a; };
// Of a number and of what is none, the number; -0 is below 0.
constexpr auto kLarger = [](float a, float b) {
  if (a != a || b != b) return a != a ? b : a;
  return a > b || (a == b && std::signbit(b)) ? a : b;
};
constexpr auto kSmaller = [](float a, float b) {
  if (a != a || b != b) return a != a ? b : a;
  return a < b || (a == b && std::signbit(a)) ? a : b;
};
constexpr auto kNearest = [](auto a) { return std::nearbyint(a); };
constexpr auto kTowardsZero = [](auto a) { return std::trunc(a); };
constexpr auto kDown = [](auto a) { return std::floor(a); };
constexpr auto kSame = [](auto a) { return a; };
// Of the bits alone.
constexpr auto kNegate = [](uint32_t a) { return a ^ 0x80000000u; };
constexpr auto kMagnitude = [](uint32_t a) { return a & 0x7fffffffu; };
constexpr auto kSignOf = [](uint32_t a, uint32_t b) { return (a & 0x80000000u) | (b & 0x7fffffffu); };

}  // namespace

void add_floats(Operations& table) {
  table["add.f32"] = table["add.rn.f32"] = binary<float, kAdd>;
  table["add.f64"] = table["add.rn.f64"] = binary<double, kAdd>;
  table["sub.f32"] = table["sub.rn.f32"] = binary<float, kSubtract>;
  table["sub.f64"] = binary<double, kSubtract>;
  table["mul.f32"] = table["mul.rn.f32"] = binary<float, kMultiply>;
  table["mul.f64"] = table["mul.rn.f64"] = binary<double, kMultiply>;
  table["div.rn.f32"] = binary<float, kDivide>;
  table["fma.rn.f32"] = ternary<float, kMultiplyAdd>;
  table["fma.rn.f64"] = ternary<double, kMultiplyAdd>;
  table["max.f32"] = binary<float, kLarger>;
  table["min.f32"] = binary<float, kSmaller>;
  table["neg.f32"] = unary<uint32_t, uint32_t, kNegate>;
  table["abs.f32"] = unary<uint32_t, uint32_t, kMagnitude>;
  table["copysign.f32"] = binary<uint32_t, kSignOf>;
  table["rcp.rn.f32"] = unary<float, float, kReciprocal>;
  table["rcp.approx.ftz.f32"] = unary<float, float, approximate<reciprocal>>;
  table["ex2.approx.ftz.f32"] = unary<float, float, approximate<power_of_two>>;
  table["cos.approx.ftz.f32"] = unary<float, float, approximate<cosine>>;
  table["sin.approx.ftz.f32"] = unary<float, float, approximate<sine>>;
  table["cvt.rni.f32.f32"] = unary<float, float, kNearest>;
  table["cvt.rni.f64.f64"] = unary<double, double, kNearest>;
  table["cvt.rzi.f32.f32"] = unary<float, float, kTowardsZero>;
  table["cvt.rmi.f64.f64"] = unary<double, double, kDown>;
  table["cvt.f64.f32"] = unary<float, double, kSame>;
  table["cvt.rn.f32.f64"] = unary<double, float, kSame>;
  table["cvt.rn.f32.s16"] = unary<int16_t, float, kSame>;
  table["cvt.rn.f32.u16"] = unary<uint16_t, float, kSame>;
  table["cvt.rn.f32.s32"] = unary<int32_t, float, kSame>;
  table["cvt.rn.f32.u32"] = unary<uint32_t, float, kSame>;
  table["cvt.rn.f32.s64"] = unary<int64_t, float, kSame>;
  table["cvt.rn.f32.u64"] = unary<uint64_t, float, kSame>;
  table["cvt.rn.f64.s32"] = unary<int32_t, double, kSame>;
  table["cvt.rn.f64.s64"] = unary<int64_t, double, kSame>;
}

}  // namespace ptx
