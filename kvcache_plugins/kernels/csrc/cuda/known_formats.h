// Formats that kernels are made for, beside those that serve all: what the compiler knows of a call takes no
// instructions, and no registers; and such a kernel is so small that its loop stays in the instruction cache. On an
// H200 the kernels that serve all wait a fifth of their time for instructions.
#pragma once

#include "arguments.h"

namespace kvcache {

// What of the copies of a unit is always the same.
template <typename Visit>
KVCACHE_BOTH void visit_unit(UnitCopy& copy, int codes_offset, int code_bytes, int bytes, int swizzle, Visit& visit) {
  visit(copy.codes_offset, codes_offset);
  visit(copy.code_bytes, code_bytes);
  visit(copy.bytes, bytes);
  visit(copy.swizzle, swizzle);
  static_assert(UnitCopy::kSteps == 4, "as many as are visited");
  visit(copy.step_bits[0], swizzle_bits(0, swizzle));
  visit(copy.step_bits[1], swizzle_bits(UnitCopy::kStepBytes, swizzle));
  visit(copy.step_bits[2], swizzle_bits(2 * UnitCopy::kStepBytes, swizzle));
  visit(copy.step_bits[3], swizzle_bits(3 * UnitCopy::kStepBytes, swizzle));
  visit(copy.further_bits, swizzle_bits(4 * UnitCopy::kStepBytes, swizzle));
}

// Thread blocks on a multiprocessor that the registers of such a kernel leave room for, if it is compiled for a compute
// capability (times ten): before 9.0 there is no shared memory for five, and for 10.x the registers would spill.
constexpr int resident_blocks(int wanted, int compiled_for) {
  const bool has_room_for_five = compiled_for >= 90 && (compiled_for < 100 || compiled_for >= 120);
  return wanted > 4 && !has_room_for_five ? 4 : wanted;
}

// 128 channels: of `kBits`, in KIVI's groups of `kGroup` tokens (keys) and channels (values), or, if that is 0, with
// one scale for all channels of a token. `kRotated`: keys still need the rotation inside their block.
template <int kBits, int kFormat, int kGroup, bool kRotated = false>
struct Known {
  static constexpr bool kIsKnown = true, kIsRotated = kRotated, kMayHaveSinks = false;
  static constexpr int kNbits = kBits, kKind = kFormat;
  static constexpr int kKeyRows = kGroup > 0 ? kBlockTokens / kGroup : 0;  // of metadata per channel in a block
  static constexpr int kChannels = 128, kChunks = kChannels / 16;
  static constexpr int kCodes = kBlockTokens * kChannels * kBits / 8;
  static constexpr int kValueGroups = kGroup > 0 ? kChannels / kGroup : 1;
  static constexpr int kMetadata = 2 * kBlockTokens * kValueGroups;  // as many of keys as of values
  static constexpr int kFields = kFormat == kAffine ? 2 : 1;         // scales, and minima
  static constexpr int kUnit = kCodes + kFields * kMetadata;
  static constexpr int kSlots = kBits == 2 ? 3 : 2;  // units of a warp: as few as let more thread blocks be resident
  static constexpr int kKeySwizzle = kBits == 8 ? 4 : 3, kValueSwizzle = kBits == 8 ? 5 : kBits == 4 ? 4 : 3;
  // Thread blocks on a multiprocessor, by its registers: as many as its shared memory has room for.
  static constexpr int kResident = kRotated || kBits == 8 ? 3 : kBits == 2 ? 5 : 4;
  static constexpr bool kPutsAside = kResident > 4;  // accumulators, while others need the registers
  static_assert(!kPutsAside || (kSlots - 1) * kUnit >= 512 * kChunks, "there is room for all of them");
  static_assert(kGroup == 0 || (kFormat == kAffine && kBits < 8), "KIVI");
  static_assert(kUnit % 128 == 0, "units lie next to each other in shared memory");

  // Calls `visit` with what of a call is always the same, and with what that is.
  template <typename Visit>
  KVCACHE_BOTH static void visit(AttentionArguments& a, Visit& visit) {
    visit(a.records.record_bytes, 2 * kUnit);
    visit_side(a.key, 0, visit);
    visit_side(a.value, kUnit, visit);
    visit(a.key.group_tokens, kGroup > 0 ? kGroup : 1);
    visit(a.key.width, kGroup > 0 ? kChannels : 1);
    if (kGroup > 0) visit(a.key.interleaved, kRotated ? 0 : 1);
    if (kRotated) {
      visit(a.key.period, kGroup);
      visit(a.key.rotary_dim, kChannels);
    } else {
      visit(a.key.cos, nullptr);
    }
    visit(a.value.group_tokens, 1);
    visit(a.value.width, kValueGroups);
    visit(a.value.cos, nullptr);
    visit_copy(a.key_copy, 0, kKeySwizzle, visit);
    visit_copy(a.value_copy, kUnit, kValueSwizzle, visit);
    visit(a.unit_bytes, kUnit);
    visit(a.key_steps, kChunks);
    visit(a.key_group_shift, power_of(kGroup));
    visit(a.key_tile_shift, kGroup == 32 ? 1 : kGroup == 64 ? 2 : 0);
    visit(a.value_chunks, kChunks);
    visit(a.value_chunks_per_group, kChunks / kValueGroups);
    visit(a.value_group_shift, 0);
    visit(a.value_groups, kValueGroups);
    visit(a.are_values_aligned, 1);
  }

