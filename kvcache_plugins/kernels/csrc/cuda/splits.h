// How many thread blocks share the slots of a row and head. Arithmetic of the host alone, which tests compile by
// itself.
#pragma once

#include <algorithm>
#include <cstdint>

#include "arguments.h"

namespace kvcache {

// Times, in that which a warp of the fast path takes for a block. Estimates.
constexpr double kBeginTime = 1;  // to begin and to be merged
constexpr int64_t kMostGeneralSplits = 128;
constexpr int64_t kMostWaves = 8;  // more only take longer

// Splits of the units of a row and head that the fast path reads, so that all of `row_groups` end soonest: if it can
// be, all thread blocks run at once, since one that begins when another has ended is waited for.
inline int32_t choose_splits(int64_t units, int64_t row_groups, int64_t places) {
  int32_t best = 1;
  double least = -1;
  const int64_t most = std::max<int64_t>(1, (units + kWarps - 1) / kWarps);  // a unit for every warp
  for (int64_t waves = 1; waves <= kMostWaves; ++waves) {
    const int64_t fitting = waves * places / std::max<int64_t>(1, row_groups);
    const int64_t splits = std::clamp<int64_t>(fitting, 1, most);
    const double time = static_cast<double>(units) / static_cast<double>(kWarps * splits) + kBeginTime;
    const int64_t needed = (row_groups * splits + places - 1) / places;
    // waves do not end as evenly as that
    const double end = static_cast<double>(needed) * time + kBeginTime * static_cast<double>(waves - 1);
    if (least < 0 || end < least - 1e-9) {
      least = end;
      best = static_cast<int32_t>(splits);
    }
    if (fitting >= most) break;
  }
  return best;
}

// Splits of what is left to the general kernel, which takes tiles of all row groups at once.
inline int32_t choose_general_splits(int64_t blocks, int64_t row_groups, int64_t places) {
  const int64_t at_once = std::max<int64_t>(1, 2 * places / std::max<int64_t>(1, row_groups));
  return static_cast<int32_t>(std::min({blocks, kMostGeneralSplits, at_once}));
}

}  // namespace kvcache
