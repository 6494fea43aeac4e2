// Attention of a warp to what is not packed, by tensor cores, as units of which it takes every fourth: the newest
// slots, and sinks.
#pragma once

#include "exact_tokens.cuh"
#include "warp_state.cuh"

namespace kvcache {

// The slot of a row's first sink: before slot 0 where a window has left some of them.
KVCACHE_DEVICE int64_t first_sink(const AttentionArguments& a, int batch) {
  return a.records.sink_start != nullptr ? a.records.sink_start[batch] : 0;
}

// The sinks of a row from slot `low` up to slot `high`, counted from the first of them; none may be left.
KVCACHE_DEVICE SlotRange sinks_between(const AttentionArguments& a, int batch, int64_t low, int64_t high) {
  const int64_t first = first_sink(a, batch), end = first + a.key.sink_length;
  const int64_t start = first > low ? first : low, stop = end < high ? end : high;
  if (start >= stop) return {0, 0, 0};  // rows without sinks have them far away
  return {static_cast<int>(start), 0, static_cast<int>(stop - start)};
}

// Slots of a block of packed keys that are sinks, which are attended to by themselves.
struct HiddenSinks {
  int first, last;  // counted from the block's start, and perhaps beyond it

  KVCACHE_DEVICE HiddenSinks(const AttentionArguments& a, int batch, int block) {
    const SlotRange sinks = sinks_between(a, batch, 0, a.exact_start);
    first = sinks.start - block * kBlockTokens;
    last = first + sinks.last;
  }
  KVCACHE_DEVICE bool has(int slot) const { return slot >= first && slot < last; }
  // Blocks from here on have none.
  KVCACHE_DEVICE static int end_block(const AttentionArguments& a, int batch) {
    const SlotRange sinks = sinks_between(a, batch, 0, a.exact_start);
    return (sinks.start + sinks.last + kBlockTokens - 1) / kBlockTokens;
  }
};

template <int kColumns>
KVCACHE_DEVICE void hide_sinks(const HiddenSinks& sinks, float (&c)[kColumns][4][4]) {
  const int g = static_cast<int>(threadIdx.x) % 32 / 4;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (!sinks.has(16 * k + 2 * g + i / 2)) continue;
#pragma unroll
      for (int n = 0; n < kColumns; ++n) c[n][k][i] = -infinity();
    }
  }
}

// Whether sinks that are left to the general kernel are among the slots of a packed block, which it then reads.
KVCACHE_DEVICE bool holds_sinks(const AttentionArguments& a, int batch, int64_t block) {
  if (a.sink_splits == 0) return false;
  const int length = a.key.sink_length > a.value.sink_length ? a.key.sink_length : a.value.sink_length;
  const int64_t first = first_sink(a, batch);
  return block * kBlockTokens < first + length && (block + 1) * kBlockTokens > first;
}

// Units beyond the packed blocks.
struct ExactUnit {
  bool is_mixed;                      // keys are packed, and values exact
  bool are_sinks, are_values_newest;  // all of them sinks; whose values are still among the newest
  int block;                          // of packed keys
  SlotRange slots;

  KVCACHE_DEVICE ExactUnit(const AttentionArguments& a, const Rows& rows, int unit) {
    const int mixed = a.mixed_end - a.mixed_begin, further = unit - a.packed_units();
    const int sinks = further - (a.exact_units() - a.sink_units);
    is_mixed = further < mixed;
    are_sinks = a.sink_units > 0 && sinks >= 0;
    are_values_newest = are_sinks && sinks > 0;
    block = is_mixed ? a.mixed_begin + further : a.exact_begin + further - mixed;
    if (are_sinks) {
      slots = sinks_between(a, rows.batch, are_values_newest ? a.fast_stop : 0,
                            are_values_newest ? a.exact_start : a.fast_stop);
      return;
    }
    slots.start = block * kBlockTokens;
    const int low = static_cast<int>(is_mixed ? a.fast_stop : a.exact_start) - slots.start;
    const int high = static_cast<int>(is_mixed ? a.exact_start : a.length) - slots.start;
    slots.first = low > 0 ? low : 0;
    slots.last = high < kBlockTokens ? high : kBlockTokens;
  }
  // Whether there is nothing of it in this row.
  KVCACHE_DEVICE bool is_empty() const { return are_sinks && slots.last == 0; }
  KVCACHE_DEVICE ExactTokens keys(const AttentionArguments& a, const Rows& rows) const {
    return tokens(a, a.key, rows, are_sinks);
  }
  KVCACHE_DEVICE ExactTokens values(const AttentionArguments& a, const Rows& rows) const {
    return tokens(a, a.value, rows, are_sinks && !are_values_newest);
  }

 private:
  KVCACHE_DEVICE static ExactTokens tokens(const AttentionArguments& a, const Side& side, const Rows& rows,
                                           bool are_sinks) {
    ExactTokens found = are_sinks ? ExactTokens::sinks(side, rows, a.records.heads,
                                                      static_cast<int>(first_sink(a, rows.batch)))
                                  : ExactTokens::newest(side, rows);
    found.first = device_memory(found.first);
    return found;
  }
};

template <bool kIsHalf, bool kPutsAside, int kColumns, int kTiles, typename Multiply>
KVCACHE_DEVICE void attend_exact_in(const AttentionArguments& a, const Rows& rows, int unit, int last,
                                    WarpState<kColumns, kTiles>& state, uint2* weights, float2* aside,
                                    Multiply multiply_mixed) {
#pragma unroll 1
  for (; unit < last; unit += kWarps) {
    float products[kColumns][4][4] = {};
    {
      const Rows mine = rows.template or_again<kPutsAside>(a);
      const ExactUnit now(a, mine, unit);
      if (now.is_empty()) continue;
      if (kPutsAside) state.template put_aside<kTiles>(aside);
      if (now.is_mixed) {
        multiply_mixed(now.block, products);
      } else {
        exact_key_products<kIsHalf>(a, mine, now.keys(a, mine), now.slots, products);
      }
      if (a.are_exact_plain == 0) adjust(a, now.slots.start, now.slots.last, products);
      if (kPutsAside) state.template take_back<kTiles>(aside);
    }
    const Rows mine = rows.template or_again<kPutsAside>(a);
    const ExactUnit now(a, mine, opaque(unit));  // worked out anew, which takes no registers meanwhile
    const uint32_t seen = hide_others(now.slots, products);
    weigh<false>(products, state, LanePairs(weights));
    exact_value_products<kIsHalf, kPutsAside ? 4 : 8>(a, now.values(a, mine), now.slots, weights, seen,
                                                      state.output);
  }
}

// This warp's units from `unit` on; `multiply_mixed` multiplies packed keys. `state` holds what codes stand for; with
// `kPutsAside` its sums wait at `aside`, 16 bytes a lane and chunk, while logits are worked out.
template <bool kPutsAside, int kColumns, int kTiles, typename Multiply>
KVCACHE_DEVICE void attend_exact(const AttentionArguments& a, const Rows& rows, int unit, int last,
                                 WarpState<kColumns, kTiles>& state, uint2* weights, float2* aside,
                                 Multiply multiply_mixed) {
  if (a.query_dtype == kFloat16) {
    attend_exact_in<true, kPutsAside>(a, rows, unit, last, state, weights, aside, multiply_mixed);
  } else {
    attend_exact_in<false, kPutsAside>(a, rows, unit, last, state, weights, aside, multiply_mixed);
  }
}

}  // namespace kvcache