 private:
  template <typename Visit>
  KVCACHE_BOTH static void visit_side(Side& side, int codes_offset, Visit& visit) {
    visit(side.nbits, kBits);
    visit(side.format, kFormat);
    visit(side.head_dim, kChannels);
    visit(side.padded_dim, kChannels);
    visit(side.metadata_bytes, 2);
    visit(side.codes_offset, codes_offset);
    visit(side.scale_offset, codes_offset + kCodes);
    visit(side.minimum_offset, kFields == 2 ? codes_offset + kCodes + kMetadata : -1);
    visit(side.factors, nullptr);
    visit(side.sink_length, 0);
  }
  template <typename Visit>
  KVCACHE_BOTH static void visit_copy(UnitCopy& copy, int codes_offset, int swizzle, Visit& visit) {
    visit_unit(copy, codes_offset, kCodes, kUnit, swizzle, visit);
    visit(copy.scale, kCodes);
    if (kFields == 2) visit(copy.minimum, kCodes + kMetadata);
  }
};

// KVQuant's, of 128 channels and `kBits` on both sides: keys are codes alone, values have a scale and an offset per
// token. A unit has room for either.
template <int kBits>
struct KnownLevels {
  static constexpr bool kIsKnown = true, kIsRotated = false, kMayHaveSinks = true;
  static constexpr int kNbits = kBits, kKind = kNonUniform;
  static constexpr int kChannels = 128, kChunks = kChannels / 16;
  static constexpr int kCodes = kBlockTokens * kChannels * kBits / 8, kField = 2 * kBlockTokens;
  static constexpr int kUnit = kCodes + 2 * kField;
  static constexpr int kSlots = kBits == 2 ? 3 : 2;  // units of a warp: as many as leave room for kResident
  static constexpr int kKeySwizzle = 3, kValueSwizzle = kBits == 4 ? 4 : 3;
  static constexpr int kResident = 3;  // thread blocks on a multiprocessor, by its registers and shared memory
  static constexpr bool kPutsAside = false;
  static_assert(kUnit % 128 == 0, "units lie next to each other in shared memory");

  template <typename Visit>
  KVCACHE_BOTH static void visit(AttentionArguments& a, Visit& visit) {
    visit(a.records.record_bytes, kCodes + kUnit);
    visit_side(a.key, 0, visit);
    visit(a.key.scale_offset, -1);
    visit(a.key.minimum_offset, -1);
    visit(a.key.cos, nullptr);
    visit_side(a.value, kCodes, visit);
    visit(a.value.scale_offset, 2 * kCodes);
    visit(a.value.minimum_offset, 2 * kCodes + kField);
    visit(a.value.group_tokens, 1);
    visit(a.value.width, 1);
    visit(a.value.cos, nullptr);
    visit_unit(a.key_copy, 0, kCodes, kCodes, kKeySwizzle, visit);
    visit_unit(a.value_copy, kCodes, kCodes, kUnit, kValueSwizzle, visit);
    visit(a.value_copy.scale, kCodes);
    visit(a.value_copy.minimum, kCodes + kField);
    visit(a.unit_bytes, kUnit);
    visit(a.key_steps, kChunks);
    visit(a.value_chunks, kChunks);
  }

 private:
  template <typename Visit>
  KVCACHE_BOTH static void visit_side(Side& side, int codes_offset, Visit& visit) {
    visit(side.nbits, kBits);
    visit(side.format, kNonUniform);
    visit(side.head_dim, kChannels);
    visit(side.padded_dim, kChannels);
    visit(side.codes_offset, codes_offset);
    visit(side.factors, nullptr);
  }
};

// What a kernel for all formats knows.
struct AnyFormat {
  static constexpr bool kIsKnown = false, kPutsAside = false;
};

using Int8 = Known<8, kSymmetric, 0>;
using Float8 = Known<8, kE4M3, 0>;
using Int4 = Known<4, kAffine, 0>;
using Kivi4 = Known<4, kAffine, 32>;
using Kivi4Wide = Known<4, kAffine, 64>;
using Kivi2 = Known<2, kAffine, 32>;
using Kivi4Rotated = Known<4, kAffine, 32, true>;
using Kivi4WideRotated = Known<4, kAffine, 64, true>;
using Kivi2Rotated = Known<2, kAffine, 32, true>;
using KVQuant2 = KnownLevels<2>;
using KVQuant3 = KnownLevels<3>;
using KVQuant4 = KnownLevels<4>;

struct Setting {
  template <typename Field, typename Value>
  KVCACHE_BOTH void operator()(Field& field, Value value) const {
    field = value;
  }
};

struct Comparing {
  bool are_same = true;

  template <typename Field, typename Value>
  KVCACHE_BOTH void operator()(Field& field, Value value) {
    are_same &= field == value;
  }
};

// The same arguments, of which the compiler knows the format; for a call that `is_known`, once its ring is laid out.
template <typename Format>
KVCACHE_BOTH AttentionArguments as_known(AttentionArguments a) {
  const Setting visit;
  Format::visit(a, visit);
  a.sink_splits = a.general_splits = 0;
  if (Format::kMayHaveSinks) {
    a.mixed_end = a.mixed_begin;
    a.sharing_splits = a.fast_splits;  // see `exact_work`
  } else {
    a.sink_units = 0;
  }
  a.unit_slots = Format::kSlots;
  a.warp_bytes = Format::kSlots * Format::kUnit;
  if (Format::kIsRotated && a.key.cos == nullptr) __builtin_unreachable();
  return a;
}

template <typename Format>
bool is_known(AttentionArguments& a) {
  Comparing visit;
  Format::visit(a, visit);
  return visit.are_same && (a.key.cos != nullptr) == Format::kIsRotated;
}

}  // namespace kvcache
