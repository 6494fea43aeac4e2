// Decode attention over packed codes for CPUs with AVX-512 F, BW, VL, DQ, VBMI, VNNI and BF16.
//
// A task walks its 64-token blocks once. For each block and each pass of R query rows (four, or one if there is one):
// scores (avx512_keys.h, avx512_positions.h), exact tokens (avx512_exact.h), masks and one step of the online softmax
// (avx512_softmax.h), values (avx512_values.h). Nothing is decoded to memory, except levels for many rows
// (decode_attention_tiles_avx512.cpp). Bound: for one row the speed of the memory, for four decoding (a shift and a
// look-up for 32 codes) and dot products (one for 32 codes and a row), about alike. Tasks of which nothing is packed and
// that have several rows go to the tiles, too; with fp32 queries, those of more than one pass.
//
// What this file does not cover (scales per token and group of channels for keys, 8-bit codes with scales per channel,
// a rotation of some channels in half-split layout) goes to the AVX2 kernel, which covers everything.
#if defined(__x86_64__)
#include "set_target.h"

KVCACHE_TARGET("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,avx512vbmi,f16c,fma")

#include "avx512_exact.h"
#include "avx512_keys.h"
#include "avx512_positions.h"
#include "avx512_softmax.h"
#include "avx512_values.h"

namespace kvcache {
namespace avx512 {
namespace {

// Query rows up to which blocks are decoded anew for every four of them: a tile, which has that done once, costs as
// much as so many (Zen 5). Of KIVI's keys with bf16 queries alone: in fp32 products are most of it.
constexpr int kMostLevelRows = 12, kMostTurnedRows = 16, kMostGroupedRows = 32;
// The same of exact tokens, with bf16 and with fp32 queries.
constexpr int kMostExactRows[2] = {1, 4};

bool is_better_decoded(const Task& task) {
  const Side &key = task.key, &value = task.value;
  const bool has_levels = (task.weights == nullptr && key.format == kNonUniform) ||
                          (task.logits == nullptr && value.format == kNonUniform);
  if (has_levels) return task.queries > kMostLevelRows;
  if (task.weights != nullptr || task.precise != 0 || key.width == 1 || key.nbits == 8) return false;
  return task.queries > (key.cos != nullptr ? kMostTurnedRows : kMostGroupedRows);
}

// Whether nothing of a task is read from codes, and a tile costs no more than reading every token for every four rows.
bool is_exact(const Task& task) {
  if (task.queries <= kMostExactRows[task.precise]) return false;
  return std::max(task.key.packed_length, task.value.packed_length) <= task.begin;
}

bool is_float8(const Side& side) { return side.format == kE4M3 || side.format == kE5M2; }

bool covers_key(const Side& key) {
  if (key.format == kNonUniform) {
    const bool whole = key.inv_freq == nullptr || key.interleaved || key.rotary_dim == key.padded_dim;
    return whole && key.channel_scale != nullptr && key.nbits <= 4;
  }
  const bool per_channel = key.width == key.head_dim && key.group_tokens >= 16 && key.minimum_offset >= 0;
  if (key.nbits == 8) return key.width == 1 && key.cos == nullptr;
  if (key.format != kAffine || key.scale_offset < 0) return false;
  if (key.cos != nullptr) {
    const bool whole = key.interleaved || key.rotary_dim == key.padded_dim;
    return per_channel && whole && (key.period == 32 || key.period == 64);
  }
  return per_channel || (key.width == 1 && key.group_tokens == 1);
}

bool covers_value(const Side& value) {
  const int chunks = value.padded_dim / 16;
  if (value.factors != nullptr || value.cos != nullptr) return false;
  if (value.nbits == 8) return value.width == 1;
  if (value.format != kAffine && value.format != kNonUniform) return false;
  if (value.scale_offset < 0 || value.group_tokens != 1) return false;
  if (value.width > 1 && (value.head_dim / value.width) % 16 != 0) return false;
  return chunks <= 8 || chunks == 12 || chunks == 16 || chunks == 32;
}

// R query rows against all blocks: the query in the forms that scores are made of, and what comes of them.
template <int R>
struct Pass {
  Pass(const Task& task, int first_row)
      : first(first_row), rows(std::min(R, task.queries - first_row)), softmax(task, first_row) {
    if (task.weights != nullptr) return;
    const Side& key = task.key;
    const float* data[R];
    for (int r = 0; r < rows; ++r) data[r] = task.query + int64_t(first + r) * key.head_dim;
    prepare_query(key, data, rows, &query);
    if (key.cos != nullptr) {
      turned.reset(new TurnedQuery<R>);  // 512 KB, of which only what is used is written
      prepare_turned_query(key, query, turned.get());
    }
    if (key.format == kNonUniform) positioned = std::make_unique<PositionedKeys<R>>(key, query);
  }

