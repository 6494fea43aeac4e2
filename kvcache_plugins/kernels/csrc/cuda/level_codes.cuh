// Codes that stand for levels of a table (KVQuant): how they become fp16 numbers in registers, and where the fast path
// for them keeps what in shared memory.
//
// A table of up to 16 fp16 numbers is held as bytes, lower and upper halves apart, so that a byte permutation looks up
// four codes at once: its selector is four nibbles, and 8 entries are two registers. Of 16 entries both halves are
// looked up, and a third permutation chooses by the codes' highest bits. 22 instructions turn 8 codes of 4 bits into
// numbers, 30 turn 16 codes of 3 bits, 22 turn 16 codes of 2 bits.
#pragma once

#include "fast_lanes.cuh"

namespace kvcache {

constexpr int kLevelBytes = 32;  // of a table: 16 lower bytes, 16 upper ones
constexpr int kTurnRows = kBlockTokens / 4;  // of the turns of half a block, two tokens each

template <int kBits>
struct LevelTable {
  static constexpr int kWords = kBits == 4 ? 4 : 2;
  uint32_t low[kWords], high[kWords];

  KVCACHE_DEVICE explicit LevelTable(const uint8_t* table) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      low[i] = load_4(table + 4 * i);
      high[i] = load_4(table + 16 + 4 * i);
    }
  }
};

// The numbers (a, b) of two places of a word: neighbours, or of 2 and 3 bits one and the next but one.
struct LevelPairs {
  uint32_t first, second;
};

// `codes`: nibbles a, a', b, b' in the low half; becomes (a, b) and (a', b'). `upper`: of 4 bits, which byte of each of
// the four is meant, of those that the lower and the upper eight entries give.
template <int kBits>
KVCACHE_DEVICE LevelPairs look_up(const LevelTable<kBits>& table, uint32_t codes, uint32_t upper) {
  constexpr int kThird = kBits == 4 ? 2 : 0, kFourth = kBits == 4 ? 3 : 0;
  uint32_t low = permute_bytes(table.low[0], table.low[1], codes);
  uint32_t high = permute_bytes(table.high[0], table.high[1], codes);
  if (kBits == 4) {
    low = permute_bytes(low, permute_bytes(table.low[kThird], table.low[kFourth], codes), upper);
    high = permute_bytes(high, permute_bytes(table.high[kThird], table.high[kFourth], codes), upper);
  }
  return {permute_bytes(low, high, 0x6240), permute_bytes(low, high, 0x7351)};
}

// A word of codes, ready to be looked up: of 4 bits places 0 .. 3 of its two halves (a in the lower, b in the upper),
// of 2 and 3 bits two such groups, one per byte.
template <int kBits>
struct LevelWord {
  static constexpr int kGroups = kBits == 4 ? 1 : 2;
  uint32_t first, second;  // even and odd places; of 4 bits the lower three bits of codes, and `upper`

  // `high`, `parity`: see high_bits
  KVCACHE_DEVICE void load(uint32_t word, uint32_t plane, int parity) {
    word = permute_bytes(word, word, 0x3120);  // bytes a, b, a', b'
    if (kBits == 4) {
      first = word & 0x77777777u;
      second = and_or(word >> 1, 0x44444444u, 0x32103210u);
    } else {
      const uint32_t high = kBits == 3 ? permute_bytes(plane, plane >> 4, parity == 0 ? 0x6420u : 0x7531u) : 0;
      const Nibbles nibbles = spread<kBits>(word, high);
      first = nibbles.even;
      second = nibbles.odd;
    }
  }
  // The numbers of places 0 .. 3 of a group.
  KVCACHE_DEVICE void decode(const LevelTable<kBits>& table, int group, uint32_t (&numbers)[4]) const {
    LevelPairs early, late;
    if (kBits == 4) {
      early = look_up(table, first, second);
      late = look_up(table, first >> 16, second >> 16);
    } else {
      const LevelPairs even = look_up(table, first >> 16 * group, 0), odd = look_up(table, second >> 16 * group, 0);
      early = {even.first, odd.first};
      late = {even.second, odd.second};
    }
    numbers[0] = early.first;
    numbers[1] = early.second;
    numbers[2] = late.first;
    numbers[3] = late.second;
  }
};

// The numbers of one code in the low bits of either half of a word.
template <int kBits>
KVCACHE_DEVICE uint32_t level_pair(const LevelTable<kBits>& table, uint32_t codes) {
  codes |= codes >> 8;  // nibbles 0 and 2
  const uint32_t upper = kBits == 4 ? and_or(codes >> 1, 0x4444u, 0x3210u) : 0;
  return look_up(table, codes & 0x7777u, upper).first;
}

// Dynamic shared memory of the fast path for levels, in bytes from its start.
struct LevelMemory {
  int queries, row_scale, sinks_end, frequencies, levels, turns, angles, weights, patches, bytes;
  int turn_row;     // entries of 16 bytes
  int patch_bytes;  // of a warp

  KVCACHE_BOTH explicit LevelMemory(const AttentionArguments& a) {
    const int pairs = a.key.head_dim / 2;
    queries = a.ring_bytes;
    row_scale = queries + pairs / 8 * 1024;
    sinks_end = row_scale + 4 * kMostRows;
    frequencies = row_scale + FastMemory::aligned(4 * kMostRows + 4);
    levels = frequencies + FastMemory::aligned(8 * pairs);
    turns = levels + FastMemory::aligned(2 * kLevelBytes);
    turn_row = pairs / 2 + 4;
    angles = turns + kTurnRows * turn_row * 16;
    weights = angles + kWarps * FastMemory::aligned(8 * pairs);
    patches = weights + kWarps * 1024;
    // two steps of the keys, a tile of the values
    patch_bytes = a.key.outliers == nullptr && a.value.outliers == nullptr ? 0
                  : a.value.head_dim <= 128                                ? 4096
                                                                           : 8192;
    bytes = patches + kWarps * patch_bytes;
  }
};

}  // namespace kvcache
