// q.k of 64 packed tokens on the tensor core, by one warp: the products of every format.
#pragma once

#include "grouped_keys.cuh"
#include "rotated_keys.cuh"
#include "scaled_keys.cuh"

namespace kvcache {

template <int kRows, int kColumns>
KVCACHE_DEVICE void multiply_rotated_keys(int nbits, const KeyUnit& unit, float (&c)[kColumns][4][4]) {
  if (nbits == 2) return rotated_key_products<2, kRows>(unit, c);
  if (nbits == 3) return rotated_key_products<3, kRows>(unit, c);
  return rotated_key_products<4, kRows>(unit, c);
}

template <int kRows, int kColumns>
KVCACHE_DEVICE void multiply_scaled_keys(int nbits, const KeyUnit& unit, float (&c)[kColumns][4][4]) {
  if (nbits == 8) return scaled_key_products<8, kAffine, kRows, 1>(unit, c);
  if (nbits == 2) return scaled_key_products<2, kAffine, kRows, 1>(unit, c);
  if (nbits == 3) return scaled_key_products<3, kAffine, kRows, 1>(unit, c);
  return scaled_key_products<4, kAffine, kRows, 1>(unit, c);
}

// Those of a format of known_formats.h; `c` is [column][tile], products with what codes and metadata per channel stand
// for. `kUnroll`: of pairs of steps, which is worth its instructions where there is code for one format alone.
template <typename Format, int kUnroll, int kColumns>
KVCACHE_DEVICE void multiply_known_keys(const KeyUnit& unit, float (&c)[kColumns][4][4]) {
  if constexpr (Format::kIsRotated) {
    rotated_key_products<Format::kNbits, Format::kKeyRows == 4 ? 4 : 2>(unit, c);
  } else {
    scaled_key_products<Format::kNbits, Format::kKind, Format::kKeyRows, kUnroll>(unit, c);
  }
}

// All formats.
template <int kColumns>
KVCACHE_DEVICE void multiply_keys(const Side& side, const KeyUnit& unit, float (&c)[kColumns][4][4]) {
  if (side.cos != nullptr) {
    if (unit.tile_shift == 0) return multiply_rotated_keys<4>(side.nbits, unit, c);
    return multiply_rotated_keys<2>(side.nbits, unit, c);
  }
  if (side.width > 1 && side.format == kSymmetric) return grouped_key_products(unit, side.width, c);
  if (side.width > 1) {
    if (unit.tile_shift == 0) return multiply_scaled_keys<4>(side.nbits, unit, c);
    if (unit.tile_shift == 1) return multiply_scaled_keys<2>(side.nbits, unit, c);
    return multiply_scaled_keys<1>(side.nbits, unit, c);
  }
  if (side.format == kSymmetric) return scaled_key_products<8, kSymmetric, 0, 1>(unit, c);
  if (side.format == kE4M3) return scaled_key_products<8, kE4M3, 0, 1>(unit, c);
  if (side.format == kE5M2) return scaled_key_products<8, kE5M2, 0, 1>(unit, c);
  return multiply_scaled_keys<0>(side.nbits, unit, c);
}

}  // namespace kvcache
