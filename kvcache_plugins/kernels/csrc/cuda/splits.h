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

// Whether the last of the splits, if all run at once, gets what is not packed, a unit for every warp, and nothing else,
// so that the others share the packed blocks. Otherwise all have the same work: where that is so little that exact
// units are no warp's second, and where a warp would get more packed blocks than the largest share of a warp otherwise.
// So no warp has more to do, whatever an exact unit takes. Not timed. By the estimates, of 8 key-value heads of 128
// channels on 132 multiprocessors (a Hopper), the warp with the most work has that of
//     int8            3 packed blocks instead of 5 (one sequence of 32k tokens, two of 16k), 6 instead of 7 (64k);
//     KIVI, 2 bits    3 instead of 4 (one of 32k, two of 16k), 7 instead of 8 (four of 32k, mostly);
//     KIVI, 4 bits    3 instead of 4 (one of 32k), 4 instead of 5 (one of 64k, two of 32k in half of the steps);
//     int4            4 instead of 5 (one of 64k), 5 instead of 6 (four of 16k), 9 instead of 10 (four of 32k);
// and of eight sequences of 16k tokens or more nothing changes.
inline bool has_exact_split(int64_t packed, int64_t exact, int64_t exact_work, int64_t splits, int64_t row_groups,
                            int64_t places) {
  const int64_t work = packed + exact_work * exact, others = splits - 1;
  if (exact == 0 || exact > kWarps || exact_work <= 1 || row_groups * splits > places) return false;
  if (others == 0 || packed < others || work <= splits * (kWarps + exact_work - 1)) return false;
  const auto rounds = [](int64_t units) { return (units + kWarps - 1) / kWarps; };
  // the largest of the splits that begin and end in packed blocks
  const int64_t least = work / splits, left = work % splits;
  const bool is_more = left > 0 && (splits + left - 1) / left * work / splits <= packed;
  return rounds((packed + others - 1) / others) <= rounds(least + (is_more ? 1 : 0));
}

// Splits of what is left to the general kernel, which takes tiles of all row groups at once.
inline int32_t choose_general_splits(int64_t blocks, int64_t row_groups, int64_t places) {
  const int64_t at_once = std::max<int64_t>(1, 2 * places / std::max<int64_t>(1, row_groups));
  return static_cast<int32_t>(std::min({blocks, kMostGeneralSplits, at_once}));
}

}  // namespace kvcache
