// Query rows turned back by the positions of keys from before the rotary embedding, for AVX2 (KVQuant).
//
// As in avx512_positions.h: the query is turned back by the position of every sixteenth token of a block, and the keys
// are turned by the distances from it, which are the same everywhere. Angles advance from block to block by complex
// multiplication in double precision.
#pragma once

#include <memory>
#include <vector>

#include "avx2_blocks.h"

namespace kvcache {
namespace {  // see portable_numbers.inl

// The first (0) or the second (1) channel of a pair.
inline int pair_channel(const Side& key, int pair, int half) {
  return key.interleaved ? 2 * pair + half : pair + half * key.padded_dim / 2;
}

// What four rows have for the two channels of a pair.
struct alignas(32) TurnedPair {
  float numbers[2][kTogether];
};

// Cosines and sines of a pair's angles at distances of up to 15 tokens.
struct alignas(32) Distances {
  float cos[16], sin[16];
};

class TurnedQueries {
 public:
  explicit TurnedQueries(const Task& task) : key_(task.key), pairs_(key_.padded_dim / 2), angles_(new Angles) {
    const int groups = (task.queries + kTogether - 1) / kTogether;
    queries_.resize(groups * pairs_);
    turned_.resize(4 * pairs_);
    distances_.resize(pairs_);
    for (int pair = 0; pair < pairs_; ++pair) {
      for (int row = 0; row < groups * kTogether; ++row) take(task, row, pair);
      set_angles(pair);
    }
  }

  // Brings the angles to the block at slot `start`; keys that are not to be turned have none.
  void move_to(int64_t start) {
    if (key_.inv_freq == nullptr) return;
    Angles& angles = *angles_;
    for (int pair = 0; pair < pairs_ && start != next_; ++pair) {
      const double position = static_cast<double>(start + key_.position);
      const double angle = 2 * pair < key_.rotary_dim ? position * key_.inv_freq[pair] : 0.0;
      angles.first[0][pair] = __builtin_cos(angle);
      angles.first[1][pair] = __builtin_sin(angle);
    }
    next_ = start + kBlockTokens;
    for (int pair = 0; pair < pairs_; pair += kLanes) {
      const Floats c = narrowed(angles.first[0] + pair), s = narrowed(angles.first[1] + pair);
      for (int k = 0; k < 4; ++k) {
        const Floats along = load<Floats>(angles.distance[k][0] + pair);
        const Floats across = load<Floats>(angles.distance[k][1] + pair);
        store(angles.base[k][0] + pair, c * along - s * across);
        store(angles.base[k][1] + pair, c * across + s * along);
      }
    }
    for (int pair = 0; pair < pairs_; ++pair) {
      const double c = angles.first[0][pair], s = angles.first[1][pair];
      angles.first[0][pair] = c * angles.block[0][pair] - s * angles.block[1][pair];
      angles.first[1][pair] = c * angles.block[1][pair] + s * angles.block[0][pair];
    }
  }

  // Turns rows [4 * group, 4 * group + 4) to the block.
  void turn_rows(int group) {
    const Queries* const queries = queries_.data() + group * pairs_;
    for (int k = 0; k < 4; ++k) {
      TurnedPair* const out = turned_.data() + k * pairs_;
      const float(&base)[2][kMaxHeadDim / 2] = angles_->base[k];
      for (int pair = 0; pair < pairs_; ++pair) {
        const __m256 along = _mm256_mul_ps(_mm256_load_ps(queries[pair].numbers[0]), _mm256_set1_ps(base[0][pair]));
        const __m256 across = _mm256_load_ps(queries[pair].quarter[0]);
        _mm256_store_ps(out[pair].numbers[0], _mm256_fmadd_ps(across, _mm256_set1_ps(base[1][pair]), along));
      }
    }
  }

  // The pairs of the rows that were turned last, for tokens [16 k, 16 k + 16) of the block.
  const TurnedPair* of(int k) const { return turned_.data() + k * pairs_; }

  const Distances& distances(int pair) const { return distances_[pair]; }

 private:
  // The numbers of four rows, and what a quarter turn makes of them.
  struct alignas(32) Queries {
    float numbers[2][kTogether], quarter[2][kTogether];
  };
  // Cosines and sines of the pairs' angles: at the present block's first token, of the distance from block to block, of
  // 0, 16, 32 and 48 tokens, and at every sixteenth token of the block.
  struct Angles {
    alignas(32) double first[2][kMaxHeadDim / 2], block[2][kMaxHeadDim / 2];
    alignas(32) float distance[4][2][kMaxHeadDim / 2], base[4][2][kMaxHeadDim / 2];
  };

  static Floats narrowed(const double* x) {
    return (Floats)_mm256_set_m128(_mm256_cvtpd_ps(_mm256_load_pd(x + 4)), _mm256_cvtpd_ps(_mm256_load_pd(x)));
  }

  void take(const Task& task, int row, int pair) {
    Queries& queries = queries_[row / kTogether * pairs_ + pair];
    for (int half = 0; half < 2; ++half) {
      const int channel = pair_channel(key_, pair, half);
      const bool is_real = channel < key_.head_dim && row < task.queries;
      const float x = is_real ? task.query[static_cast<int64_t>(row) * key_.head_dim + channel] : 0.0f;
      queries.numbers[half][row % kTogether] = x;
      queries.quarter[1 - half][row % kTogether] = half == 0 ? -x : x;
    }
  }

  void set_angles(int pair) {
    const bool turns = key_.inv_freq != nullptr && 2 * pair < key_.rotary_dim;
    const double one[2] = {turns ? __builtin_cos(key_.inv_freq[pair]) : 1.0,
                           turns ? __builtin_sin(key_.inv_freq[pair]) : 0.0};
    double angle[2] = {1.0, 0.0};
    for (int t = 0; t < 16; ++t) {
      distances_[pair].cos[t] = static_cast<float>(angle[0]);
      distances_[pair].sin[t] = static_cast<float>(angle[1]);
      turn(angle, one);
    }
    const double sixteen[2] = {angle[0], angle[1]};
    angle[0] = 1.0;
    angle[1] = 0.0;
    for (int k = 0; k < 4; ++k) {
      for (int part = 0; part < 2; ++part)
        angles_->distance[k][part][pair] = angles_->base[k][part][pair] = static_cast<float>(angle[part]);
      turn(angle, sixteen);
    }
    for (int part = 0; part < 2; ++part) angles_->block[part][pair] = angle[part];
  }

  const Side& key_;
  const int pairs_;
  int64_t next_ = -1;                 // slot of the block that the angles are for
  std::vector<Queries> queries_;      // [four rows][pair]
  std::vector<TurnedPair> turned_;    // [sixteen tokens][pair], of four rows
  std::vector<Distances> distances_;  // of every pair
  std::unique_ptr<Angles> angles_;
};

}  // namespace
}  // namespace kvcache
