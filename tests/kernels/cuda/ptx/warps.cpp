// Runs a warp. Lanes that a branch parts take their paths one after the other, and go on together where the paths meet:
// the reconvergence of the manuals, and the least that code may count on for instructions that want all lanes.
#include "machine.h"

namespace ptx {
namespace {

void check_operands(const Warp& w, const Instruction& i, uint32_t lanes) {
  for (const int number : i.from)
    if ((w.defined[number] & lanes) != lanes) fail(w, i, "uses a register that has not been set");
  for (const int number : i.from_predicates)
    if ((w.defined_predicates[number] & lanes) != lanes) fail(w, i, "uses a predicate that has not been set");
}

// Those of the active lanes in which the guard holds.
uint32_t guarded(const Warp& w, const Instruction& i) {
  if (i.guard < 0) return w.active;
  if ((w.defined_predicates[i.guard] & w.active) != w.active) fail(w, i, "is guarded by a predicate that is not set");
  return w.active & (i.is_guard_negated ? ~w.predicates[i.guard] : w.predicates[i.guard]);
}

void operate(Warp& w, const Instruction& i, uint32_t lanes) {
  if (i.is_aligned && lanes != kAllLanes) fail(w, i, "lanes are missing where all must come: %08x", lanes);
  if (lanes == 0) return;
  check_operands(w, i, lanes);
  i.operation(w, i, lanes);
  for (const int number : i.to) w.defined[number] |= lanes;
  if (i.to_predicate >= 0) w.defined_predicates[i.to_predicate] |= lanes;
}

// Parts the running path: first those who jump, then the others.
void part(Warp& w, const Instruction& i, int at, uint32_t jumping) {
  Path& path = w.paths.back();
  const uint32_t staying = path.lanes & ~jumping;
  if (i.join < 0) path.lanes = 0;  // they do not meet
  else path.at = i.join;
  w.paths.push_back({at + 1, staying, i.join});
  w.paths.push_back({i.target, jumping, i.join});
}

// Runs the topmost path; returns whether to go on with what is topmost then.
bool follow(Warp& w) {
  const Instruction* code = w.kernel->code.data();
  int at = w.paths.back().at;
  const int join = w.paths.back().join;
  for (; at != join; ++at) {
    const Instruction& i = code[at];
    w.active = w.paths.back().lanes;
    const uint32_t lanes = guarded(w, i);
    if (w.counts != nullptr) ++w.counts[at].times;
    switch (i.control) {
      case Control::kNone:
        operate(w, i, lanes);
        break;
      case Control::kBranch:
        if (lanes != 0 && lanes != w.active) {
          if (i.is_aligned) fail(w, i, "lanes part where all must go the same way: %08x", lanes);
          part(w, i, at, lanes);
          return true;
        }
        if (lanes != 0) at = i.target - 1;
        break;
      case Control::kReturn:
        for (Path& path : w.paths) path.lanes &= ~lanes;
        if (w.paths.back().lanes == 0) return true;
        break;
      case Control::kBlockBarrier:
      case Control::kWarpBarrier:
        if (lanes != kAllLanes) fail(w, i, "lanes are missing at a barrier: %08x", lanes);
        ++w.step;
        if (i.control == Control::kWarpBarrier) break;
        w.paths.back().at = at + 1;
        w.state = Warp::State::kAtBarrier;
        return false;
    }
  }
  w.paths.back().at = at;
  return true;
}

}  // namespace

void run(Warp& w) {
  do {
    while (!w.paths.empty() && (w.paths.back().lanes == 0 || w.paths.back().at == w.paths.back().join))
      w.paths.pop_back();
    if (w.paths.empty()) {
      w.state = Warp::State::kDone;
      return;
    }
  } while (follow(w));
}

}  // namespace ptx
