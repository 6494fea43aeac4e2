// Outliers, which lie beside the codes of a block (KVQuant), for R query rows at once.
//
// What the entries of a list say is worked out for sixteen at a time. Each is then multiplied into the numbers of all
// rows, which lie next to each other, by token or by channel. An entry of keys and one of values take 3.2 ns together
// for four rows and 2.4 for one; one by one and row by row they took 7.6 and 5.3 (one thread of a Zen 5).
#pragma once

#include "avx512_math.h"
#include "decode_attention.h"

namespace kvcache {
namespace avx512 {

// Up to sixteen entries of a list (kvcache_plugins/layers/outliers.py), from the first on.
struct OutlierVector {
  int count;
  __m512i token, channel;
  __m512 residual;

  OutlierVector(const int32_t* first, int left) : count(left < kLanes ? left : kLanes) {
    const __m512i entries = _mm512_maskz_loadu_epi32(first_lanes(count), first);
    token = _mm512_srli_epi32(entries, 26);
    channel = _mm512_and_si512(_mm512_srli_epi32(entries, 16), _mm512_set1_epi32(kMaxHeadDim - 1));
    residual = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(entries));
  }

  // The pairs of channels that are rotated together, and which of the two it is: 0 or 1.
  void find_pairs(const Side& key, __m512i* pair, __m512i* side) const {
    const __m512i one = _mm512_set1_epi32(1), half = _mm512_set1_epi32(key.padded_dim / 2);
    if (key.interleaved) {
      *pair = _mm512_srli_epi32(channel, 1);
      *side = _mm512_and_si512(channel, one);
    } else {
      const __mmask16 is_second = _mm512_cmpge_epi32_mask(channel, half);
      *pair = _mm512_mask_sub_epi32(channel, is_second, channel, half);
      *side = _mm512_maskz_mov_epi32(is_second, one);
    }
    *pair = _mm512_min_epi32(*pair, _mm512_sub_epi32(half, one));  // whatever the list holds
  }
};

constexpr int kBatch = 128;  // entries that are worked out before the first is used; a list of 1 in 100 has 82

// Calls `visit` with the entries of a list, at most kBatch at a time, and how many these are.
template <typename Visit>
void for_batches(const OutlierList& list, const Visit& visit) {
  for (const int32_t* first = list.begin; first < list.end; first += kBatch)
    visit(first, list.end - first < kBatch ? int(list.end - first) : kBatch);
}

static_assert(kBlockTokens == 64, "of a token there are six bits");

// Numbers of R rows (one or four), which lie next to each other, at up to kCount places.
template <int R, int kCount>
class RowNumbers {
 public:
  // Sets the first `count` places, a multiple of 16, to zero.
  void clear(int count) {
    for (int i = 0; i < count * R; i += kLanes) _mm512_store_ps(numbers_ + i, _mm512_setzero_ps());
  }

  // Places [0, count) are those of rows apart; `count` is a multiple of 16.
  void take(const float* const* rows, int count) {
    for (int i = 0; i < count; i += kLanes) {
      if constexpr (R == 1) {
        _mm512_store_ps(numbers_ + i, _mm512_loadu_ps(rows[0] + i));
      } else {
        __m512 halves[4], together[4];
        for (int r = 0; r < R; r += 2) {
          const __m512 even = _mm512_loadu_ps(rows[r] + i), odd = _mm512_loadu_ps(rows[r + 1] + i);
          halves[r] = _mm512_shuffle_f32x4(even, odd, 0x44);
          halves[r + 1] = _mm512_shuffle_f32x4(even, odd, 0xee);
        }
        for (int half = 0; half < 2; ++half) {
          together[2 * half] = _mm512_permutex2var_ps(halves[half], gathering(0), halves[2 + half]);
          together[2 * half + 1] = _mm512_permutex2var_ps(halves[half], gathering(4), halves[2 + half]);
        }
        for (int part = 0; part < 4; ++part) _mm512_store_ps(numbers_ + (i + 4 * part) * R, together[part]);
      }
    }
  }

  // Adds the numbers of places [0, count) to rows apart.
  template <typename Rows>
  void add_to_rows(Rows&& rows, int count) const {
    for (int i = 0; i < count; i += kLanes) {
      if constexpr (R == 1) {
        add_to(rows[0] + i, _mm512_load_ps(numbers_ + i));
      } else {
        __m512 halves[2][2];
        for (int half = 0; half < 2; ++half) {
          const float* const from = numbers_ + (i + 8 * half) * R;
          const __m512 early = _mm512_load_ps(from), late = _mm512_load_ps(from + kLanes);
          halves[half][0] = _mm512_permutex2var_ps(early, spreading(0), late);
          halves[half][1] = _mm512_permutex2var_ps(early, spreading(2), late);
        }
        for (int r = 0; r < R; r += 2) {
          add_to(rows[r] + i, _mm512_shuffle_f32x4(halves[0][r / 2], halves[1][r / 2], 0x44));
          add_to(rows[r + 1] + i, _mm512_shuffle_f32x4(halves[0][r / 2], halves[1][r / 2], 0xee));
        }
      }
    }
  }

  // Adds `factor` times R numbers.
  void add(uint32_t place, float factor, const float* from) {
    if constexpr (R == 1) {
      numbers_[place] += factor * *from;
    } else {
      float* const to = numbers_ + place * R;
      _mm_store_ps(to, _mm_fmadd_ps(_mm_load_ps(from), _mm_set1_ps(factor), _mm_load_ps(to)));
    }
  }

  // The same of two.
  void add(uint32_t place, float first, const float* from, float second, const float* further) {
    if constexpr (R == 1) {
      numbers_[place] += first * *from + second * *further;
    } else {
      float* const to = numbers_ + place * R;
      // apart from what is there, for which the last entry of the same token may still be waited for
      const __m128 part = _mm_mul_ps(_mm_load_ps(further), _mm_set1_ps(second));
      const __m128 added = _mm_fmadd_ps(_mm_load_ps(from), _mm_set1_ps(first), part);
      _mm_store_ps(to, _mm_add_ps(_mm_load_ps(to), added));
    }
  }

  const float* at(int place) const { return numbers_ + place * R; }

 private:
  static void add_to(float* to, __m512 x) { _mm512_storeu_ps(to, _mm512_add_ps(_mm512_loadu_ps(to), x)); }

  // Four places of four rows, from vectors of eight places of the first two rows and of the others.
  static __m512i gathering(int first) {
    const __m512i rows = _mm512_setr_epi32(0, 8, 16, 24, 1, 9, 17, 25, 2, 10, 18, 26, 3, 11, 19, 27);
    return _mm512_add_epi32(rows, _mm512_set1_epi32(first));
  }
  // Eight places of two rows, from vectors of four places of four rows each.
  static __m512i spreading(int row) {
    const __m512i places = _mm512_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29);
    return _mm512_add_epi32(places, _mm512_set1_epi32(row));
  }

  alignas(64) float numbers_[kCount * R];
};

}  // namespace avx512
}  // namespace kvcache
