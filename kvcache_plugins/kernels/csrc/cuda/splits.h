// How many thread blocks share the slots of a row and head. Arithmetic of the host alone, which tests compile by
// itself.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "arguments.h"

namespace kvcache {

struct Splits {
  int32_t general;
  int32_t fast;
};

// Times, in that which a warp of the fast path takes for a block. Estimates.
constexpr double kBeginTime = 1;  // to begin and to be merged
constexpr double kTileTime = 2;   // of a block of the general path, which a thread block's warps read together
constexpr int64_t kMostGeneralSplits = 128;
constexpr int64_t kMostWaves = 8;  // more only take longer

// When the last of `late` thread blocks ends, which begin in places that `early` ones leave or have never taken.
inline double end_of(int64_t early, double early_time, int64_t late, double late_time, int64_t places) {
  const double begin = static_cast<double>(early / places) * early_time;  // of the places that are free first
  const int64_t held = early % places;                                    // of the others
  const double freed = held > 0 ? begin + early_time : begin;
  const auto done_by = [=](double end) {
    const auto waves = [=](double from) {
      return static_cast<int64_t>(std::max(0.0, (end - from) / late_time + 1e-9));
    };
    return (places - held) * waves(begin) + held * waves(freed) >= late;
  };
  double end = freed;
  while (!done_by(end)) end += late_time;
  for (double sooner = begin + std::ceil((freed - begin) / late_time) * late_time; sooner < end; sooner += late_time)
    if (done_by(sooner)) return sooner;
  return end;
}

// Splits of the general part of a row and head, which begin first, and of its blocks that the fast path reads, so that
// all of `row_groups` end soonest: if it can be, all thread blocks run at once, since one that begins when another has
// ended is waited for.
inline Splits choose_splits(int64_t fast_blocks, int64_t general_blocks, int64_t sink_splits, int64_t row_groups,
                            int64_t places) {
  Splits best{0, 1};
  double least = -1;
  const int64_t most = std::max<int64_t>(1, (fast_blocks + kWarps - 1) / kWarps);  // a block for every warp
  for (int64_t general = std::min(general_blocks, kMostGeneralSplits);; general = (general + 1) / 2) {
    const int64_t first = general + sink_splits;
    const int64_t tiles = general > 0 ? (general_blocks + general - 1) / general : sink_splits;
    const double first_time = tiles > 0 ? kTileTime * static_cast<double>(tiles) + kBeginTime : 0;
    for (int64_t waves = 1; waves <= kMostWaves; ++waves) {
      const int64_t fitting = waves * places / std::max<int64_t>(1, row_groups);
      for (const int64_t wanted : {fitting - first, fitting}) {  // the first ones may end while the others go on
        const int64_t splits = std::clamp<int64_t>(wanted, 1, most);
        const double time = static_cast<double>(fast_blocks) / static_cast<double>(kWarps * splits) + kBeginTime;
        const double end = end_of(row_groups * first, first_time, row_groups * splits, time, places) +
                           kBeginTime * static_cast<double>(waves - 1);  // they do not end as evenly as that
        if (least >= 0 && end >= least - 1e-9) continue;
        least = end;
        best = {static_cast<int32_t>(general), static_cast<int32_t>(splits)};
      }
      if (fitting - first >= most) break;
    }
    if (general <= 1) return best;
  }
}

}  // namespace kvcache
