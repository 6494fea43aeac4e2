// One row of logits, which stay in the first-level cache up to some thousands: their maximum, their exponentials, what
// these add up to, and what of them tokens receive (receive_weights.h).
#include "portable_numbers.inl"
#include "receive_weights.h"

namespace kvcache {
namespace {  // see portable_numbers.inl

// Calls `visit(place, count)` for vectors of a row, the last of which may have fewer lanes.
template <typename Visit>
inline __attribute__((always_inline)) void for_vectors(int64_t length, const Visit& visit) {
  int64_t i = 0;
  for (; i + kLanes <= length; i += kLanes) visit(i, int64_t{kLanes});
  if (i < length) visit(i, length - i);
}

// `count` numbers, then `rest`.
inline __attribute__((always_inline)) Floats load_some(const float* from, int64_t count, float rest) {
  if (count == kLanes) return load<Floats>(from);
  Floats v = splat(rest);
  std::memcpy(&v, from, sizeof(float) * count);
  return v;
}

inline __attribute__((always_inline)) void store_some(float* to, Floats v, int64_t count) {
  std::memcpy(to, &v, sizeof(float) * count);
}

inline __attribute__((always_inline)) void receive(float* logits, int64_t length, float sink, bool is_strongest,
                                                   float* received) {
  Floats best = splat(sink);
  for_vectors(length, [&](int64_t i, int64_t count) __attribute__((always_inline)) {
    const Floats v = load_some(logits + i, count, -kInfinity);
    best = v > best ? v : best;
  });
  const float largest = largest_lane(best);
  if (largest == -kInfinity) return;
  Floats sums = Floats{};
  for_vectors(length, [&](int64_t i, int64_t count) __attribute__((always_inline)) {
    const Floats weights = exponential(load_some(logits + i, count, -kInfinity) - largest);
    store_some(logits + i, weights, count);
    sums += weights;
  });
  const float total = sum_of_lanes(sums) + exponential(splat(sink - largest))[0];
  if (!(total > 0.0f && total < kInfinity)) return;
  const float share = 1.0f / total;
  for_vectors(length, [&](int64_t i, int64_t count) __attribute__((always_inline)) {
    const Floats weights = load_some(logits + i, count, 0.0f) * share, before = load_some(received + i, count, 0.0f);
    const Floats raised = weights > before ? weights : before;
    store_some(received + i, is_strongest ? raised : before + weights, count);
  });
}

}  // namespace
}  // namespace kvcache
