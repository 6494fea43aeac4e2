// The CPU implementation of kvcache_plugins::gather_tokens (schema: kvcache_plugins/kernels/ops.py): moves the codes
// and metadata of chosen slots to the first slots of other records.
//
// The order of the codes is drawn in kvcache_plugins/quantizers/packing.py. The codes of a token lie in the same bits
// of 32-bit lanes that are a fixed stride apart (keys), or in 16 neighbouring lanes per 16 channels (values), so
// moving a token is a load, two shifts, a mask and an or per lane, whatever the bits mean. A task is a block of the
// result: no two threads write to one record. Bound: a cache line touched per lane of the source.
#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include "binding_inputs.h"
#include "parallel_tasks.h"

namespace kvcache {
namespace {

constexpr int64_t kSerialCodes = 1 << 16;  // moved in about the time it takes to wake a thread

inline uint32_t load_lane(const uint8_t* from) {
  uint32_t lane;
  std::memcpy(&lane, from, 4);
  return lane;
}

inline void add_lane(uint8_t* to, uint32_t bits) {
  bits |= load_lane(to);
  std::memcpy(to, &bits, 4);
}

// Moves the key codes of one token in a plane of `kBits`: lane `slot % 16` of every vector, the bits of `slot / 16`.
template <int kBits>
void move_keys(const uint8_t* from, int from_slot, uint8_t* to, int to_slot, int64_t dim) {
  if (kBits == 8) {
    for (int64_t d = 0; d < dim; d += 4)
      std::memcpy(to + d * kBlockTokens + 4 * to_slot, from + d * kBlockTokens + 4 * from_slot, 4);
    return;
  }
  constexpr int kParts = 4 / kBits;
  uint32_t mask = 0;
  for (int p = 0; p < 2 * kParts; ++p) mask |= ((1u << kBits) - 1) << (4 * kBits * p);
  const int right = kBits * (from_slot / 16), left = kBits * (to_slot / 16);
  from += 4 * (from_slot % 16);
  to += 4 * (to_slot % 16);
  for (int64_t j = 0; j < dim / 2 / kParts; ++j)
    add_lane(to + 64 * j, (load_lane(from + 64 * j) >> right & mask) << left);
}

// Moves the value codes of one token in a plane of `kBits`: 16 lanes for every chunk of 16 channels.
template <int kBits>
void move_values(const uint8_t* from, int from_slot, uint8_t* to, int to_slot, int64_t dim) {
  constexpr int kPerWord = 16 / kBits;
  constexpr uint32_t kMask = (1u << kBits) - 1;
  const int64_t chunks = dim / 16;
  for (int64_t u = 0; u < chunks; ++u) {
    const int64_t source = from_slot / 2 * chunks + u, target = to_slot / 2 * chunks + u;
    const int64_t source_word = kBits == 8 ? from_slot / 4 * chunks + u : source / kPerWord;
    const int64_t target_word = kBits == 8 ? to_slot / 4 * chunks + u : target / kPerWord;
    const int right = kBits == 8 ? 8 * (from_slot % 4) : 16 * (from_slot % 2) + kBits * int(source % kPerWord);
    const int left = kBits == 8 ? 8 * (to_slot % 4) : 16 * (to_slot % 2) + kBits * int(target % kPerWord);
    for (int c = 0; c < 16; ++c)
      add_lane(to + 64 * target_word + 4 * c, (load_lane(from + 64 * source_word + 4 * c) >> right & kMask) << left);
  }
}

using Move = void (*)(const uint8_t* from, int from_slot, uint8_t* to, int to_slot, int64_t dim);

struct Field {
  int64_t offset, bytes;  // in a record
  Move move;              // of codes; null for metadata, which lies token by token
  int64_t dim;            // channels of the codes, padded
  int64_t slot_bytes;     // metadata of one token
};

void add_codes(std::vector<Field>& fields, int64_t offset, int64_t nbits, int64_t dim, bool is_key) {
  if (nbits == 3) {  // a plane of 2 bits and one of 1
    add_codes(fields, offset, 2, dim, is_key);
    return add_codes(fields, offset + kBlockTokens * dim / 4, 1, dim, is_key);
  }
  const Move move = nbits == 1   ? (is_key ? move_keys<1> : move_values<1>)
                    : nbits == 2 ? (is_key ? move_keys<2> : move_values<2>)
                    : nbits == 4 ? (is_key ? move_keys<4> : move_values<4>)
                                 : (is_key ? move_keys<8> : move_values<8>);
  fields.push_back({offset, kBlockTokens * dim * nbits / 8, move, dim, 0});
}

int64_t padded(int64_t dim) { return (dim + 15) / 16 * 16; }

void add_side(std::vector<Field>& fields, at::IntArrayRef layout, bool is_key) {
  add_codes(fields, layout[kCodesOffset], layout[kNbits], padded(layout[kHeadDim]), is_key);
  const int64_t bytes = layout[kWidth] * layout[kMetadataBytes];
  for (const LayoutField field : {kScaleOffset, kMinimumOffset})
    if (layout[field] >= 0) fields.push_back({layout[field], kBlockTokens * bytes, nullptr, 0, bytes});
}

// Checks what of a layout concerns the bytes of a record; what the codes stand for does not.
void check_layout(const std::string& name, const at::Tensor& records, at::IntArrayRef layout) {
  KVCACHE_CHECK(layout.size() == kLayoutFields, "length", name, int{kLayoutFields}, layout.size());
  const int64_t nbits = layout[kNbits], dim = layout[kHeadDim], width = layout[kWidth];
  const bool has_metadata = layout[kScaleOffset] >= 0 || layout[kMinimumOffset] >= 0;
  KVCACHE_CHECK(layout[kGroupTokens] == 1 || !has_metadata, "group_tokens", name,
                "1, for tokens that share no metadata", layout[kGroupTokens]);
  KVCACHE_CHECK(nbits == 2 || nbits == 3 || nbits == 4 || nbits == 8, "nbits", name, "2, 3, 4 or 8", nbits);
  KVCACHE_CHECK(dim >= 1 && dim <= kMaxHeadDim, "head_dim", name, "1 to " + std::to_string(kMaxHeadDim), dim);
  KVCACHE_CHECK(width >= 1 && width <= dim, "width", name, "1 to head_dim", width);
  KVCACHE_CHECK(layout[kMetadataBytes] == 2 || layout[kMetadataBytes] == 4, "metadata_bytes", name, "2 or 4",
                layout[kMetadataBytes]);
  KVCACHE_CHECK(layout[kPackedLength] >= 0 && layout[kPackedLength] <= records.size(2) * kBlockTokens, "packed_length",
                name, "at most the tokens of the records", layout[kPackedLength]);
  const int64_t row_bytes = kBlockTokens * width * layout[kMetadataBytes];
  const int64_t code_bytes = kBlockTokens * padded(dim) * nbits / 8;
  KVCACHE_CHECK(layout[kCodesOffset] >= 0 && layout[kCodesOffset] + code_bytes <= records.size(3), "field offset", name,
                "a field inside the record", layout[kCodesOffset]);
  for (const LayoutField field : {kScaleOffset, kMinimumOffset})
    KVCACHE_CHECK(layout[field] < 0 || layout[field] + row_bytes <= records.size(3), "field offset", name,
                  "a field inside the record", layout[field]);
}

void check_records(const at::Tensor& records, const char* name, const at::Tensor& like) {
  KVCACHE_CHECK(records.dim() == 4 && like.dim() == 4, "rank", name, 4, records.dim());
  KVCACHE_CHECK(records.scalar_type() == at::kByte, "dtype", name, "uint8", records.scalar_type());
  check_tensor(records, name, {like.size(0), like.size(1), records.size(2), like.size(3)});
  KVCACHE_CHECK(records.size(2) <= 1 || records.stride(2) == records.size(3), "stride", name, records.size(3),
                records.stride(2));
}

void gather_tokens(const at::Tensor& records_in, at::Tensor records_out, const at::Tensor& index,
                   at::IntArrayRef key_layout, at::IntArrayRef value_layout) {
  check_records(records_in, "records_in", records_in);
  check_records(records_out, "records_out", records_in);
  check_layout("key_layout", records_in, key_layout);
  check_layout("value_layout", records_in, value_layout);
  const int64_t batch = records_in.size(0), heads = records_in.size(1);
  KVCACHE_CHECK(index.dim() == 3, "rank", "index", 3, index.dim());
  check_tensor(index, "index", {batch, heads, index.size(2)});
  KVCACHE_CHECK(index.scalar_type() == at::kLong, "dtype", "index", "int64", index.scalar_type());
  const int64_t count = index.size(2), length = std::min(key_layout[kPackedLength], value_layout[kPackedLength]);
  KVCACHE_CHECK(count <= records_out.size(2) * kBlockTokens, "length", "index",
                "at most " + std::to_string(records_out.size(2) * kBlockTokens), count);
  if (count == 0) return;
  KVCACHE_CHECK(!records_in.is_alias_of(records_out), "memory", "records_out", "other than that of records_in",
                "the same");
  const at::Tensor choices = index.contiguous();
  const int64_t* const slots = choices.const_data_ptr<int64_t>();
  const auto [low, high] = std::minmax_element(slots, slots + choices.numel());
  KVCACHE_CHECK(*low >= 0 && *high < length, "slots", "index", "slots in [0, " + std::to_string(length) + ")",
                std::to_string(*low) + " to " + std::to_string(*high));

  std::vector<Field> fields;
  add_side(fields, key_layout, true);
  add_side(fields, value_layout, false);
  const uint8_t* const source = records_in.const_data_ptr<uint8_t>();
  uint8_t* const target = records_out.mutable_data_ptr<uint8_t>();
  const int64_t bytes = records_in.size(3), blocks = (count + kBlockTokens - 1) / kBlockTokens;
  const bool is_serial = choices.numel() * (key_layout[kHeadDim] + value_layout[kHeadDim]) < kSerialCodes;
  run_parallel(batch * heads * blocks, is_serial, [&](int64_t task) {
    const int64_t row = task / blocks / heads, head = task / blocks % heads, block = task % blocks;
    const uint8_t* from = source + row * records_in.stride(0) + head * records_in.stride(1);
    uint8_t* to = target + row * records_out.stride(0) + head * records_out.stride(1) + block * bytes;
    const int64_t* chosen = slots + task / blocks * count + block * kBlockTokens;
    const int tokens = int(std::min<int64_t>(kBlockTokens, count - block * kBlockTokens));
    for (const Field& field : fields) {
      std::memset(to + field.offset, 0, field.bytes);
      for (int t = 0; t < tokens; ++t) {
        const uint8_t* record = from + chosen[t] / kBlockTokens * bytes + field.offset;
        const int slot = int(chosen[t] % kBlockTokens);
        if (field.move != nullptr) {
          field.move(record, slot, to + field.offset, t, field.dim);
        } else {
          std::memcpy(to + field.offset + t * field.slot_bytes, record + slot * field.slot_bytes, field.slot_bytes);
        }
      }
    }
  });
}

}  // namespace
}  // namespace kvcache

TORCH_LIBRARY_IMPL(kvcache_plugins, CPU, library) { library.impl("gather_tokens", TORCH_FN(kvcache::gather_tokens)); }
