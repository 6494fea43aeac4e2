// Which words of a plane of codes a few tokens touch (the order is that of code_places.h), so that a token that joins
// 63 others costs its own codes and not theirs.
#pragma once

#include "code_places.h"

namespace kvcache {

// The words of 16 bits (bytes, if `bits` is 8) that hold codes of tokens [low, high) of a record, as a numbered set.
// Of values of several tokens some that hold none may be among them.
struct TouchedWords {
  int count;

  KVCACHE_BOTH TouchedWords(int bits, int dim, bool is_key, int low, int high) {
    const int tokens = high - low;
    if (is_key && bits == 8) {  // [dim / 4][64 tokens][4 channels]
      count = dim * tokens;
      run_ = 4 * tokens, step_ = 256, first_ = 4 * low;
    } else if (is_key) {  // [dim * bits / 8][16 tokens][2 halves]
      const int lanes = tokens < 16 ? tokens : 16;
      count = dim * bits / 8 * lanes * 2;
      run_ = 2 * lanes, step_ = 32, first_ = 2 * low, wrap_ = 31;
    } else if (bits == 8) {  // [16][dim][4 tokens]
      first_ = low / 4 * 4 * dim;
      count = (high + 3) / 4 * 4 * dim - first_;
      if (tokens == 1) thin_out(4, low % 4);
    } else {  // [groups of 16 / bits chunks of 16 channels][16 channels][2 tokens]
      const int chunks = dim / 16, codes = 16 / bits;
      first_ = low / 2 * chunks / codes * 32;
      count = (((high + 1) / 2 * chunks + codes - 1) / codes) * 32 - first_;
      if (tokens == 1) thin_out(2, low % 2);
    }
  }

  KVCACHE_BOTH int word(int i) const {
    if (run_ == 0) return first_ + i * step_;
    const int within = first_ + i % run_;
    return i / run_ * step_ + (wrap_ == 0 ? within : within & wrap_);
  }

 private:
  // Every `step`-th word only, from number `rest` on.
  KVCACHE_BOTH void thin_out(int step, int rest) {
    count /= step;
    step_ = step;
    first_ += rest;
  }

  // Runs of `run_` words `step_` apart, the places inside a run taken modulo wrap_ + 1; or, without runs, every
  // `step_`-th word.
  int run_ = 0, step_ = 1, first_ = 0, wrap_ = 0;
};

}  // namespace kvcache
