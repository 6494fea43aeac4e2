// Integers and bits. Names without a sign in PTX (.b32, or .s32 where it makes no difference) are unsigned here.
#include <algorithm>
#include <cmath>
#include <limits>

#include "machine.h"

namespace ptx {
namespace {

template <class T, bool kRemainder>
void divide(Warp& w, const Instruction& i, uint32_t lanes) {
  uint64_t* to = w[i.to[0]];
  const uint64_t *a = w[i.from[0]], *b = w[i.from[1]];
  for_lanes(lanes, [&](int lane) {
    const T x = number<T>(a[lane]), y = number<T>(b[lane]);
    if (y == 0) fail(w, i, "a division by zero");
    if (std::is_signed_v<T> && y == static_cast<T>(-1))  // the quotient of the least number has no place
      to[lane] = kRemainder ? 0 : bits_of<T>(static_cast<T>(std::make_unsigned_t<T>{0} - std::make_unsigned_t<T>(x)));
    else
      to[lane] = bits_of<T>(static_cast<T>(kRemainder ? x % y : x / y));
  });
}

// By more bits than there are, as by all of them.
template <class T, bool kLeft>
void shift(Warp& w, const Instruction& i, uint32_t lanes) {
  constexpr uint32_t kBits = sizeof(T) * 8;
  uint64_t* to = w[i.to[0]];
  const uint64_t *a = w[i.from[0]], *b = w[i.from[1]];
  for_lanes(lanes, [&](int lane) {
    const T x = number<T>(a[lane]);
    const uint32_t count = std::min(static_cast<uint32_t>(b[lane]), kBits);
    if (count == kBits) to[lane] = bits_of<T>(std::is_signed_v<T> && x < 0 ? static_cast<T>(-1) : T{0});
    else to[lane] = bits_of<T>(static_cast<T>(kLeft ? x << count : x >> count));
  });
}

// Bit `4 a + 2 b + c` of the table for the bits of three words.
void look_up(Warp& w, const Instruction& i, uint32_t lanes) {
  const uint64_t table = *w[i.from[3]];
  for_lanes(lanes, [&](int lane) {
    const uint64_t a = w[i.from[0]][lane], b = w[i.from[1]][lane], c = w[i.from[2]][lane];
    uint64_t result = 0;
    for (int k = 0; k < 8; ++k)
      if (table >> k & 1) result |= (k & 4 ? a : ~a) & (k & 2 ? b : ~b) & (k & 1 ? c : ~c);
    w[i.to[0]][lane] = cut(result, 32);
  });
}

// Bytes of two words, chosen by the nibbles of a third; the upper bit of a nibble asks for the byte's sign.
void permute(Warp& w, const Instruction& i, uint32_t lanes) {
  for_lanes(lanes, [&](int lane) {
    const uint64_t both = w[i.from[0]][lane] | w[i.from[1]][lane] << 32, selector = w[i.from[2]][lane];
    uint32_t result = 0;
    for (int k = 0; k < 4; ++k) {
      const uint32_t nibble = selector >> 4 * k & 15;
      const auto byte = static_cast<uint8_t>(both >> 8 * (nibble & 7));
      result |= (nibble & 8 ? (byte & 0x80 ? 0xffu : 0u) : byte) << 8 * k;
    }
    w[i.to[0]][lane] = result;
  });
}

// So many low bits of one word into another, from a position on.
void insert(Warp& w, const Instruction& i, uint32_t lanes) {
  for_lanes(lanes, [&](int lane) {
    const uint32_t position = w[i.from[2]][lane] & 255, length = w[i.from[3]][lane] & 255;
    uint64_t result = w[i.from[1]][lane];
    for (uint32_t k = 0; k < length && position + k < 32; ++k) {
      const uint64_t bit = w[i.from[0]][lane] >> k & 1;
      result = (result & ~(uint64_t{1} << (position + k))) | bit << (position + k);
    }
    w[i.to[0]][lane] = result;
  });
}

// A number to an integer, towards zero. PTX saturates; in the source, what does not fit is undefined.
template <class From, class To>
void truncate(Warp& w, const Instruction& i, uint32_t lanes) {
  for_lanes(lanes, [&](int lane) {
    const double x = std::trunc(static_cast<double>(number<From>(w[i.from[0]][lane])));
    constexpr double kLeast = static_cast<double>(std::numeric_limits<To>::min());
    if (!(x >= kLeast && x < std::ldexp(1.0, std::numeric_limits<To>::digits)))
      fail(w, i, "%g becomes an integer that cannot hold it", x);
    w[i.to[0]][lane] = bits_of<To>(static_cast<To>(x));
  });
}

constexpr auto kAdd = [](auto a, auto b) { return a + b; };
constexpr auto kSubtract = [](auto a, auto b) { return a - b; };
constexpr auto kMultiply = [](auto a, auto b) { return 1u * a * b; };
constexpr auto kMultiplyAdd = [](auto a, auto b, auto c) { return a * b + c; };
constexpr auto kWide = [](auto a, auto b) { return int64_t{a} * b; };  // enough for unsigned numbers of 16 bits, too
constexpr auto kWideUnsigned = [](uint32_t a, uint32_t b) { return uint64_t{a} * b; };
constexpr auto kHigh = [](auto a, auto b) { return kWide(a, b) >> 32; };
constexpr auto kHighUnsigned = [](uint32_t a, uint32_t b) { return kWideUnsigned(a, b) >> 32; };
constexpr auto kLarger = [](auto a, auto b) { return std::max(a, b); };
constexpr auto kSmaller = [](auto a, auto b) { return std::min(a, b); };
constexpr auto kLargerHalves = [](uint32_t a, uint32_t b) {
  return std::max(a & 0xffff, b & 0xffff) | std::max(a >> 16, b >> 16) << 16;
};
constexpr auto kAnd = [](auto a, auto b) { return a & b; };
constexpr auto kOr = [](auto a, auto b) { return a | b; };
constexpr auto kXor = [](auto a, auto b) { return a ^ b; };
constexpr auto kNot = [](auto a) { return ~a; };
constexpr auto kNegate = [](auto a) { return 0 - a; };
constexpr auto kCountBits = [](uint32_t a) { return std::popcount(a); };
constexpr auto kSame = [](auto a) { return a; };

}  // namespace

void add_integers(Operations& table) {
  table["add.s16"] = binary<uint16_t, kAdd>;
  table["add.s32"] = table["add.u32"] = binary<uint32_t, kAdd>;
  table["add.s64"] = table["add.u64"] = binary<uint64_t, kAdd>;
  table["sub.s16"] = binary<uint16_t, kSubtract>;
  table["sub.s32"] = binary<uint32_t, kSubtract>;
  table["sub.s64"] = binary<uint64_t, kSubtract>;
  table["mul.lo.s16"] = binary<uint16_t, kMultiply>;
  table["mul.lo.s32"] = binary<uint32_t, kMultiply>;
  table["mul.lo.s64"] = binary<uint64_t, kMultiply>;
  table["mul.hi.s32"] = binary<int32_t, kHigh>;
  table["mul.hi.u32"] = binary<uint32_t, kHighUnsigned>;
  table["mul.wide.s16"] = binary<int16_t, kWide, int32_t>;
  table["mul.wide.u16"] = binary<uint16_t, kWide, uint32_t>;
  table["mul.wide.s32"] = binary<int32_t, kWide, int64_t>;
  table["mul.wide.u32"] = binary<uint32_t, kWideUnsigned, uint64_t>;
  table["mad.lo.s32"] = ternary<uint32_t, kMultiplyAdd>;
  table["mad.lo.s64"] = ternary<uint64_t, kMultiplyAdd>;
  table["div.s16"] = divide<int16_t, false>;
  table["div.s32"] = divide<int32_t, false>;
  table["div.u32"] = divide<uint32_t, false>;
  table["div.s64"] = divide<int64_t, false>;
  table["div.u64"] = divide<uint64_t, false>;
  table["rem.s16"] = divide<int16_t, true>;
  table["rem.s32"] = divide<int32_t, true>;
  table["rem.u32"] = divide<uint32_t, true>;
  table["rem.s64"] = divide<int64_t, true>;
  table["rem.u64"] = divide<uint64_t, true>;
  table["max.s32"] = binary<int32_t, kLarger>;
  table["max.u32"] = binary<uint32_t, kLarger>;
  table["max.s64"] = binary<int64_t, kLarger>;
  table["max.u64"] = binary<uint64_t, kLarger>;
  table["max.u16x2"] = binary<uint32_t, kLargerHalves>;
  table["min.s32"] = binary<int32_t, kSmaller>;
  table["min.u32"] = binary<uint32_t, kSmaller>;
  table["min.s64"] = binary<int64_t, kSmaller>;
  table["min.u64"] = binary<uint64_t, kSmaller>;
  table["neg.s32"] = unary<uint32_t, uint32_t, kNegate>;
  table["neg.s64"] = unary<uint64_t, uint64_t, kNegate>;
  table["and.b16"] = binary<uint16_t, kAnd>;
  table["and.b32"] = binary<uint32_t, kAnd>;
  table["and.b64"] = binary<uint64_t, kAnd>;
  table["or.b16"] = binary<uint16_t, kOr>;
  table["or.b32"] = binary<uint32_t, kOr>;
  table["or.b64"] = binary<uint64_t, kOr>;
  table["xor.b16"] = binary<uint16_t, kXor>;
  table["xor.b32"] = binary<uint32_t, kXor>;
  table["xor.b64"] = binary<uint64_t, kXor>;
  table["not.b16"] = unary<uint16_t, uint16_t, kNot>;
  table["not.b32"] = unary<uint32_t, uint32_t, kNot>;
  table["not.b64"] = unary<uint64_t, uint64_t, kNot>;
  table["shl.b16"] = shift<uint16_t, true>;
  table["shl.b32"] = shift<uint32_t, true>;
  table["shl.b64"] = shift<uint64_t, true>;
  table["shr.s16"] = shift<int16_t, false>;
  table["shr.u16"] = shift<uint16_t, false>;
  table["shr.s32"] = shift<int32_t, false>;
  table["shr.u32"] = shift<uint32_t, false>;
  table["shr.s64"] = shift<int64_t, false>;
  table["shr.u64"] = shift<uint64_t, false>;
  table["lop3.b32"] = look_up;
  table["prmt.b32"] = permute;
  table["bfi.b32"] = insert;
  table["popc.b32"] = unary<uint32_t, uint32_t, kCountBits>;
  table["cvt.u16.u8"] = unary<uint8_t, uint16_t, kSame>;
  table["cvt.s16.s8"] = unary<int8_t, int16_t, kSame>;
  table["cvt.s32.s8"] = unary<int8_t, int32_t, kSame>;
  table["cvt.u16.u32"] = unary<uint32_t, uint16_t, kSame>;
  table["cvt.u16.u64"] = unary<uint64_t, uint16_t, kSame>;
  table["cvt.u32.u16"] = unary<uint16_t, uint32_t, kSame>;
  table["cvt.u32.u64"] = unary<uint64_t, uint32_t, kSame>;
  table["cvt.u64.u16"] = unary<uint16_t, uint64_t, kSame>;
  table["cvt.u64.u32"] = unary<uint32_t, uint64_t, kSame>;
  table["cvt.s32.s16"] = unary<int16_t, int32_t, kSame>;
  table["cvt.s64.s16"] = unary<int16_t, int64_t, kSame>;
  table["cvt.s64.s32"] = unary<int32_t, int64_t, kSame>;
  table["cvt.rzi.s32.f32"] = truncate<float, int32_t>;
  table["cvt.rzi.u32.f32"] = truncate<float, uint32_t>;
  table["cvt.rzi.u64.f64"] = truncate<double, uint64_t>;
}

}  // namespace ptx
