// What the lanes of a warp do together: shuffles, votes, and the tensor core.
#include <algorithm>

#include "../tensor_core.h"
#include "halves.h"
#include "machine.h"

namespace ptx {

long products = 0;

namespace {

// Lanes name who takes part: that must be who has come.
void check_members(Warp& w, const Instruction& i, uint32_t lanes, int mask) {
  for_lanes(lanes, [&](int lane) {
    const auto wanted = static_cast<uint32_t>(w[mask][lane]);
    if (wanted != lanes) fail(w, i, "lanes %08x are to take part, and %08x have come", wanted, lanes);
  });
}

// kXor: from the lane whose number differs by the operand, else from the lane of that number; within segments, as the
// third operand has them. A lane whose source is outside keeps its own.
template <bool kXor>
void shuffle(Warp& w, const Instruction& i, uint32_t lanes) {
  check_members(w, i, lanes, i.from[3]);
  uint64_t received[kLanes];
  uint32_t is_inside = 0;
  for_lanes(lanes, [&](int lane) {
    const uint32_t operand = w[i.from[1]][lane] & 31, clamp = w[i.from[2]][lane] & 31;
    const uint32_t segment = w[i.from[2]][lane] >> 8 & 31, first = lane & segment, last = first | (clamp & ~segment);
    uint32_t source = kXor ? lane ^ operand : first | (operand & ~segment);
    if (source <= last) is_inside |= 1u << lane;
    else source = lane;
    if ((lanes >> source & 1) == 0) fail(w, i, "lane %d wants a number of lane %u, which has not come", lane, source);
    received[lane] = w[i.from[0]][source];
  });
  for_lanes(lanes, [&](int lane) { w[i.to[0]][lane] = received[lane]; });
  if (i.to_predicate >= 0) set_predicate(w, i.to_predicate, lanes, is_inside);
}

void vote_any(Warp& w, const Instruction& i, uint32_t lanes) {
  check_members(w, i, lanes, i.from[0]);
  set_predicate(w, i.to_predicate, lanes, (w.predicates[i.from_predicates[0]] & lanes) != 0 ? kAllLanes : 0);
}

void largest(Warp& w, const Instruction& i, uint32_t lanes) {
  check_members(w, i, lanes, i.from[1]);
  uint64_t found = 0;
  for_lanes(lanes, [&](int lane) { found = std::max(found, w[i.from[0]][lane]); });
  for_lanes(lanes, [&](int lane) { w[i.to[0]][lane] = found; });
}

void sum(Warp& w, const Instruction& i, uint32_t lanes) {
  check_members(w, i, lanes, i.from[1]);
  uint32_t found = 0;
  for_lanes(lanes, [&](int lane) { found += static_cast<uint32_t>(w[i.from[0]][lane]); });
  for_lanes(lanes, [&](int lane) { w[i.to[0]][lane] = found; });
}

// A bit for every lane; 0 of those who do not take part.
void vote(Warp& w, const Instruction& i, uint32_t lanes) {
  check_members(w, i, lanes, i.from[0]);
  const uint32_t votes = w.predicates[i.from_predicates[0]] & lanes;
  for_lanes(lanes, [&](int lane) { w[i.to[0]][lane] = votes; });
}

uint16_t half_of(uint64_t pair, int which) { return static_cast<uint16_t>(pair >> 16 * which); }

// Lane 4 r + c holds columns 2 c and 2 c + 1 of row r, of a matrix and of its transpose.
void transpose(Warp& w, const Instruction& i, uint32_t) {
  uint64_t matrix[8][8];
  for (int lane = 0; lane < kLanes; ++lane)
    for (int k = 0; k < 2; ++k) matrix[lane / 4][lane % 4 * 2 + k] = half_of(w[i.from[0]][lane], k);
  for (int lane = 0; lane < kLanes; ++lane)
    w[i.to[0]][lane] = matrix[lane % 4 * 2][lane / 4] | matrix[lane % 4 * 2 + 1][lane / 4] << 16;
}

// d = a b + c: a is 16 x 16, b 16 x 8. Lane 4 g + t holds
//   of a: rows g, g + 8, g, g + 8, columns 2 t and 2 t + 1, and of the last two words 8 columns further;
//   of b: column g, rows 2 t and 2 t + 1, and of the second word 8 rows further;
//   of c and d: rows g, g, g + 8, g + 8, columns 2 t, 2 t + 1, 2 t, 2 t + 1.
template <bool kAreBfloats>
void multiply(Warp& w, const Instruction& i, uint32_t) {
  const auto number_of = [](uint16_t bits) {
    return kAreBfloats ? number<float>(uint64_t{bits} << 16) : static_cast<float>(half_value(bits));
  };
  ++products;
  tensor_core::Tile tile;
  for (int lane = 0; lane < kLanes; ++lane) {
    const int g = lane / 4, t = lane % 4;
    for (int k = 0; k < 8; ++k) {
      const int word = k / 2, row = g + word % 2 * 8, column = 2 * t + k % 2 + word / 2 * 8;
      tile.a[row][column] = number_of(half_of(w[i.from[word]][lane], k % 2));
    }
    for (int k = 0; k < 4; ++k) {
      const int word = k / 2, row = 2 * t + k % 2 + word * 8;
      tile.b[row][g] = number_of(half_of(w[i.from[4 + word]][lane], k % 2));
    }
  }
  const auto each_sum = [&](auto&& act) {
    for (int lane = 0; lane < kLanes; ++lane)
      for (int k = 0; k < 4; ++k) act(tile.c[lane / 4 + k / 2 * 8][lane % 4 * 2 + k % 2], k, lane);
  };
  each_sum([&](float& sum, int k, int lane) { sum = number<float>(w[i.from[6 + k]][lane]); });
  tensor_core::multiply(tile, kAreBfloats);
  each_sum([&](float sum, int k, int lane) { w[i.to[k]][lane] = bits_of(sum); });
}

}  // namespace

void add_collectives(Operations& table) {
  table["shfl.sync.idx.b32"] = shuffle<false>;
  table["shfl.sync.bfly.b32"] = shuffle<true>;
  table["vote.sync.any.pred"] = vote_any;
  table["vote.sync.ballot.b32"] = vote;
  table["redux.sync.max.u32"] = largest;
  table["redux.sync.add.s32"] = table["redux.sync.add.u32"] = sum;
  table["movmatrix.sync.aligned.m8n8.trans.b16"] = transpose;
  table["mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32"] = multiply<false>;
  table["mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"] = multiply<true>;
}

}  // namespace ptx
