// The products of tensor_core.h, to be called from Python.
#include "tensor_core.h"

extern "C" {
void multiply(tensor_core::Tile* tiles, int count, bool are_bfloats) {
  for (int i = 0; i < count; ++i) tensor_core::multiply(tiles[i], are_bfloats);
}
void multiply_singly(tensor_core::Tile* tiles, int count, bool are_bfloats) {
  for (int i = 0; i < count; ++i) tensor_core::multiply_singly(tiles[i], are_bfloats);
}
// As processors do that have no AVX-512; returns how many tiles had finite numbers only.
int multiply_without_avx512(tensor_core::Tile* tiles, int count, bool are_bfloats) {
  int finite = 0;
  for (int i = 0; i < count; ++i) {
    float sums[tensor_core::kRows][tensor_core::kColumns];
    if (tensor_core::multiply_together(tiles[i], tensor_core::least_exponent(are_bfloats), sums)) {
      std::memcpy(tiles[i].c, sums, sizeof(sums));
      ++finite;
    } else {
      tensor_core::multiply_singly(tiles[i], are_bfloats);
    }
  }
  return finite;
}
}
