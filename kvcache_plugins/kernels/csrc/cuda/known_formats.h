// A format that a kernel is made for, beside those that serve all: what the compiler knows of a call takes no
// instructions, and no registers.
#pragma once

#include "arguments.h"

namespace kvcache {

// KIVI's 2 bits of 128 channels in groups of 32.
struct TwoBits {
  static constexpr int kChannels = 128, kGroup = 32, kCodes = 2 * kBlockTokens * kChannels / 8, kSwizzle = 3;
  static constexpr int kMetadata = 2 * kBlockTokens * kChannels / kGroup, kUnit = kCodes + 2 * kMetadata;
};

template <typename Visit>
KVCACHE_BOTH void visit_side(Side& side, int codes_offset, Visit& visit) {
  visit(side.nbits, 2);
  visit(side.format, kAffine);
  visit(side.head_dim, TwoBits::kChannels);
  visit(side.padded_dim, TwoBits::kChannels);
  visit(side.metadata_bytes, 2);
  visit(side.codes_offset, codes_offset);
  visit(side.scale_offset, codes_offset + TwoBits::kCodes);
  visit(side.minimum_offset, codes_offset + TwoBits::kCodes + TwoBits::kMetadata);
  visit(side.factors, nullptr);
}

template <typename Visit>
KVCACHE_BOTH void visit_copy(UnitCopy& copy, int codes_offset, Visit& visit) {
  visit(copy.codes_offset, codes_offset);
  visit(copy.code_bytes, TwoBits::kCodes);
  visit(copy.bytes, TwoBits::kUnit);
  visit(copy.swizzle, TwoBits::kSwizzle);
  visit(copy.scale, TwoBits::kCodes);
  visit(copy.minimum, TwoBits::kCodes + TwoBits::kMetadata);
  static_assert(UnitCopy::kSteps == 4 && TwoBits::kCodes == 4 * UnitCopy::kStepBytes, "one round of copies");
  visit(copy.step_bits[0], swizzle_bits(0, TwoBits::kSwizzle));
  visit(copy.step_bits[1], swizzle_bits(UnitCopy::kStepBytes, TwoBits::kSwizzle));
  visit(copy.step_bits[2], swizzle_bits(2 * UnitCopy::kStepBytes, TwoBits::kSwizzle));
  visit(copy.step_bits[3], swizzle_bits(3 * UnitCopy::kStepBytes, TwoBits::kSwizzle));
}

// Calls `visit` with what of a call is always the same, and with what that is, if its format is TwoBits, its keys were
// rotated before they were packed, and it has no sinks.
template <typename Visit>
KVCACHE_BOTH void visit_two_bits(AttentionArguments& a, Visit& visit) {
  visit(a.records.record_bytes, 2 * TwoBits::kUnit);
  visit_side(a.key, 0, visit);
  visit_side(a.value, TwoBits::kUnit, visit);
  visit(a.key.group_tokens, TwoBits::kGroup);
  visit(a.key.width, TwoBits::kChannels);
  visit(a.key.interleaved, 0);
  visit(a.key.cos, nullptr);
  visit(a.value.group_tokens, 1);
  visit(a.value.width, TwoBits::kChannels / TwoBits::kGroup);
  visit(a.sink_splits, 0);
  visit_copy(a.key_copy, 0, visit);
  visit_copy(a.value_copy, TwoBits::kUnit, visit);
  visit(a.unit_bytes, TwoBits::kUnit);
  visit(a.unit_slots, 3);
  visit(a.warp_bytes, 3 * TwoBits::kUnit);
  visit(a.ring_bytes, kWarps * 3 * TwoBits::kUnit);
  visit(a.key_steps, TwoBits::kChannels / 16);
  visit(a.key_group_shift, 5);
  visit(a.key_tile_shift, 1);
  visit(a.value_chunks, TwoBits::kChannels / 16);
  visit(a.value_chunks_per_group, TwoBits::kGroup / 16);
  visit(a.value_group_shift, 0);
  visit(a.value_groups, TwoBits::kChannels / TwoBits::kGroup);
  visit(a.are_values_aligned, 1);
}

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

// The same arguments, of which the compiler knows the format; for a call that `are_two_bits`.
KVCACHE_BOTH AttentionArguments as_two_bits(AttentionArguments a) {
  const Setting visit;
  visit_two_bits(a, visit);
  return a;
}

inline bool are_two_bits(AttentionArguments& a) {
  Comparing visit;
  visit_two_bits(a, visit);
  return visit.are_same;
}

}  // namespace kvcache
