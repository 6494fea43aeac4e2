// q.k of 64 packed tokens on the tensor core, by one warp, where keys are levels of a table with a static range per
// channel, from before the rotary embedding: k = R(t) (s L[code] + o + outliers), R(t) the rotation of slot t.
//
// With t = middle + delta, q.R(t) x = sum over pairs of channels (x_a, x_b) of
//
//     cos(delta) (u_a x_a + u_b x_b) + sin(delta) (u_b x_a - u_a x_b),    u = R(-middle) q,
//
// so that codes are multiplied by cos(delta) and by sin(delta), and the queries, turned once per block in the registers
// that hold their fragments, take the scales: two products. The offsets are one more, of the turns themselves with
// (u_a o_a + u_b o_b, u_b o_a - u_a o_b). The middle of a block lies between two tokens, delta = -31.5 .. 31.5: turns
// are kept for its later half, and the earlier one takes them mirrored, with the other sign of the sine, which the
// crossed queries bring. Angles of a block are fractions of a turn in 64 bits, exact however long the context. A pair
// that does not rotate has frequency 0.
//
// By count in the machine code for sm_90, not measured, of 128 channels: 4.0 instructions per code of 2 bits, 4.8 of 3,
// 5.4 of 4; about 1.9 more where one number in a hundred is an outlier.
#pragma once

#include "level_codes.cuh"
#include "outlier_patches.cuh"

