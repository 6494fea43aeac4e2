// Calls of half of attention: of the products with keys and whatever a softmax takes of them, or of those with values,
// cut into tasks as calls of all of it are (attention_call.h).
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <string>

#include "attention_call.h"
#include "binding_inputs.h"
#include "decode_attention.h"

namespace kvcache {
namespace {

// How the query rows and the slots of a call are cut into tasks.
struct Cut {
  int64_t batch, kv_heads, group, tokens;  // query heads of a kv head, and query tokens
  int64_t heads_per_task;
  int64_t first_block, blocks, splits;
  bool is_serial;

  int64_t rows() const { return group * tokens; }
  int64_t row_groups() const { return batch * kv_heads * ((group + heads_per_task - 1) / heads_per_task); }
};

// Cuts a call for slots from `start` on, into tasks of at most `most_rows` query rows, or of one query head.
Cut cut_of(const at::Tensor& rows, const char* name, const at::Tensor& records, const Inputs& inputs, int64_t start,
           int64_t most_rows = kMaxQueries) {
  KVCACHE_CHECK(rows.dim() == 4, "rank", name, 4, rows.dim());
  const int64_t length = length_of(inputs), heads = rows.size(1);
  Cut cut{};
  cut.batch = records.size(0);
  cut.kv_heads = records.size(1);
  cut.tokens = rows.size(2);
  KVCACHE_CHECK(cut.kv_heads > 0 && heads > 0 && heads % cut.kv_heads == 0, "heads", name,
                "a multiple of " + std::to_string(cut.kv_heads), heads);
  KVCACHE_CHECK(cut.tokens >= 1 && cut.tokens <= kMaxQueries, "tokens", name, "1 to 64", cut.tokens);
  KVCACHE_CHECK(start >= 0 && start < length, "start", name, "a slot before " + std::to_string(length), start);
  cut.group = heads / cut.kv_heads;
  cut.heads_per_task = std::min(cut.group, std::max<int64_t>(1, most_rows / cut.tokens));
  cut.first_block = start / kBlockTokens;
  cut.blocks = (length + kBlockTokens - 1) / kBlockTokens - cut.first_block;
  const int64_t row_groups = cut.row_groups();
  cut.is_serial = row_groups * cut.blocks * kBlockTokens * inputs.side.head_dim < kSerialValues;
  cut.splits = choose_splits(cut.blocks, row_groups, cut.is_serial);
  return cut;
}

// The side a task does not read.
Side nothing() {
  Side side{};
  side.format = kNonUniform;
  side.width = side.group_tokens = 1;
  side.scale_offset = side.minimum_offset = -1;
  return side;
}

// Calls `add(task, b, h, row)` for every task of row b and kv head h, which has all but what it reads and writes; `row`
// is its first of all query rows, and those of one range of slots after the other are neighbours.
template <typename Add>
void for_tasks(const Cut& cut, int64_t length, int64_t start, bool is_precise, const Add& add) {
  Task task{};
  task.query_length = static_cast<int32_t>(cut.tokens);
  task.precise = is_precise;
  task.length = length;
  task.first_slot = start;
  for (int64_t b = 0; b < cut.batch; ++b) {
    for (int64_t h = 0; h < cut.kv_heads; ++h) {
      for (int64_t g = 0; g < cut.group; g += cut.heads_per_task) {
        task.queries = static_cast<int32_t>(std::min(cut.heads_per_task, cut.group - g) * cut.tokens);
        for (int64_t s = 0; s < cut.splits; ++s) {
          task.begin = (cut.first_block + s * cut.blocks / cut.splits) * kBlockTokens;
          task.end = std::min(length, (cut.first_block + (s + 1) * cut.blocks / cut.splits) * kBlockTokens);
          add(task, b, h, (b * cut.kv_heads + h) * cut.rows() + g * cut.tokens);
        }
      }
    }
  }
}

}  // namespace
}  // namespace kvcache