  const int first, rows;
  Query<R> query;
  std::unique_ptr<TurnedQuery<R>> turned;
  std::unique_ptr<PositionedKeys<R>> positioned;
  OnlineSoftmax<R> softmax;
};

// R: query rows in a pass.
template <int R>
class Decoder {
 public:
  explicit Decoder(const Task& task)
      : task_(task), key_(task.key), value_(task.value), parts_(task.precise ? 2 : 1),
        key_floats_(Float8Table::of(key_.format)), value_floats_(Float8Table::of(value_.format)) {
    for (int first = 0; first < task.queries; first += R) passes_.emplace_back(new Pass<R>(task, first));
  }

  void run() {
    const int64_t oldest_query = task_.length - task_.query_length;
    for (int64_t start = task_.begin; start < task_.end; start += kBlockTokens) {
      if (task_.window > 0 && start + kBlockTokens <= oldest_query - task_.window + 1) continue;
      load_block(start);
      for (auto& pass : passes_) attend(start, *pass);
    }
    if (task_.logits != nullptr) return;
    for (auto& pass : passes_) pass->softmax.store();
  }

 private:
  void load_block(int64_t start) {
    packed_keys_ = int(std::max<int64_t>(0, std::min<int64_t>(kBlockTokens, key_.packed_length - start)));
    packed_values_ = int(std::max<int64_t>(0, std::min<int64_t>(kBlockTokens, value_.packed_length - start)));
    key_record_ = key_.records + start / kBlockTokens * key_.record_bytes;
    value_record_ = value_.records + start / kBlockTokens * value_.record_bytes;
    fetch_records(task_, start, fetcher_);
    if (packed_keys_ > 0 && key_.format != kNonUniform) {
      if (key_.width > 1) {
        if (key_.cos != nullptr) load_channel_metadata(key_, key_record_, &channels_);
      } else {
        load_token_metadata(key_, key_record_, packed_keys_, tokens_scale_, tokens_minimum_);
        center(key_, tokens_scale_[0], tokens_minimum_[0]);
      }
    }
    if (packed_values_ > 0) {
      load_metadata_rows(value_, value_record_, value_.scale_offset, packed_values_, values_.scale);
      if (value_.minimum_offset >= 0)
        load_metadata_rows(value_, value_record_, value_.minimum_offset, packed_values_, values_.minimum);
      if (value_.scale_offset < 0)
        for (int t = 0; t < kBlockTokens; ++t) values_.scale[0][t] = t < packed_values_ ? value_.static_scale : 0.0f;
      for (int g = 0; g < value_.width; ++g) center(value_, values_.scale[g], values_.minimum[g]);
    }
  }

  // Moves the minima of a block's tokens to the middle code.
  static void center(const Side& side, const float* scale, float* minimum) {
    if (side.minimum_offset < 0 || side.format == kNonUniform) return;
    const __m512 steps = _mm512_set1_ps(code_center(side.nbits));
    for (int t = 0; t < kBlockTokens; t += kLanes)
      _mm512_store_ps(minimum + t, _mm512_fmadd_ps(_mm512_load_ps(scale + t), steps, _mm512_load_ps(minimum + t)));
  }

  static void load_metadata_rows(const Side& side, const uint8_t* record, int64_t offset, int tokens,
                                 float (*out)[kBlockTokens]) {
    if (offset >= 0)
      transpose_metadata(record + offset, side.metadata_bytes, side.width, side.group_tokens, tokens, out);
  }

