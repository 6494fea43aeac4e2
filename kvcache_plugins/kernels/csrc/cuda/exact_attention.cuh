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

// The sinks of a row that lie among the packed slots, counted from the first of them; none may be left.
KVCACHE_DEVICE SlotRange packed_sinks(const AttentionArguments& a, int batch) {
  const int64_t first = first_sink(a, batch), end = first + a.key.sink_length;
  if (first >= a.fast_stop) return {0, 0, 0};  // rows without sinks have them far away
  const int64_t start = first > 0 ? first : 0, stop = end < a.fast_stop ? end : a.fast_stop;
  return {static_cast<int>(start), 0, static_cast<int>(stop - start)};
}

// Units beyond the packed blocks.
struct ExactUnit {
  bool is_mixed, are_sinks;  // keys are packed; all of them sinks
  int block;                 // of packed keys
  SlotRange slots;

  KVCACHE_DEVICE ExactUnit(const AttentionArguments& a, const Rows& rows, int unit) {
    const int mixed = a.mixed_end - a.mixed_begin, further = unit - a.packed_units();
    is_mixed = further < mixed;
    are_sinks = a.sink_units > 0 && further == a.exact_units() - 1;
    block = is_mixed ? a.mixed_begin + further : a.exact_begin + further - mixed;
    if (are_sinks) {
      slots = packed_sinks(a, rows.batch);
      return;
    }
    slots.start = block * kBlockTokens;
    const int low = static_cast<int>(is_mixed ? a.fast_stop : a.exact_start) - slots.start;
    const int high = static_cast<int>(is_mixed ? a.exact_start : a.length) - slots.start;
    slots.first = low > 0 ? low : 0;
    slots.last = high < kBlockTokens ? high : kBlockTokens;
  }
  KVCACHE_DEVICE ExactTokens tokens(const AttentionArguments& a, const Side& side, const Rows& rows) const {
    ExactTokens found = are_sinks ? ExactTokens::sinks(side, rows, a.records.heads,
                                                      static_cast<int>(first_sink(a, rows.batch)))
                                  : ExactTokens::newest(side, rows);
    found.first = device_memory(found.first);
    return found;
  }
  // Whether products are logits.
  KVCACHE_DEVICE bool is_plain(const AttentionArguments& a) const {
    return a.are_exact_plain != 0 && !(are_sinks && a.window > 0);
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
      if (now.are_sinks && now.slots.last == 0) continue;
      if (kPutsAside) state.template put_aside<kTiles>(aside);
      if (now.is_mixed) {
        multiply_mixed(now.block, products);
      } else {
        exact_key_products<kIsHalf>(a, mine, now.tokens(a, a.key, mine), now.slots, products);
      }
      if (!now.is_plain(a)) adjust(a, now.slots.start, now.slots.last, products);
      if (kPutsAside) state.template take_back<kTiles>(aside);
    }
    const Rows mine = rows.template or_again<kPutsAside>(a);
    const ExactUnit now(a, mine, opaque(unit));  // worked out anew, which takes no registers meanwhile
    const uint32_t seen = hide_others(now.slots, products);
    weigh<false>(products, state, weights);
    warp_barrier();  // every lane sees the weights
    exact_value_products<kIsHalf, kPutsAside ? 4 : 8>(a, now.tokens(a, a.value, mine), now.slots, weights, seen,
                                                      state.output);
    warp_barrier();  // and is done with them
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
