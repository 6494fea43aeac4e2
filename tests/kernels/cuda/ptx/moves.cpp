// Moves, choices, predicates and comparisons.
#include "machine.h"

namespace ptx {
namespace {

void move(Warp& w, const Instruction& i, uint32_t lanes) {
  const int width = w.kernel->widths[i.to[0]];
  for_lanes(lanes, [&](int lane) { w[i.to[0]][lane] = cut(w[i.from[0]][lane], width); });
}

template <int kWidth>
void pack(Warp& w, const Instruction& i, uint32_t lanes) {
  for_lanes(lanes, [&](int lane) { w[i.to[0]][lane] = w[i.from[0]][lane] | w[i.from[1]][lane] << kWidth; });
}

template <int kWidth>
void unpack(Warp& w, const Instruction& i, uint32_t lanes) {
  for_lanes(lanes, [&](int lane) {
    const uint64_t both = w[i.from[0]][lane];
    w[i.to[0]][lane] = cut(both, kWidth);
    w[i.to[1]][lane] = both >> kWidth;
  });
}

void select(Warp& w, const Instruction& i, uint32_t lanes) {
  const uint32_t first = w.predicates[i.from_predicates[0]];
  const int width = w.kernel->widths[i.to[0]];
  for_lanes(lanes, [&](int lane) {
    w[i.to[0]][lane] = cut(w[i.from[first >> lane & 1 ? 0 : 1]][lane], width);
  });
}

template <auto kBody>
void combine(Warp& w, const Instruction& i, uint32_t lanes) {
  const int first = i.from_predicates[0], last = i.from_predicates[i.from_predicates.size - 1];
  set_predicate(w, i.to_predicate, lanes, kBody(w.predicates[first], w.predicates[last]));
}

void set(Warp& w, const Instruction& i, uint32_t lanes) {
  const bool is_constant = i.from_predicates.size == 0;
  const uint32_t constant = is_constant && *w[i.from[0]] != 0 ? kAllLanes : 0;
  set_predicate(w, i.to_predicate, lanes, is_constant ? constant : w.predicates[i.from_predicates[0]]);
}

void nothing(Warp&, const Instruction&, uint32_t) {}

// griddepcontrol.wait
void wait_for_previous(Warp& w, const Instruction& i, uint32_t lanes) {
  if (lanes != kAllLanes) fail(w, i, "lanes are missing where the kernel before this one is waited for");
  w.is_alone = true;
}

constexpr auto kSame = [](uint64_t a) { return a; };
constexpr auto kToGeneric = [](uint64_t a) { return a + kGenericShared; };
constexpr auto kFromGeneric = [](uint64_t a) { return a - kGenericShared; };

constexpr auto kAnd = [](uint32_t a, uint32_t b) { return a & b; };
constexpr auto kOr = [](uint32_t a, uint32_t b) { return a | b; };
constexpr auto kXor = [](uint32_t a, uint32_t b) { return a ^ b; };
constexpr auto kNot = [](uint32_t a, uint32_t) { return ~a; };

constexpr auto kEqual = [](auto a, auto b) { return a == b; };
constexpr auto kUnequal = [](auto a, auto b) { return a < b || a > b; };
constexpr auto kLess = [](auto a, auto b) { return a < b; };
constexpr auto kLessEqual = [](auto a, auto b) { return a <= b; };
constexpr auto kGreater = [](auto a, auto b) { return a > b; };
constexpr auto kGreaterEqual = [](auto a, auto b) { return a >= b; };
constexpr auto kNumbers = [](float a, float b) { return a == a && b == b; };
// Or one is not a number.
template <auto kOpposite>
constexpr auto otherwise = [](auto a, auto b) { return !kOpposite(a, b); };

template <class T>
void add_comparisons(Operations& table, const char* const (&names)[6]) {
  table[names[0]] = compare<T, kEqual>;
  table[names[1]] = compare<T, kUnequal>;
  table[names[2]] = compare<T, kLess>;
  table[names[3]] = compare<T, kLessEqual>;
  table[names[4]] = compare<T, kGreater>;
  table[names[5]] = compare<T, kGreaterEqual>;
}

#define KVCACHE_COMPARISONS(type) \
  {"setp.eq." type, "setp.ne." type, "setp.lt." type, "setp.le." type, "setp.gt." type, "setp.ge." type}

}  // namespace

void add_moves(Operations& table) {
  for (const char* name : {"mov.b16", "mov.u16", "mov.b32", "mov.u32", "mov.f32", "mov.b64", "mov.u64", "mov.f64"})
    table[name] = move;
  for (const char* name : {"selp.b16", "selp.u16", "selp.b32", "selp.s32", "selp.u32", "selp.f32", "selp.b64",
                           "selp.u64", "selp.f64"})
    table[name] = select;
  table["mov.b32.pack"] = pack<16>;
  table["mov.b32.unpack"] = unpack<16>;
  table["mov.b64.pack"] = pack<32>;
  table["mov.b64.unpack"] = unpack<32>;
  table["mov.pred"] = set;
  table["and.pred"] = combine<kAnd>;
  table["or.pred"] = combine<kOr>;
  table["xor.pred"] = combine<kXor>;
  table["not.pred"] = combine<kNot>;
  table["cvta.to.global.u64"] = unary<uint64_t, uint64_t, kSame>;
  table["cvta.shared.u64"] = unary<uint64_t, uint64_t, kToGeneric>;
  table["cvta.to.shared.u64"] = unary<uint64_t, uint64_t, kFromGeneric>;
  table["membar.sys"] = nothing;  // threads run in an order here
  table["griddepcontrol.launch_dependents"] = nothing;  // kernels run one after the other
  table["griddepcontrol.wait"] = wait_for_previous;
  add_comparisons<int16_t>(table, KVCACHE_COMPARISONS("s16"));
  add_comparisons<uint16_t>(table, KVCACHE_COMPARISONS("u16"));
  add_comparisons<uint16_t>(table, KVCACHE_COMPARISONS("b16"));
  add_comparisons<int32_t>(table, KVCACHE_COMPARISONS("s32"));
  add_comparisons<uint32_t>(table, KVCACHE_COMPARISONS("u32"));
  add_comparisons<uint32_t>(table, KVCACHE_COMPARISONS("b32"));
  add_comparisons<int64_t>(table, KVCACHE_COMPARISONS("s64"));
  add_comparisons<uint64_t>(table, KVCACHE_COMPARISONS("u64"));
  add_comparisons<uint64_t>(table, KVCACHE_COMPARISONS("b64"));
  add_comparisons<float>(table, KVCACHE_COMPARISONS("f32"));
  add_comparisons<double>(table, KVCACHE_COMPARISONS("f64"));
  table["setp.equ.f32"] = compare<float, otherwise<kUnequal>>;
  table["setp.neu.f32"] = compare<float, otherwise<kEqual>>;
  table["setp.ltu.f32"] = compare<float, otherwise<kGreaterEqual>>;
  table["setp.leu.f32"] = compare<float, otherwise<kGreater>>;
  table["setp.gtu.f32"] = compare<float, otherwise<kLessEqual>>;
  table["setp.geu.f32"] = compare<float, otherwise<kLess>>;
  table["setp.num.f32"] = compare<float, kNumbers>;
  table["setp.nan.f32"] = compare<float, otherwise<kNumbers>>;
}

const Operations& operations() {
  static const Operations all = [] {
    Operations table;
    for (const auto add : {add_integers, add_floats, add_halves, add_moves, add_collectives, add_copies}) add(table);
    return table;
  }();
  return all;
}

}  // namespace ptx