  static void load_token_metadata(const Side& side, const uint8_t* record, int tokens, float (*scale)[kBlockTokens],
                                  float (*minimum)[kBlockTokens]) {
    load_metadata_rows(side, record, side.scale_offset, tokens, scale);
    load_metadata_rows(side, record, side.minimum_offset, tokens, minimum);
    if (side.scale_offset < 0)
      for (int t = 0; t < kBlockTokens; ++t) scale[0][t] = side.static_scale;
  }

  void attend(int64_t start, Pass<R>& pass) {
    alignas(64) float scores[R][kBlockTokens];
    if (task_.weights != nullptr) {
      pass.softmax.take(start, scores);
      return add(start, pass, scores);
    }
    if (packed_keys_ > 0 && pass.positioned != nullptr) {
      score_positioned(start, pass, scores);
    } else if (packed_keys_ > 0) {
      score_packed(pass, scores);
    }
    score_exact(start, pass, scores);
    pass.softmax.mask(start, scores);
    if (task_.logits != nullptr) {
      for (int r = 0; r < pass.rows; ++r) give_logits(task_, pass.first + r, start, scores[r]);
      return;
    }
    if (pass.softmax.soften(scores)) add(start, pass, scores);
  }

  void add(int64_t start, Pass<R>& pass, float (*weights)[kBlockTokens]) {
    add_exact(start, pass, weights);
    if (packed_values_ > 0) add_packed(start, pass, weights);
  }

  template <int B, int PARTS>
  void score_low_bits(Pass<R>& pass, float (*scores)[kBlockTokens]) {
    const uint8_t* codes = key_record_ + key_.codes_offset;
    if (key_.cos != nullptr) {
      score_turned<B, PARTS, R>(key_, codes, channels_, *pass.turned, fetcher_, scores);
      return;
    }
    alignas(16) float constant[kMaxGroups][4] = {};
    const bool is_per_channel = key_.width > 1;
    if (is_per_channel) {
      fold_channels<B, PARTS, R>(key_, key_record_, pass.query, folded_, constant);
    } else {
      const size_t bytes = sizeof(uint32_t) * key_.padded_dim / 2;
      for (int part = 0; part < PARTS; ++part)
        for (int r = 0; r < R; ++r) std::memcpy(folded_[part][0][r], pass.query.pairs[part][r], bytes);
    }
    const int groups = is_per_channel ? kBlockTokens / key_.group_tokens : 1;
    score_words<B, PARTS, R>(key_, codes, folded_, groups, constant, fetcher_, scores);
  }

  void score_positioned(int64_t start, Pass<R>& pass, float (*scores)[kBlockTokens]) {
    PositionedKeys<R>& keys = *pass.positioned;
    const uint8_t* codes = key_record_ + key_.codes_offset;
    keys.turn_query(start);
    if (key_.nbits == 2) keys.template score<2>(codes, fetcher_, scores);
    if (key_.nbits == 3) keys.template score<3>(codes, fetcher_, scores);
    if (key_.nbits == 4) keys.template score<4>(codes, fetcher_, scores);
    keys.add_outliers(outliers_of(key_, start), scores);
  }

  template <int PARTS>
  void score_bits(Pass<R>& pass, float (*scores)[kBlockTokens]) {
    const uint8_t* codes = key_record_ + key_.codes_offset;
    if (key_.nbits == 2) score_low_bits<2, PARTS>(pass, scores);
    if (key_.nbits == 3) score_low_bits<3, PARTS>(pass, scores);
    if (key_.nbits == 4) score_low_bits<4, PARTS>(pass, scores);
    if (key_.nbits != 8) return;
    if (is_float8(key_)) {
      score_floats<PARTS, R>(key_, codes, pass.query, key_floats_, fetcher_, scores);
    } else {
      score_bytes<PARTS + 1, R>(key_, codes, pass.query, fetcher_, scores);
    }
  }

  void score_packed(Pass<R>& pass, float (*scores)[kBlockTokens]) {
    if (parts_ == 2) {
      score_bits<2>(pass, scores);
    } else {
      score_bits<1>(pass, scores);
    }
    if (key_.width > 1) return;
    for (int r = 0; r < pass.rows; ++r) {
      for (int t = 0; t < kBlockTokens; t += kLanes) {
        __m512 score = _mm512_mul_ps(_mm512_loadu_ps(scores[r] + t), _mm512_load_ps(tokens_scale_[0] + t));
        if (key_.minimum_offset >= 0)
          score = _mm512_fmadd_ps(_mm512_set1_ps(pass.query.sum[r]), _mm512_load_ps(tokens_minimum_[0] + t), score);
        _mm512_storeu_ps(scores[r] + t, score);
      }
    }
  }

