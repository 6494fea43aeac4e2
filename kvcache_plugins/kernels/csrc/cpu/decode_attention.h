// Decode attention over packed keys and values: the interface between the binding, which knows torch, and the kernels,
// which do not. One task is one (row, kv head) and a range of slots; tasks of a row are merged by the driver.
//
// A record (one 64-token block of one row and head) is laid out by kvcache_plugins/layers/records.py; the order of the
// codes inside it is drawn in kvcache_plugins/quantizers/packing.py.
#pragma once

#include <cstdint>
#include <cstring>

namespace kvcache {

constexpr int kBlockTokens = 64;
constexpr int kMaxQueries = 64;  // query heads of a group times query tokens, in one task
constexpr int kMaxHeadDim = 512;
constexpr int kMaxMetadata = 4096;  // scales of one record: metadata rows times width

// kSymmetric: codes biased by 128. kNonUniform: codes are places in `levels`.
enum Format : int32_t { kAffine = 0, kSymmetric = 1, kE4M3 = 2, kE5M2 = 3, kNonUniform = 4 };
enum Dtype : int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

// Exact tokens: `length` of them, the first at slot `start`, each `stride` elements after the one before.
struct Segment {
  const void* data;
  int64_t start, length, stride;
};

// The keys or the values of one (row, kv head).
struct Side {
  const uint8_t* records;  // first record of this row and head
  int64_t record_bytes;
  int64_t packed_length;   // slots [0, packed_length) are read from codes
  int32_t nbits;           // 2, 3, 4, 8
  int32_t format;          // Format
  int32_t head_dim;        // channels
  int32_t padded_dim;      // channels as packed: the next multiple of 16
  int32_t group_tokens;    // tokens sharing a metadata row, 1 to 64
  int32_t width;           // metadata entries per row: 1, head_dim / group, or head_dim
  int32_t metadata_bytes;  // 2: fp16, 4: fp32
  int32_t interleaved;     // pairs of channels that key codes are laid out by, those of rotations too, are neighbours
  int64_t codes_offset;    // bytes from the start of a record
  int64_t scale_offset;    // -1: `static_scale` instead; scales are never negative
  int64_t minimum_offset;  // -1: none
  float static_scale;
  const float* factors;    // [head_dim], multiply decoded values (SmoothAttention), or null
  const float* cos;        // [period][rotary_dim / 2]: decoded keys of slot t are still to be rotated by t % period,
  const float* sin;        // or null; never together with factors
  int32_t period, rotary_dim;
  // Keys from before the rotary embedding: slot t is still to be turned by (t + position) * inv_freq, or null.
  const double* inv_freq;      // [rotary_dim / 2]
  int64_t position;            // of slot 0 in this row
  const float* levels;         // [2 ** nbits], numbers that bf16 holds exactly; of kNonUniform
  const float* channel_scale;  // [head_dim] in place of stored scales, or null
  const float* channel_offset;
  // What the codes of a block lack (layers/outliers.py), added before any rotation; or null.
  const int32_t* outliers;        // [blocks][outlier_capacity]
  const int16_t* outlier_starts;  // of this head: [blocks][outlier_stride], its list is [0] to [1]
  int64_t outlier_capacity, outlier_stride;
  int32_t dtype;           // Dtype of the exact segments and sinks
  Segment segments[3];     // exact tokens after the packed ones, in order
  int32_t num_segments;
  const void* sinks;       // [sink_length][head_dim] exact tokens that replace slots [sink_start, ...), or null
  int64_t sink_start, sink_length;
};

struct Task {
  Side key, value;
  const float* query;      // [queries][key.head_dim], fp32, already times `scaling`
  float scaling;           // 0: unknown
  int32_t queries;         // group * query_length; row r is query head r / query_length, token r % query_length
  int32_t query_length;
  int32_t precise;         // 1: fp32 or fp16 queries, relative error 1e-5; 0: bf16 queries
  int64_t length;          // slots in all (packed and exact)
  int64_t begin, end;      // slots this task attends to; `begin` is a multiple of 64
  int32_t is_causal;       // query token i of n sees slots <= length - n + i
  int64_t window;          // 0: none; else slots > length - n + i - window
  float softcap;           // 0: none
  const float* alibi;      // [group] slopes, or null: adds slope * (slot - slot of the query)
  const float* bias;       // additive, [queries][length] with the strides below, or null; -inf masks
  int64_t bias_row_stride;
  // Half of attention, where something else does the rest (multiply_binding.inl, measure_binding.inl). With `logits`,
  // those of slots from `first_slot` on are written there, masks and all, [queries][length - first_slot], and that is all;
  // of blocks that a window or a bias hides from all queries nothing is. With `weights`, laid out so, they stand in place
  // of what the softmax gives, and neither query nor keys are read.
  float* logits;
  const float* weights;
  int64_t first_slot;
  // results: maximum and sum of exponentials per query row, and the unnormalised output
  float* maximum;          // [queries]; -inf if nothing is visible
  float* sum;              // [queries]
  float* output;           // [queries][value.head_dim]
};

// The outliers of one block and head. Whatever the tensors hold, what is read and written lies inside of them.
struct OutlierList {
  const int32_t *begin, *end;
};

inline OutlierList outliers_of(const Side& side, int64_t start) {
  if (side.outliers == nullptr) return {nullptr, nullptr};
  const int32_t* list = side.outliers + start / kBlockTokens * side.outlier_capacity;
  const int16_t* bounds = side.outlier_starts + start / kBlockTokens * side.outlier_stride;
  if (bounds[0] < 0 || bounds[1] > side.outlier_capacity) return {nullptr, nullptr};
  return {list + bounds[0], list + bounds[1]};
}

inline int outlier_token(int32_t entry) { return entry >> 26 & (kBlockTokens - 1); }
inline int outlier_channel(int32_t entry) { return entry >> 16 & (kMaxHeadDim - 1); }

// Writes a block's logits of one query row, at slot `start`, to where a call wants them.
inline void give_logits(const Task& task, int64_t row, int64_t start, const float* scores) {
  const int64_t low = start > task.first_slot ? start : task.first_slot;
  const int64_t end = start + kBlockTokens < task.end ? start + kBlockTokens : task.end;
  if (low >= end) return;
  float* const logits = task.logits + row * (task.length - task.first_slot);
  std::memcpy(logits + (low - task.first_slot), scores + (low - start), sizeof(float) * (end - low));
}

// Reads the weights of a block's slots for one query row; zero where there are none.
inline void take_weights(const Task& task, int64_t row, int64_t start, float* weights) {
  const int64_t low = start > task.first_slot ? start : task.first_slot;
  const int64_t end = start + kBlockTokens < task.end ? start + kBlockTokens : task.end;
  std::memset(weights, 0, sizeof(float) * kBlockTokens);
  if (low >= end) return;
  const float* const given = task.weights + row * (task.length - task.first_slot);
  std::memcpy(weights + (low - start), given + (low - task.first_slot), sizeof(float) * (end - low));
}

// One kernel per instruction set; all give the same result up to rounding.
using Kernel = void (*)(const Task&);
void decode_attention_portable(const Task& task);
void decode_attention_avx2(const Task& task);
void decode_attention_avx512(const Task& task);  // needs F, BW, VL, DQ, VBMI, VNNI, BF16
void decode_attention_tiles_avx512(const Task& task);  // the same, decoding a block once for many rows

Kernel best_kernel();  // the best of this processor, or the one KVCACHE_CPU_ISA names (attention_binding.inl)

}  // namespace kvcache
