// Decode attention for AVX2, FMA and F16C: the shared implementation with 8 lanes, compiled for that target
// alone so that one library serves every machine. Bound: that of avx2_products.h for integers, of avx2_turned.h where
// such keys are relative to their block, of avx2_floats.h and avx2_levels.h for what their names say; else two fused
// multiply-adds of 8 lanes a cycle, see decode_attention_portable.inl.
#if defined(__x86_64__)
#include "set_target.h"

KVCACHE_TARGET("avx2,fma,f16c")
// That does not define __AVX2__ and __F16C__ with every compiler.
#define KVCACHE_LANES 8
#define KVCACHE_F16C
#include "decode_attention_portable.inl"

#include "avx2_exact.h"
#include "avx2_floats.h"
#include "avx2_integers.h"
#include "avx2_levels.h"
#include "avx2_turned.h"

namespace kvcache {
namespace {

// What serves whole blocks of one kind of codes or another.
struct KeyProducts {
  explicit KeyProducts(const Task& task)
      : integers(task), exact_integers(task), floats(task), turned(task), levels(task) {}

  bool score(int64_t start, const uint8_t* record, float* scores, RecordFetcher& fetcher, Workspace& ws) {
    return integers.score(record, scores, fetcher, ws) || exact_integers.score(record, scores, fetcher, ws) ||
           floats.score(record, scores, fetcher, ws) || turned.score(start, record, scores, fetcher, ws) ||
           levels.score(start, record, scores, fetcher);
  }

  IntegerKeys<Rounded> integers;
  IntegerKeys<Exact> exact_integers;
  FloatKeys floats;
  TurnedKeys turned;
  LevelKeys levels;
};

struct ValueProducts {
  explicit ValueProducts(const Task& task) : integers(task), exact_integers(task), floats(task), levels(task) {}

  bool add(int64_t start, const uint8_t* record, const float* weights, RecordFetcher& fetcher, Workspace& ws,
           float* output, int64_t stride) {
    return integers.add(record, weights, fetcher, ws, output, stride) ||
           exact_integers.add(record, weights, fetcher, ws, output, stride) ||
           floats.add(record, weights, fetcher, ws, output, stride) ||
           levels.add(start, record, weights, fetcher, ws, output, stride);
  }

  IntegerValues<Rounded> integers;
  IntegerValues<Exact> exact_integers;
  FloatValues floats;
  LevelValues levels;
};

}  // namespace

void decode_attention_avx2(const Task& task) { run<KeyProducts, ValueProducts, ExactProducts>(task); }

}  // namespace kvcache

KVCACHE_END_TARGET
#endif
