// Codes and metadata of chosen slots, moved to other records bit for bit: a thread block writes one record, a thread
// whole words of it, so that nothing is written twice and nothing need be cleared. Bound: a read per code of the
// source, scattered over its records; not measured.
#include "launches.h"
#include "platform.cuh"

namespace kvcache {

// One thread block's record, and the slots it is made of.
struct Target {
  const uint8_t* from;
  uint8_t* record;
  const int64_t* chosen;
  int64_t from_bytes, length;
  int tokens;  // of the record that exist
  int32_t* fault;

  // Record and slot of a token of the target; false if it is to be zero.
  KVCACHE_DEVICE bool source(int token, const uint8_t** found, int* slot) const {
    if (token >= tokens) return false;
    const int64_t place = chosen[token];
    if (place < 0 || place >= length) {
      raise_flag(fault);
      return false;
    }
    *found = from + place / kBlockTokens * from_bytes;
    *slot = static_cast<int>(place % kBlockTokens);
    return true;
  }
};

KVCACHE_DEVICE void gather_plane(const Target& target, const Fields& fields, int offset, int bits, bool is_key) {
  const bool interleaved = fields.interleaved != 0;
  const int words = plane_bytes(bits, fields.padded_dim) / (bits == 8 ? 1 : 2), codes = bits == 8 ? 1 : 16 / bits;
  for (int word = static_cast<int>(threadIdx.x); word < words; word += static_cast<int>(blockDim.x)) {
    uint32_t gathered = 0;
    for (int i = 0; i < codes; ++i) {
      const CodeOwner owner = code_owner(bits, fields.padded_dim, is_key, interleaved, word, i);
      const uint8_t* record;
      int slot;
      if (target.source(owner.token, &record, &slot))
        gathered |= read_plane(record + offset, bits, fields.padded_dim, is_key, interleaved, slot, owner.channel)
                    << bits * i;
    }
    if (bits == 8) {
      target.record[offset + word] = static_cast<uint8_t>(gathered);
    } else {
      reinterpret_cast<uint16_t*>(target.record + offset)[word] = static_cast<uint16_t>(gathered);
    }
  }
}

KVCACHE_DEVICE void gather_rows(const Target& target, const Fields& fields, int offset) {
  if (offset < 0) return;
  const int bytes = fields.width * fields.metadata_bytes;
  for (int i = static_cast<int>(threadIdx.x); i < kBlockTokens * bytes / 2; i += static_cast<int>(blockDim.x)) {
    const uint8_t* record;
    int slot;
    const bool is_kept = target.source(2 * i / bytes, &record, &slot);
    reinterpret_cast<uint16_t*>(target.record + offset)[i] =
        is_kept ? *reinterpret_cast<const uint16_t*>(record + offset + slot * bytes + 2 * i % bytes) : 0;
  }
}

KVCACHE_DEVICE void gather_side(const Target& target, const Fields& fields, bool is_key) {
  if (fields.nbits == 3) {
    gather_plane(target, fields, fields.codes_offset, 2, is_key);
    gather_plane(target, fields, fields.codes_offset + plane_bytes(2, fields.padded_dim), 1, is_key);
  } else {
    gather_plane(target, fields, fields.codes_offset, fields.nbits, is_key);
  }
  gather_rows(target, fields, fields.scale_offset);
  gather_rows(target, fields, fields.minimum_offset);
}

KVCACHE_KERNEL(256, 2) gather_kernel(const GatherArguments a) {
  const int64_t block = blockIdx.x, head = blockIdx.y, batch = blockIdx.z;
  const int64_t left = a.count - block * kBlockTokens;
  const Target target{a.from.of(batch, head),
                      a.to + batch * a.to_batch_stride + head * a.to_head_stride + block * a.from.record_bytes,
                      a.index + (batch * a.from.heads + head) * a.count + block * kBlockTokens,
                      a.from.record_bytes,
                      a.length,
                      static_cast<int>(left < kBlockTokens ? left : kBlockTokens),
                      a.fault};
  gather_side(target, a.key, true);
  gather_side(target, a.value, false);
}

int gather_slots(const GatherArguments& a, int batch, void* stream) {
  dim3 grid;
  grid.x = static_cast<unsigned>((a.count + kBlockTokens - 1) / kBlockTokens);
  grid.y = static_cast<unsigned>(a.from.heads);
  grid.z = static_cast<unsigned>(batch);
  return launch<gather_kernel>(grid, 256, 0, stream, a);
}

}  // namespace kvcache