namespace kvcache {

constexpr int kKeySwizzle = 3;  // of keys of less than 8 bits

struct LevelKeyUnit {
  const uint8_t *codes, *table;
  const uint4* queries;    // [steps][2][lane]: of two pairs queries times scales, crossed ones; times offsets, queries
  const uint4* turns;      // [kTurnRows][pairs / 2], padded rows: (cos, sin) of a pair for two distances from the
                           // middle of a block, 2 row + 0.5 and + 1.5, and of the next pair
  const uint4* angles;     // [pairs / 2]: (cos, sin), (sin, -sin) of the middle of the block, and of the next pair
  uint8_t* patches;
  int turn_row, steps, dim;
  bool interleaved;
};

// The pair (a, b) of a query, turned back by an angle (cos, sin): (a cos + b sin, b cos - a sin). `sines`: sin, -sin.
KVCACHE_DEVICE uint32_t turned_back(uint32_t x, uint32_t angle, uint32_t sines) {
  return half2_fma(permute_bytes(x, x, 0x1032), sines, half2_multiply(x, low_twice(angle)));
}

// Tiles of the earlier half of a block take turns as they lie for the later one: of the two tokens of a row and the row
// eight further, the later one comes first, and sines have the other sign.
KVCACHE_DEVICE constexpr int first_row(int tile) { return tile < 2 ? 1 : 0; }
KVCACHE_DEVICE uint32_t sine(uint32_t turn, int tile) {
  return tile < 2 ? half2_negate(high_twice(turn)) : high_twice(turn);
}

// (cos, sin) of a fraction of a turn, in units of 2^-64.
KVCACHE_DEVICE uint32_t turn_pair(uint64_t part) {
  float c, s;
  turn_part(static_cast<uint32_t>(part >> 32), &c, &s);
  return half2_pack(c, s);
}

// The angles of the middle of a block whose first slot is `position`, by one warp. `frequencies`: of half a slot.
KVCACHE_DEVICE void turn_block(const uint64_t* frequencies, int64_t position, int pairs, uint2* angles) {
  const uint64_t middle = 2 * static_cast<uint64_t>(position) + kBlockTokens - 1;
  for (int i = static_cast<int>(threadIdx.x) % 32; i < pairs; i += 32) {
    const uint32_t angle = turn_pair(frequencies[i] * middle);
    angles[i] = {angle, high_twice(angle) ^ 0x80000000u};
  }
}

// A listed number, rotated within the block: word (a, b) of its token and pair. Patch 2i are the lower channels of the
// pairs of two steps, 2i + 1 the upper ones in the same place.
KVCACHE_DEVICE PatchEntry key_patch(const LevelKeyUnit& unit, int32_t entry, bool is_listed) {
  const uint32_t token = static_cast<uint32_t>(entry) >> 26, channel = static_cast<uint32_t>(entry) >> 16 & 1023;
  const uint32_t dim = unit.dim, upper = unit.interleaved ? channel % 2 : 2 * channel >= dim;
  const uint32_t pair = unit.interleaved ? channel / 2 : channel - upper * (dim / 2);
  if (!is_listed || channel >= dim) return {kNoPatch, 0, 0};
  const bool is_late = token >= kBlockTokens / 2;
  const uint32_t distance = token ^ (is_late ? kBlockTokens / 2 : kBlockTokens / 2 - 1);
  const uint32_t* turns = reinterpret_cast<const uint32_t*>(unit.turns + distance / 2 * unit.turn_row);
  const uint32_t turn = turns[2 * pair + distance % 2] ^ (is_late ? 0 : 0x80000000u);
  const uint32_t number = low_twice(static_cast<uint32_t>(entry));
  // (cos, sin) times a, (-sin, cos) times b
  const uint32_t word = upper == 0 ? half2_multiply(turn, number)
                                   : half2_multiply(permute_bytes(turn, turn, 0x1032), number) ^ 0x00008000u;
  // step, tile and g, t, register: see `first_row`
  const uint32_t place = (pair << 8 & 0x800) | token / 2 << 6 | (pair << 3 & 0x38) | (distance << 2 & 4);
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

// The codes of a lane, of all tokens of its rows, for the two pairs of a step and both channels of these.
template <int kBits>
struct LevelKeyCodes {
  const LevelTable<kBits> table;
  int spread, spread_plane;  // what of the places of its bytes depends on the lane

  KVCACHE_DEVICE LevelKeyCodes(const LevelKeyUnit& unit, int g, int t)
      : table(unit.table),
        spread(swizzled(t * (kBits == 4 ? 128 : 64) + 8 * g, kKeySwizzle)),
        spread_plane(swizzled(t / 2 * 64 + 8 * g, kKeySwizzle)) {}

  // Numbers as [a register][tile].
  KVCACHE_DEVICE void decode(const LevelKeyUnit& unit, int step, int t, uint32_t (&a)[4][4]) const {
    LevelWord<kBits> word;
    if (kBits == 4) {
#pragma unroll
      for (int upper = 0; upper < 2; ++upper) {
        const uint2 words = load(unit, step * 512, spread ^ swizzled(upper * 64, kKeySwizzle));
        word.load(words.x, 0, 0);
        word.decode(table, 0, a[2 * upper]);
        word.load(words.y, 0, 0);
        word.decode(table, 0, a[2 * upper + 1]);
      }
    } else {
      const uint2 words = load(unit, step * 256, spread);
      uint2 high{0, 0};
      if (kBits == 3) high = load(unit, unit.dim * kBlockTokens / 4 + step * 128, spread_plane);
      word.load(words.x, high.x, t % 2);
      word.decode(table, 0, a[0]);
      word.decode(table, 1, a[2]);
      word.load(words.y, high.y, t % 2);
      word.decode(table, 0, a[1]);
      word.decode(table, 1, a[3]);
    }
  }

 private:
  KVCACHE_DEVICE static uint2 load(const LevelKeyUnit& unit, int step, int spread) {
    return *reinterpret_cast<const uint2*>(unit.codes + swizzled_step(step, spread, kKeySwizzle));
  }
};

// c[tile] += q.k of the block.
template <int kBits, int kUnroll, int kEntries>
KVCACHE_DEVICE void level_key_products(const LevelKeyUnit& unit, const OutlierList<kEntries>& list, float (&c)[4][4]) {
  const int lane = opaque_lane(), g = lane / 4, t = lane % 4;
  const LevelKeyCodes<kBits> codes(unit, g, t);
  PatchEntry entries[kEntries];
#pragma unroll
  for (int i = 0; i < kEntries; ++i) entries[i] = key_patch(unit, list.entries[i], list.has(i));
  const uint4* const late = unit.turns + g * unit.turn_row + t;         // of the third tile
  const uint4* const early = unit.turns + (7 - g) * unit.turn_row + t;  // of the second
#pragma unroll kUnroll
  for (int step = 0; step < unit.steps; ++step) {
    uint32_t a[4][4];
    codes.decode(unit, step, t, a);
    // the queries, turned to the block
    const uint4 angles = unit.angles[4 * step + t];
    const uint4 scaled = unit.queries[64 * step + lane], others = unit.queries[64 * step + 32 + lane];
    const uint32_t direct[2] = {
        half2_fma(scaled.y, high_twice(angles.x), half2_multiply(scaled.x, low_twice(angles.x))),
        half2_fma(scaled.w, high_twice(angles.z), half2_multiply(scaled.z, low_twice(angles.z)))};
    const uint32_t crossed[2] = {
        half2_fma(scaled.x, half2_negate(high_twice(angles.x)), half2_multiply(scaled.y, low_twice(angles.x))),
        half2_fma(scaled.z, half2_negate(high_twice(angles.z)), half2_multiply(scaled.w, low_twice(angles.z)))};
    const uint32_t offset[2] = {turned_back(others.x, angles.x, angles.y), turned_back(others.y, angles.z, angles.w)};
    const uint32_t mirrored[2] = {offset[0] ^ 0x80000000u, offset[1] ^ 0x80000000u};
    // products of different tiles one after the other: those of one wait for each other
    uint4 turn[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      turn[k] = k < 2 ? early[8 * (1 - k) * unit.turn_row + 4 * step] : late[8 * (k - 2) * unit.turn_row + 4 * step];
      const uint32_t(&sums)[2] = k < 2 ? mirrored : offset;
      multiply_accumulate(c[k], turn[k].x, turn[k].y, turn[k].z, turn[k].w, sums[0], sums[1]);
    }
#pragma unroll
    for (int k = 0; k < 4; ++k)
      multiply_accumulate(c[k], half2_multiply(a[first_row(k)][k], low_twice(turn[k].x)),
                          half2_multiply(a[1 - first_row(k)][k], low_twice(turn[k].y)),
                          half2_multiply(a[2 + first_row(k)][k], low_twice(turn[k].z)),
                          half2_multiply(a[3 - first_row(k)][k], low_twice(turn[k].w)), direct[0], direct[1]);
#pragma unroll
    for (int k = 0; k < 4; ++k)
      multiply_accumulate(c[k], half2_multiply(a[first_row(k)][k], sine(turn[k].x, k)),
                          half2_multiply(a[1 - first_row(k)][k], sine(turn[k].y, k)),
                          half2_multiply(a[2 + first_row(k)][k], sine(turn[k].z, k)),
                          half2_multiply(a[3 - first_row(k)][k], sine(turn[k].w, k)), crossed[0], crossed[1]);
    if (list.is_empty()) continue;
    if (step % 2 == 0) lay_key_patch(unit, list, entries, step / 2);
    const uint32_t plain[2] = {turned_back(others.z, angles.x, angles.y), turned_back(others.w, angles.z, angles.w)};
    const uint4* patch = reinterpret_cast<const uint4*>(unit.patches) + step % 2 * 128 + lane;
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const uint4 numbers = patch[32 * k];
      multiply_accumulate(c[k], numbers.x, numbers.y, numbers.z, numbers.w, plain[0], plain[1]);
    }
    if (step % 2 == 1 || step == unit.steps - 1) clear_key_patch(unit, list, entries, step / 2);
  }
#pragma unroll
  for (int k = 0; k < 2; ++k) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float sum = c[k][i];
      c[k][i] = c[k][2 + i];
      c[k][2 + i] = sum;
    }
  }
}

template <typename Format, int kEntries>
KVCACHE_DEVICE void multiply_level_keys(const Side& side, const LevelKeyUnit& unit, const OutlierList<kEntries>& list,
                                        float (&c)[4][4]) {
  if constexpr (Format::kIsKnown) return level_key_products<Format::kNbits, 2>(unit, list, c);
  if (side.nbits == 2) return level_key_products<2, 1>(unit, list, c);
  if (side.nbits == 3) return level_key_products<3, 1>(unit, list, c);
  return level_key_products<4, 1>(unit, list, c);
}

}  // namespace kvcache
