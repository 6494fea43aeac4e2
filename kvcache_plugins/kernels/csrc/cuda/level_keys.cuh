// q.k of 64 packed tokens on the tensor core, by one warp, where keys are levels of a table with a static range per
// channel, from before the rotary embedding: k = R(t) (s L[code] + o + outliers), R(t) the rotation of slot t.
//
// With t = start + delta, q.R(t) x = sum over pairs of channels (x_a, x_b) of
//
//     cos(delta) (u_a x_a + u_b x_b) + sin(delta) (u_b x_a - u_a x_b),    u = R(-start) q,
//
// so that codes are multiplied by cos(delta) and by sin(delta), from a table for 64 tokens, and the queries, turned
// once per block in the registers that hold their fragments, take the scales: two products. The offsets are one more,
// of the table itself with (u_a o_a + u_b o_b, u_b o_a - u_a o_b). Angles of a block are fractions of a turn in 64
// bits, exact however long the context. A pair that does not rotate has frequency 0.
//
// By count, not measured: 4.2 instructions per code of 2 bits, 5.0 of 3, 5.8 of 4; about 1.8 more where one number in a
// hundred is an outlier.
#pragma once

#include "level_codes.cuh"
#include "outlier_patches.cuh"

namespace kvcache {

struct LevelKeyUnit {
  const uint8_t *codes, *table;
  const uint4* queries;    // [steps][2][lane]: of two pairs queries times scales, crossed ones; times offsets, queries
  const uint4* turns;      // [32][pairs / 2], padded rows: (cos, sin) of a pair for two tokens, and of the next pair
  const uint32_t* angles;  // [pairs]: (cos, sin) of the first slot of the block
  uint8_t* patches;
  int turn_row, steps, dim, swizzle;
  bool interleaved;
};

// The pair (a, b) of a query, turned back by an angle: (a cos + b sin, b cos - a sin). `sines`: sin, -sin.
KVCACHE_DEVICE uint32_t turned_back(uint32_t x, uint32_t cosines, uint32_t sines) {
  return half2_fma(permute_bytes(x, x, 0x1032), sines, half2_multiply(x, cosines));
}

// (cos, sin) of a fraction of a turn, in units of 2^-64.
KVCACHE_DEVICE uint32_t turn_pair(uint64_t part) {
  float c, s;
  turn_part(static_cast<uint32_t>(part >> 32), &c, &s);
  return half2_pack(c, s);
}

// The angles of a block, by one warp.
KVCACHE_DEVICE void turn_block(const uint64_t* frequencies, int64_t position, int pairs, uint32_t* angles) {
  for (int i = static_cast<int>(threadIdx.x) % 32; i < pairs; i += 32)
    angles[i] = turn_pair(frequencies[i] * static_cast<uint64_t>(position));
}

// A listed number, rotated within the block: word (a, b) of its token and pair. Patch 2i are the lower channels of the
// pairs of two steps, 2i + 1 the upper ones in the same place.
KVCACHE_DEVICE PatchEntry key_patch(const LevelKeyUnit& unit, int32_t entry, bool is_listed) {
  const uint32_t token = static_cast<uint32_t>(entry) >> 26, channel = static_cast<uint32_t>(entry) >> 16 & 1023;
  const uint32_t dim = unit.dim, upper = unit.interleaved ? channel % 2 : 2 * channel >= dim;
  const uint32_t pair = unit.interleaved ? channel / 2 : channel - upper * (dim / 2);
  if (!is_listed || channel >= dim) return {kNoPatch, 0, 0};
  const uint32_t* turns = reinterpret_cast<const uint32_t*>(unit.turns + token / 2 * unit.turn_row);
  const uint32_t turn = turns[2 * pair + token % 2], number = low_twice(static_cast<uint32_t>(entry));
  // (cos, sin) times a, (-sin, cos) times b
  const uint32_t word = upper == 0 ? half2_multiply(turn, number)
                                   : half2_multiply(permute_bytes(turn, turn, 0x1032), number) ^ 0x00008000u;
  // step, tile and g, t, register
  const uint32_t place = (pair << 8 & 0x800) | token / 2 << 6 | (pair << 3 & 0x38) | (token << 2 & 4);
  return {static_cast<int>(pair / 16 * 2 + upper), static_cast<int>(place), word};
}

// Lays down what a list holds of patch `which`; all was zero. Both channels of a pair may be listed: those of the lower
// ones first, the others are added.
template <int kEntries>
KVCACHE_DEVICE void lay_key_patch(const LevelKeyUnit& unit, const OutlierList<kEntries>& list,
                                  const PatchEntry (&entries)[kEntries], int which) {
#pragma unroll
  for (int upper = 0; upper < 2; ++upper) {
    const auto lay = [&](const PatchEntry& entry) {
      if (entry.patch != 2 * which + upper) return;
      uint32_t* word = reinterpret_cast<uint32_t*>(unit.patches + entry.place);
      *word = upper == 0 ? entry.number : half2_add(*word, entry.number);
    };
#pragma unroll
    for (int i = 0; i < kEntries; ++i) lay(entries[i]);
    list.for_the_rest([&](int32_t entry) { lay(key_patch(unit, entry, true)); });
    warp_barrier();
  }
}

template <int kEntries>
KVCACHE_DEVICE void clear_key_patch(const LevelKeyUnit& unit, const OutlierList<kEntries>& list,
                                    const PatchEntry (&entries)[kEntries], int which) {
  warp_barrier();  // every lane has read it
  const auto clear = [&](const PatchEntry& entry) {
    // where both channels of a pair are listed, two lanes clear one word
    if (entry.patch >> 1 == which) store_same(reinterpret_cast<uint32_t*>(unit.patches + entry.place), 0);
  };
#pragma unroll
  for (int i = 0; i < kEntries; ++i) clear(entries[i]);
  list.for_the_rest([&](int32_t entry) { clear(key_patch(unit, entry, true)); });
  warp_barrier();
}

// c[tile] += q.k of the block.
template <int kBits, int kEntries>
KVCACHE_DEVICE void level_key_products(const LevelKeyUnit& unit, const OutlierList<kEntries>& list, float (&c)[4][4]) {
  const int lane = opaque_lane(), g = lane / 4, t = lane % 4;
  const LevelTable<kBits> table(unit.table);
  PatchEntry entries[kEntries];
#pragma unroll
  for (int i = 0; i < kEntries; ++i) entries[i] = key_patch(unit, list.entries[i], list.has(i));
  const uint4* turns = unit.turns + g * unit.turn_row + t;
#pragma unroll 1
  for (int step = 0; step < unit.steps; ++step) {
    const int pair = 8 * step + 2 * t;  // this lane's pairs are `pair` and the next
    uint32_t a[4][4];                   // [a register][tile]
    if (kBits == 4) {
#pragma unroll
      for (int upper = 0; upper < 2; ++upper) {
        const uint2 words = load_8(unit.codes, (pair + upper) * 64 + 8 * g, unit.swizzle);
        LevelWord<kBits> word;
        word.load(words.x, 0, 0);
        word.decode(table, 0, a[2 * upper]);
        word.load(words.y, 0, 0);
        word.decode(table, 0, a[2 * upper + 1]);
      }
    } else {
      const uint2 words = load_8(unit.codes, pair * 32 + 8 * g, unit.swizzle);
      uint2 high{0, 0};
      if (kBits == 3) high = load_8(unit.codes, unit.dim * kBlockTokens / 4 + pair / 4 * 64 + 8 * g, unit.swizzle);
      LevelWord<kBits> word;
      word.load(words.x, high.x, t % 2);
      word.decode(table, 0, a[0]);
      word.decode(table, 1, a[2]);
      word.load(words.y, high.y, t % 2);
      word.decode(table, 0, a[1]);
      word.decode(table, 1, a[3]);
    }
    // the queries, turned to the block
    const uint2 angles = *reinterpret_cast<const uint2*>(unit.angles + pair);
    const uint4 scaled = unit.queries[64 * step + lane], others = unit.queries[64 * step + 32 + lane];
    const uint32_t cosines[2] = {low_twice(angles.x), low_twice(angles.y)};
    const uint32_t sines[2] = {high_twice(angles.x), high_twice(angles.y)};
    const uint32_t opposite[2] = {sines[0] ^ 0x80000000u, sines[1] ^ 0x80000000u};
    const uint32_t direct[2] = {half2_fma(scaled.y, sines[0], half2_multiply(scaled.x, cosines[0])),
                                half2_fma(scaled.w, sines[1], half2_multiply(scaled.z, cosines[1]))};
    const uint32_t crossed[2] = {half2_fma(scaled.x, half2_negate(sines[0]), half2_multiply(scaled.y, cosines[0])),
                                 half2_fma(scaled.z, half2_negate(sines[1]), half2_multiply(scaled.w, cosines[1]))};
    const uint32_t offset[2] = {turned_back(others.x, cosines[0], opposite[0]),
                                turned_back(others.y, cosines[1], opposite[1])};
    // products of different tiles one after the other: those of one wait for each other
    uint4 turn[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      turn[k] = turns[8 * k * unit.turn_row + 4 * step];
      multiply_accumulate(c[k], turn[k].x, turn[k].y, turn[k].z, turn[k].w, offset[0], offset[1]);
    }
#pragma unroll
    for (int k = 0; k < 4; ++k)
      multiply_accumulate(c[k], half2_multiply(a[0][k], low_twice(turn[k].x)),
                          half2_multiply(a[1][k], low_twice(turn[k].y)),
                          half2_multiply(a[2][k], low_twice(turn[k].z)),
                          half2_multiply(a[3][k], low_twice(turn[k].w)), direct[0], direct[1]);
#pragma unroll
    for (int k = 0; k < 4; ++k)
      multiply_accumulate(c[k], half2_multiply(a[0][k], high_twice(turn[k].x)),
                          half2_multiply(a[1][k], high_twice(turn[k].y)),
                          half2_multiply(a[2][k], high_twice(turn[k].z)),
                          half2_multiply(a[3][k], high_twice(turn[k].w)), crossed[0], crossed[1]);
    if (list.is_empty()) continue;
    if (step % 2 == 0) lay_key_patch(unit, list, entries, step / 2);
    const uint32_t plain[2] = {turned_back(others.z, cosines[0], opposite[0]),
                               turned_back(others.w, cosines[1], opposite[1])};
    const uint4* patch = reinterpret_cast<const uint4*>(unit.patches) + step % 2 * 128 + lane;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const uint4 numbers = patch[32 * k];
      multiply_accumulate(c[k], numbers.x, numbers.y, numbers.z, numbers.w, plain[0], plain[1]);
    }
    if (step % 2 == 1 || step == unit.steps - 1) clear_key_patch(unit, list, entries, step / 2);
  }
}

template <int kEntries>
KVCACHE_DEVICE void multiply_level_keys(const Side& side, const LevelKeyUnit& unit, const OutlierList<kEntries>& list,
                                        float (&c)[4][4]) {
  if (side.nbits == 2) return level_key_products<2>(unit, list, c);
  if (side.nbits == 3) return level_key_products<3>(unit, list, c);
  return level_key_products<4>(unit, list, c);
}

}  // namespace kvcache
