// Decode attention to packed blocks of a format that the compiler knows (known_formats.h), and to the newest slots.
//
// On an H200 (32 query and 8 key-value heads of 128, 8 sequences of 32k tokens, bf16) these kernels read 8 bits with 95
// to 99 % of the bandwidth of a copy and 4 bits with 85 to 92 %; 2 bits, with 69 % by 16 warps, are bound by
// instructions and what these wait for: by count in the machine code some 900 a block and warp, which a scheduler of
// 1.8 GHz issues in less than half of the time that they took. A mask or another bias takes some 410 more (as PTX).
//
// Not timed are, since: 20 warps for 2 bits, of 96 registers; weights that stay in registers; exponents on which lanes
// seldom have to agree; metadata of KIVI's channels that lie together; and first blocks that are asked for early. By
// count for sm_90 a block and warp take 785 instructions instead of 799 (int8), 819 instead of 827 (int4), 930 instead
// of 990 and 847 instead of 895 (KIVI's 4 bits in groups of 32 and 64), 906 instead of 973 (2 bits).
#pragma once

#include "fast_attention.cuh"
#include "known_formats.h"

namespace kvcache {

template <typename Format, int kUnroll>
KVCACHE_DEVICE void multiply_block(const AttentionArguments& a, KeyUnit& key, const uint8_t* codes, int block,
                                   float (&products)[1][4][4]) {
  point_to_block(a, key, codes, block);
  multiply_known_keys<Format, kUnroll>(key, products);
  place_products(a, key, products);
}

// One split: a range of units, packed blocks first, of which every fourth is a warp's. Its results go to `place` among
// those of all.
template <typename Format>
KVCACHE_DEVICE void attend_known(const AttentionArguments& a, uint8_t* shared, int split, int place) {
  constexpr int kTiles = Format::kChunks, kUnroll = 4;
  const int warp = opaque(static_cast<int>(threadIdx.x)) / 32;  // whose register is not that of `merge_warps`
  const FastMemory memory(a, 1);
  UnitRing<true> ring(a, Rows::mine(a), shared, SplitUnits(a, split));
  const KeptQueries<8, 16 * kTiles> queries(a, Rows::mine(a));
  ring.begin_copies();  // nothing else in shared memory has to wait for them
  prepare_queries(a, Rows::mine(a), queries, shared, memory);
  block_barrier();

  uint2* const weights = reinterpret_cast<uint2*>(shared + memory.weights) + warp * 128;
  KeyUnit key = key_unit(a, shared, memory);
  ValueUnit value = value_unit(a, weights);
  WarpState<1, kTiles> state;
  state.clear(kLeastExponent);
  int block = ring.begin;
  for (; block < ring.end; block += kWarps) {
    uint8_t* place_of_unit = ring.template next<true>(block);
    // not for the logits, which are replaced whatever they are: without it the compiler spills registers of 2 bits
    if (block >= a.whole_end) clear_metadata(a.key, place_of_unit, a.tokens_of(block));
    float products[1][4][4] = {};
    multiply_block<Format, kUnroll>(a, key, place_of_unit, block, products);
    if (block < a.plain_begin || block >= a.plain_end) {
      float2* const aside = reinterpret_cast<float2*>(weights);  // which are in use for exact tokens alone
      if (Format::kPutsAside) state.template put_aside<2>(aside);
      adjust(a, block * kBlockTokens, a.tokens_of(block), products);
      if (Format::kPutsAside) state.template take_back<2>(aside);
    }
    uint2 held[4];  // weights
    weigh<true>(products, state, held);
    place_of_unit = ring.template next<false>(block);
    if (block >= a.whole_end) clear_metadata(a.value, place_of_unit, a.tokens_of(opaque(block)));
    point_to_block(a, value, place_of_unit);
    value.shrink = state.template make_room<true>(value);
    value_products<Format::kNbits, Format::kKind, true, kTiles, Format::kValueGroups, kUnroll>(
        value, held, state.output, state.minima);
    if (static_cast<unsigned>(block) / kWarps % kFoldBlocks == kFoldBlocks - 1) fold_minima(a.value, value, state);
  }
  copy_wait<0>();

  const Rows rows = Rows::mine_again(a);
  leave_codes(a, value, rows, state);
  const int unit = block - a.fast_begin;  // the first of this warp's that is no packed block
  const int last = SplitUnits(a, opaque(split)).last;
  constexpr bool kPutsAside = Format::kPutsAside;
  float2* const aside = kPutsAside ? reinterpret_cast<float2*>(ring.unused()) : nullptr;
  attend_exact<kPutsAside>(a, rows, unit, last, state, weights, aside, [&](int at, float(&products)[1][4][4]) {
    const Rows mine = rows.template or_again<kPutsAside>(a);
    const uint8_t* record = a.records.of(mine.batch, mine.head) + at * a.records.record_bytes;
    multiply_block<Format, 1>(a, key, ring.fetch_keys(record), at, products);
  });
  finish(a, rows.template or_again<kPutsAside>(a), shared, state, place);
}

}  // namespace kvcache
