// Decode attention to packed blocks of any format and size, and to exact slots.
//
// There is code for every format, and all of it once: one loop goes over packed blocks and over what is exact. On an
// H200 the kernels of this file, which then left what is exact to other thread blocks, took 1500 to 1800 instructions a
// block and warp, as the counters have it, and waited for them.
#pragma once

#include "fast_attention.cuh"

namespace kvcache {

// Sets the metadata of values to zero where all that share them are sinks, by one warp: see `clear_metadata`.
KVCACHE_DEVICE void clear_metadata_of_sinks(const Side& side, uint8_t* unit, const HiddenSinks& sinks) {
  for (const int offset : {side.scale_offset, side.minimum_offset}) {
    if (offset < 0) continue;
    uint16_t* const field = reinterpret_cast<uint16_t*>(unit + (offset - side.codes_offset));
    for (int row = 0; row < kBlockTokens / side.group_tokens; ++row) {
      const int first = row * side.group_tokens;
      if (!sinks.has(first) || !sinks.has(first + side.group_tokens - 1)) continue;
      for (int i = static_cast<int>(threadIdx.x) % 32; i < side.width; i += 32) field[row * side.width + i] = 0;
    }
  }
  warp_barrier();
}

// Multiplies the keys of a unit beyond the packed blocks, if they are exact.
template <int kColumns>
KVCACHE_DEVICE void multiply_exact_keys(const AttentionArguments& a, const Rows& rows, const ExactUnit& unit,
                                        float (&products)[kColumns][4][4]) {
  if (a.query_dtype == kFloat16) {
    exact_key_products<true>(a, rows, unit.keys(a, rows), unit.slots, products);
  } else {
    exact_key_products<false>(a, rows, unit.keys(a, rows), unit.slots, products);
  }
}

// Multiplies its values by `weights`; `seen`: see `hide_others`.
template <int kColumns, int kTiles>
KVCACHE_DEVICE void multiply_exact_values(const AttentionArguments& a, const Rows& rows, const ExactUnit& unit,
                                          const uint2* weights, uint32_t seen,
                                          WarpState<kColumns, kTiles>& state) {
  if (a.query_dtype == kFloat16) {
    exact_value_products<true, 4>(a, unit.values(a, rows), unit.slots, weights, seen, state.output);
  } else {
    exact_value_products<false, 4>(a, unit.values(a, rows), unit.slots, weights, seen, state.output);
  }
}

// One split: a range of units, packed blocks first, of which every fourth is a warp's. Its results go to `place` among
// those of all. Up to `8 kColumns` query rows, values of up to `16 kTiles` channels. What is needed in rare units alone
// is worked out there, anew in each of their parts, and takes no registers meanwhile.
template <int kColumns, int kTiles>
KVCACHE_DEVICE void attend_any(const AttentionArguments& a, uint8_t* shared, int split, int place) {
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const FastMemory memory(a, kColumns);
  UnitRing<false> ring(a, Rows::mine(a), shared, SplitUnits(a, split));
  {
    const Rows rows = Rows::mine(a);
    const KeptQueries<8 * kColumns, kMostFastChannels> queries(a, rows);
    if (a.sink_units > 0 && threadIdx.x == 0)
      *reinterpret_cast<int*>(shared + memory.sinks_end) = HiddenSinks::end_block(a, rows.batch);
    ring.begin_copies();
    prepare_queries(a, rows, queries, shared, memory);
  }
  block_barrier();

  const auto has_sinks = [&](int block) {
    return a.sink_units > 0 && block < *reinterpret_cast<const int*>(shared + opaque(memory.sinks_end));
  };
  uint2* const weights = reinterpret_cast<uint2*>(shared + memory.weights) + warp * kColumns * 128;
  KeyUnit key = key_unit(a, shared, memory);
  ValueUnit value = value_unit(a, weights);
  WarpState<kColumns, kTiles> state;
  state.clear(kLeastExponent);
  for (int block = ring.begin;; block += kWarps) {
    const bool is_packed = block < ring.end;
    if (!is_packed) {
      if (block - kWarps < ring.end) {  // the first such
        copy_wait<0>();
        leave_codes(a, value, Rows::mine_again(a), state);
      }
      if (block - a.fast_begin >= SplitUnits(a, opaque(split)).last) break;
    }
    float products[kColumns][4][4] = {};
    const uint8_t* codes = nullptr;  // of packed keys
    int block_of_keys = block;
    if (is_packed) {
      uint8_t* const unit = ring.template next<true>(block);
      if (holds_sinks(a, Rows::mine_again(a).batch, block)) {
        ring.template next<false>(block);
        continue;
      }
      codes = unit;
    } else {
      const Rows rows = Rows::mine_again(a);
      const ExactUnit unit(a, rows, block - a.fast_begin);
      if (unit.is_empty()) continue;
      if (unit.is_mixed) {
        codes = ring.fetch_keys(a.records.of(rows.batch, rows.head) + unit.block * a.records.record_bytes);
        block_of_keys = unit.block;
      } else {
        multiply_exact_keys(a, rows, unit, products);
      }
    }
    if (codes != nullptr) {
      point_to_block(a, key, codes, block_of_keys);
      multiply_keys(a.key, key, products);
      place_products(a, key, products);
    }
    SlotRange slots = {block * kBlockTokens, 0, a.tokens_of(block)};
    if (!is_packed) slots = ExactUnit(a, Rows::mine_again(a), opaque(block) - a.fast_begin).slots;
    const bool is_plain = is_packed ? block >= a.plain_begin && block < a.plain_end : a.are_exact_plain != 0;
    if (!is_plain) adjust(a, slots.start, slots.last, products);
    if (codes != nullptr && has_sinks(block_of_keys))
      hide_sinks(HiddenSinks(a, Rows::mine_again(a).batch, block_of_keys), products);
    uint32_t seen = 0;  // see `hide_others`
    if (!is_packed) seen = hide_others(slots, products);
    weigh<true>(products, state, LanePairs(weights));
    if (is_packed) {
      uint8_t* const unit = ring.template next<false>(block);
      if (block >= a.whole_end) clear_metadata(a.value, unit, a.tokens_of(opaque(block)));
      if (has_sinks(block))
        clear_metadata_of_sinks(a.value, unit, HiddenSinks(a, Rows::mine_again(a).batch, block));
      point_to_block(a, value, unit);
      value.shrink = state.template make_room<false>(value);
      multiply_values(a.value, value, state.output, state.minima);
      if (static_cast<unsigned>(block) / kWarps % kFoldBlocks == kFoldBlocks - 1) fold_minima(a.value, value, state);
    } else {
      const Rows rows = Rows::mine_again(a);
      multiply_exact_values(a, rows, ExactUnit(a, rows, opaque(block) - a.fast_begin), weights, seen, state);
    }
  }
  finish(a, Rows::mine_again(a), shared, state, place);
}

}  // namespace kvcache