  void score_exact(int64_t start, Pass<R>& pass, float (*scores)[kBlockTokens]) {
    const float* queries[R];
    for (int r = 0; r < R; ++r)
      queries[r] = task_.query + int64_t(pass.first + std::min(r, pass.rows - 1)) * key_.head_dim;
    for_exact(key_, start, packed_keys_, task_.end, [&](const ExactRun& run) {
      dispatch_dtypes(key_.dtype,
                      [&]<int kDtype>() { score_run<kDtype, R>(run, queries, key_.head_dim, scores); });
    });
  }

  // Adds the exact values of the block, and takes their weights out of what the packed values will see.
  void add_exact(int64_t start, Pass<R>& pass, float (*weights)[kBlockTokens]) {
    float* out[R];
    for (int r = 0; r < R; ++r) out[r] = pass.softmax.output[r];
    for_exact(value_, start, packed_values_, task_.end, [&](const ExactRun& run) {
      dispatch_dtypes(value_.dtype,
                      [&]<int kDtype>() { add_run<kDtype, R>(run, weights, pass.rows, value_.head_dim, out); });
      for (int r = 0; r < R; ++r) std::memset(weights[r] + run.first, 0, sizeof(float) * run.count);
    });
  }

  void add_outliers(int64_t start, Pass<R>& pass, const float (*weights)[kBlockTokens]) {
    const OutlierList list = outliers_of(value_, start);
    if (list.begin >= list.end) return;
    const float* rows[R];
    float* out[R];
    for (int r = 0; r < R; ++r) {
      rows[r] = weights[r];
      out[r] = pass.softmax.output[r];
    }
    RowNumbers<R, kBlockTokens> by_token;
    RowNumbers<R, kMaxHeadDim> by_channel;
    by_token.take(rows, kBlockTokens);
    by_channel.clear(value_.padded_dim);
    const int last = value_.padded_dim - 1;  // whatever the list holds
    for_batches(list, [&](const int32_t* entries, int count) {
      alignas(64) uint32_t token[kBatch], channel[kBatch];
      alignas(64) float residual[kBatch];
      for (int i = 0; i < count; i += kLanes) {
        const OutlierVector outliers(entries + i, count - i);
        _mm512_store_si512(token + i, outliers.token);
        _mm512_store_si512(channel + i, _mm512_min_epi32(outliers.channel, _mm512_set1_epi32(last)));
        _mm512_store_ps(residual + i, outliers.residual);
      }
      for (int i = 0; i < count; ++i) by_channel.add(channel[i], residual[i], by_token.at(token[i]));
    });
    by_channel.add_to_rows(out, value_.padded_dim);
  }

  template <int PARTS>
  void add_bits(float (*weights)[kBlockTokens], float* const* out) {
    const uint8_t* codes = value_record_ + value_.codes_offset;
    const int chunks = value_.padded_dim / 16;
    if (value_.nbits == 8 && is_float8(value_)) {
      fold_weights<PARTS, R>(weights, values_.scale[0], 0, &pairs_);
      add_floats<PARTS, R>(codes, chunks, pairs_, value_floats_, fetcher_, out);
    } else if (value_.nbits == 8) {
      fold_weight_bytes<PARTS + 1, R>(weights, values_.scale[0], &bytes_);
      add_bytes<PARTS + 1, R>(codes, chunks, bytes_, fetcher_, out);
    } else {
      for (int g = 0; g < value_.width; ++g) fold_weights<PARTS, R>(weights, values_.scale[g], g, &pairs_);
      const int group_of = value_.width == 1 ? chunks : value_.head_dim / value_.width / 16;
      if (value_.nbits == 2) add_chunks<2, PARTS>(codes, chunks, group_of, out);
      if (value_.nbits == 3) add_chunks<3, PARTS>(codes, chunks, group_of, out);
      if (value_.nbits == 4) add_chunks<4, PARTS>(codes, chunks, group_of, out);
    }
  }

