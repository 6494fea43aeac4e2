// What the kernels are told: plain numbers and pointers to device memory, filled in by the bindings.
#pragma once

#include "code_places.h"

namespace kvcache {

enum Format : int32_t { kAffine = 0, kSymmetric = 1, kE4M3 = 2, kE5M2 = 3, kNonUniform = 4 };
enum Dtype : int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2 };

constexpr int kThreads = 128;  // of a block, in every kernel of decode attention
constexpr int kWarps = kThreads / 32;
constexpr int kMostRows = 16;  // query rows of a block: heads of a group times query tokens
constexpr int kMostFastChannels = 256;  // of keys, and of values: what the registers of the fast path hold

// Exact tokens; strides in elements, the channels lie next to each other.
struct Segment {
  const void* data;
  int64_t start, length;  // slots
  int64_t batch_stride, head_stride, token_stride;
};

// The keys or the values of all rows and heads; see `SideLayout` and `Side` in kvcache_plugins/kernels/layout.py.
struct Side {
  int64_t packed_length;
  int32_t nbits, format, head_dim, padded_dim, group_tokens, width, metadata_bytes, interleaved;
  int32_t codes_offset, scale_offset, minimum_offset;
  int32_t period, rotary_dim;
  const float* static_scale;  // [heads]
  const float* factors;       // [batch][heads][head_dim]
  const float *cos, *sin;     // [period][rotary_dim / 2]
  const float* levels;
  const float *channel_scale, *channel_offset;  // [1 or batch][heads][head_dim]
  int64_t channel_batch_stride;
  const double* inv_freq;
  const int64_t* positions;       // [batch]
  const int32_t* outliers;        // [batch][blocks][capacity]
  const int16_t* outlier_starts;  // [batch][blocks][heads + 1]
  int64_t outlier_blocks, outlier_capacity;
  int32_t dtype;  // of segments and sinks
  int32_t num_segments;
  Segment segments[3];
  const void* sinks;  // [batch][heads][sink_length][head_dim]
  int32_t sink_length;
};

struct Records {
  const uint8_t* data;
  int64_t record_bytes, batch_stride, head_stride;
  int32_t heads;
  const int64_t* sink_start;  // [batch], or null: all 0

  KVCACHE_BOTH const uint8_t* of(int64_t batch, int64_t head) const {
    return data + batch * batch_stride + head * head_stride;
  }
};

// The part of a record that is its keys or its values, from their codes on, and how these are spread in shared memory.
struct UnitCopy {
  static constexpr int kSteps = 4, kStepBytes = 512;  // what a loop copies at once; what a warp copies at once
  int32_t codes_offset, code_bytes, bytes, swizzle;
  int32_t scale, minimum;                   // where these lie from the codes on, if there are any
  int32_t step_bits[kSteps], further_bits;  // `swizzle_bits` of every step, and of as many steps together
};

// Numbers of a row where the results of warps are merged: pairs of eight lanes' channels lie in different banks.
KVCACHE_BOTH int merge_stride(int value_dim) { return value_dim + 4; }
KVCACHE_BOTH int merge_bytes_of_warps(int value_dim, int columns) {
  return 4 * kWarps * 8 * columns * (merge_stride(value_dim) + 2);
}

struct AttentionArguments {
  Records records;
  Side key, value;
  const void* query;
  int64_t query_batch_stride, query_head_stride, query_token_stride;
  int32_t query_dtype, group, query_length, chunks;  // `chunks` of up to `chunk_rows` query rows
  int32_t chunk_rows;
  int64_t length;
  float scaling, softcap, inverse_softcap;  // a division is a call, for which registers are spilled
  int32_t is_causal;
  int64_t window;
  const float* bias;  // fp32, strides in elements, 0 where broadcast
  int64_t bias_batch_stride, bias_head_stride, bias_token_stride;
  const float *sink_logits, *alibi;  // of every query head
  int32_t are_sinks_of_queries;      // sink logits are of every query: [batch][query head][query token]
  // The plan: which thread block attends to which 64-slot blocks. Those of the fast path share packed blocks and, if
  // they read what is exact as well, blocks whose keys are packed and values exact, blocks of exact keys, from slot
  // `exact_start` on, and sinks, as if they were a block: those that are packed, and those of which keys alone are.
  int32_t fast_begin, fast_end, fast_splits;  // packed blocks, by tensor cores
  // How many of these splits share how much work: all of them all, or all but the last that of the packed blocks.
  int32_t sharing_splits, shared_work;
  int64_t fast_stop;                          // where the last of these ends
  int32_t whole_end;                          // packed blocks from here on are not whole
  int32_t plain_begin, plain_end;             // products of these blocks are logits: nothing is hidden, added or capped
  int32_t mixed_begin, mixed_end, exact_begin, exact_end;
  int32_t sink_units;  // 0 to 2
  int64_t exact_start;
  int32_t are_exact_plain;  // as with `plain_end`, of these
  // What is left to the general kernel: blocks, all of them or from slot `fast_stop` on; and packed ones that hold
  // sinks, which the fast path leaves out then, by one thread block more.
  int32_t general_begin, general_end, general_splits;
  int32_t sink_splits;  // 1 or 0
  UnitCopy key_copy, value_copy;
  // Of the fast path: room for either; units of a warp in shared memory, of which one is worked on and one or two are
  // on the way; their bytes; and those from the start of shared memory on that hold all of them, or the results.
  int32_t unit_bytes, unit_slots, warp_bytes, ring_bytes;
  // What follows from `key` and `value`, for the fast path, which is short of registers: steps and chunks of 16
  // channels; a row of metadata is shared by 2^shift tokens (at most 64), or by 2^shift tiles of 16.
  int32_t key_steps, key_group_shift, key_tile_shift, value_chunks, value_chunks_per_group, value_group_shift;
  int32_t value_groups;        // numbers of every token where code is made for as many, and for the chunks, or 0
  int32_t are_values_aligned;  // see AlignedCodes
  // Results of every split: [rows][splits] maximum and sum, [rows][splits][partial_channels()]
  float *partial_sums, *partial_outputs;
  void* output;

  KVCACHE_BOTH int packed_units() const { return fast_end - fast_begin; }
  KVCACHE_BOTH int exact_units() const { return mixed_end - mixed_begin + (exact_end - exact_begin) + sink_units; }
  // What a block of exact tokens takes, whose loads are waited for, in packed ones; KVQuant's take long themselves.
  KVCACHE_BOTH int exact_work() const { return key.format == kNonUniform ? 1 : 3; }
  // What the fast path takes for all of them, in that which it takes for a packed block.
  KVCACHE_BOTH int fast_work() const { return packed_units() + exact_work() * exact_units(); }
  // As many channels as values have, and up to three more, so that four are read at a time.
  KVCACHE_BOTH int partial_channels() const { return (value.head_dim + 3) / 4 * 4; }
  KVCACHE_BOTH int left_splits() const { return general_splits + sink_splits; }
  KVCACHE_BOTH int splits() const { return fast_splits + left_splits(); }
  // Of a packed block; slots fit 32 bits.
  KVCACHE_BOTH int tokens_of(int block) const { return static_cast<int>(fast_stop) - block * kBlockTokens; }
};

// Slots [start, stop) of one side as numbers.
struct DecodeArguments {
  Records records;
  Side side;
  int32_t is_key, dtype;
  int64_t start, stop;
  void* output;  // [batch][heads][stop - start][head_dim]
};

// The fields of one side in records, for moving codes without knowing what they mean.
struct Fields {
  int32_t nbits, padded_dim, width, metadata_bytes, interleaved;
  int32_t codes_offset, scale_offset, minimum_offset;
};

// Slots index[..] of `from` become slots 0 .. count - 1 of `to`.
struct GatherArguments {
  Records from;
  uint8_t* to;
  int64_t to_batch_stride, to_head_stride;
  Fields key, value;
  const int64_t* index;   // [batch][heads][count]
  int64_t count, length;  // slots from `length` on, or negative ones, are taken as zero,
  int32_t* fault;         // and set this to 1
};

// Exact tokens of all rows and heads; strides in elements, the channels lie next to each other.
struct Exact {
  const void* data;
  int64_t batch_stride, head_stride, token_stride;

  KVCACHE_BOTH int64_t row(int64_t batch, int64_t head, int64_t token) const {
    return batch * batch_stride + head * head_stride + token * token_stride;
  }
};

// Tokens of one side to be encoded: those of slots [start, newer_start) from `states`, the others from `newer`.
struct EncodeArguments {
  uint8_t* records;
  int64_t record_bytes, batch_stride, head_stride;
  Exact states, newer;
  int64_t newer_start;
  int32_t dtype, is_key, nbits, format, head_dim, padded_dim, group_tokens, width, metadata_bytes, interleaved;
  int32_t codes_offset, scale_offset, minimum_offset;
  int64_t start, count;
  const float *cos, *sin;           // [period][pairs]: a key of slot t is first rotated back by row t % period; or null
  int32_t period, pairs, is_fused;  // whether its sums of products are rounded once
  const float* factors;             // [batch][heads][head_dim] by which numbers are divided instead; or null
  int32_t* overflow;                // set to 1 where metadata do not fit fp16

  KVCACHE_BOTH int unit_tokens() const { return group_tokens > kBlockTokens ? group_tokens : kBlockTokens; }
  KVCACHE_BOTH int unit_rows() const { return unit_tokens() / group_tokens; }
  KVCACHE_BOTH int units() const {
    const int64_t unit = count > 0 ? unit_tokens() : 1;
    return static_cast<int>((start + count + unit - 1) / unit - start / unit);
  }
};

// Whole blocks of one side to be encoded by non-uniform levels, with a list of outliers for each; see `encode_levels`.
struct LevelArguments {
  EncodeArguments run;  // `cos` and `sin` are [1 or batch][count][pairs], a row for every token
  int64_t turn_batch_stride;
  int32_t heads, side;
  const float *boundaries, *levels;  // [2^nbits - 1], [2^nbits]
  const float *scale, *offset;       // of keys: [1 or batch][heads][head_dim]
  int64_t range_batch_stride;
  const int64_t* first_plain;  // [batch], slots before which there are no outliers; or null
  int32_t* entries;            // [batch][lists][width], of all blocks of a cache; null without outliers
  int16_t* starts;             // [batch][lists][heads + 1]
  int64_t lists, width;
  float* missing;  // scratch for keys with outliers, [batch][blocks of the run][heads][64][head_dim]
  uint64_t* cuts;  // scratch for values with outliers, [batch][count][2]

  KVCACHE_BOTH int64_t blocks() const { return run.count / kBlockTokens; }
  KVCACHE_BOTH int64_t list_of(int64_t batch, int64_t block) const {
    return batch * lists + run.start / kBlockTokens + block;
  }
};

// New tokens to be copied into a tail, in words of 16 bits; strides in words.
struct PlaceArguments {
  const uint16_t* from;
  int64_t from_batch_stride, from_head_stride, from_token_stride;
  uint16_t* to;
  int64_t to_batch_stride, to_head_stride, to_token_stride;
  int32_t tokens, words;  // of a token
};

struct AppendArguments {
  PlaceArguments key_new, value_new;
  EncodeArguments key, value;  // `count` is 0 where nothing is due
};

}  // namespace kvcache