  template <int B, int PARTS>
  void add_chunks(const uint8_t* codes, int chunks, int group_of, float* const* out) {
    const __m512i table = value_.format == kNonUniform ? level_table(value_.levels, B) : code_table(B);
    switch (chunks) {
      case 1: return add_words<B, 1, PARTS, R>(codes, table, pairs_, group_of, fetcher_, out);
      case 2: return add_words<B, 2, PARTS, R>(codes, table, pairs_, group_of, fetcher_, out);
      case 3: return add_words<B, 3, PARTS, R>(codes, table, pairs_, group_of, fetcher_, out);
      case 4: return add_words<B, 4, PARTS, R>(codes, table, pairs_, group_of, fetcher_, out);
      case 5: return add_words<B, 5, PARTS, R>(codes, table, pairs_, group_of, fetcher_, out);
      case 6: return add_words<B, 6, PARTS, R>(codes, table, pairs_, group_of, fetcher_, out);
      case 7: return add_words<B, 7, PARTS, R>(codes, table, pairs_, group_of, fetcher_, out);
      case 8: return add_words<B, 8, PARTS, R>(codes, table, pairs_, group_of, fetcher_, out);
      case 12: return add_words<B, 12, PARTS, R>(codes, table, pairs_, group_of, fetcher_, out);
      case 16: return add_words<B, 16, PARTS, R>(codes, table, pairs_, group_of, fetcher_, out);
      case 32: return add_words<B, 32, PARTS, R>(codes, table, pairs_, group_of, fetcher_, out);
    }
  }

  void add_packed(int64_t start, Pass<R>& pass, float (*weights)[kBlockTokens]) {
    add_outliers(start, pass, weights);
    if (value_.minimum_offset >= 0) {
      for (int r = 0; r < pass.rows; ++r) {
        for (int g = 0; g < value_.width; ++g) {
          __m512 sum = _mm512_load_ps(pass.softmax.minimum_sum[r][g]);
          for (int t = 0; t < kBlockTokens; t += kLanes)
            sum = _mm512_fmadd_ps(_mm512_loadu_ps(weights[r] + t), _mm512_load_ps(values_.minimum[g] + t), sum);
          _mm512_store_ps(pass.softmax.minimum_sum[r][g], sum);
        }
      }
    }
    float* out[R];
    for (int r = 0; r < R; ++r) out[r] = pass.softmax.output[r];
    if (parts_ == 2) {
      add_bits<2>(weights, out);
    } else {
      add_bits<1>(weights, out);
    }
  }

  const Task& task_;
  const Side& key_;
  const Side& value_;
  const int parts_;
  const Float8Table& key_floats_;
  const Float8Table& value_floats_;
  std::vector<std::unique_ptr<Pass<R>>> passes_;
  RecordFetcher fetcher_;
  // of the present block
  int packed_keys_ = 0, packed_values_ = 0;
  const uint8_t* key_record_ = nullptr;
  const uint8_t* value_record_ = nullptr;
  BlockMetadata channels_;
  alignas(64) float tokens_scale_[1][kBlockTokens];
  alignas(64) float tokens_minimum_[1][kBlockTokens];
  ValueMetadata values_;
  alignas(64) uint32_t folded_[2][kMaxGroups][R][kMaxPairs];
  WeightPairs<R> pairs_;
  WeightBytes<R> bytes_;
};

}  // namespace
}  // namespace avx512

void decode_attention_avx512(const Task& task) {
  if (avx512::is_exact(task) || avx512::is_better_decoded(task)) return decode_attention_tiles_avx512(task);
  const bool is_covered = (task.weights != nullptr || avx512::covers_key(task.key)) &&
                          (task.logits != nullptr || avx512::covers_value(task.value));
  if (!is_covered) {
    decode_attention_avx2(task);
    return;
  }
  // up to 100 KB of scratch: not on the stack of a pool's thread
  if (task.queries == 1) {
    std::make_unique<avx512::Decoder<1>>(task)->run();
  } else {
    std::make_unique<avx512::Decoder<4>>(task)->run();
  }
}

}  // namespace kvcache

KVCACHE_END_TARGET
#endif
