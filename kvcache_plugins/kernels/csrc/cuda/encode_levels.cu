// Whole blocks by non-uniform levels, with their outliers, in two launches, and one before them that finds the ranges
// of values. Bound: every number is read a few times, from the cache where it is not the first; not measured.
#include "largest.cuh"
#include "launches.h"
#include "level_encoding.cuh"

namespace kvcache {

namespace {

constexpr int kListThreads = 1024;
constexpr int kRangeRoom = 512, kListRoom = 1024;  // places that a warp lists
constexpr int kRangeWarps = kEncodeThreads / 32;

// ---- ranges of values

// Range of a token, see TokenNonUniformCodec, into all of its heads' records; and from which keys on its numbers are
// outliers, of the largest and of the smallest. A warp's work.
KVCACHE_DEVICE void choose_range(const LevelArguments& a, int64_t batch, int64_t token, uint16_t* list) {
  const EncodeArguments& run = a.run;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  float ends[2] = {};
  bool are_found = true;
  for (int end = 0; end < 2; ++end) {
    const NumbersOfToken numbers{a, batch, run.start + token, end == 0 ? 1.0f : -1.0f};
    Largest<NumbersOfToken, CountingWarp> largest(numbers, {}, NumbersOfToken::kKeyBits, list, kRangeRoom);
    const uint64_t cut = largest.find(a.side);
    const uint32_t next = warp_max(static_cast<uint32_t>(largest.next(cut) >> NumbersOfToken::kPlaceBits));
    are_found &= next != 0;
    ends[end] = number_of_order(next) * numbers.sign;
    if (a.cuts != nullptr && lane == 0) a.cuts[(batch * run.count + token) * 2 + end] = cut;
    warp_barrier();  // every lane has read the list
  }
  if (!are_found || !(ends[0] >= ends[1])) ends[0] = ends[1] = 0.0f;
  const float scale = fmaxf(round_to_half(add_rounded(ends[0], -ends[1]) / 2.0f), kSmallestRange);
  const float offset = round_to_half(add_rounded(add_rounded(ends[0], ends[1]) / 2.0f, 0.0f));  // zero has no sign
  const int row = static_cast<int>(token % kBlockTokens);
  for (int head = lane; head < a.heads; head += 32) {
    uint8_t* record = record_of(a, batch, head, token / kBlockTokens);
    store_metadata(run, record + run.scale_offset, row, scale);
    store_metadata(run, record + run.minimum_offset, row, offset);
  }
}

// ---- codes

// Codes of a block of one head, through bytes [64][padded_dim + 4] in shared memory; of the four more, banks are seldom
// met by two. Behind them are the levels and what lies between them.
KVCACHE_DEVICE void encode_head(const LevelArguments& a, int64_t block, int64_t head, int64_t batch, uint8_t* codes) {
  const EncodeArguments& run = a.run;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, dim = run.head_dim;
  const int stride = run.padded_dim + 4, count = 1 << run.nbits;
  const bool is_key = run.is_key != 0;
  float* levels = reinterpret_cast<float*>(codes + kBlockTokens * stride);
  float* boundaries = levels + count;
  if (thread < count) levels[thread] = a.levels[thread];
  if (thread < count - 1) boundaries[thread] = a.boundaries[thread];
  block_barrier();
  const Tokens tokens{run, batch, head};
  uint8_t* record = record_of(a, batch, head, block);
  const int64_t plain = first_plain(a, batch) - (run.start + block * kBlockTokens);
  float* missing = a.missing;
  if (missing != nullptr) missing += ((batch * a.blocks() + block) * a.heads + head) * kBlockTokens * dim;
  for (int token = thread / 32; token < kBlockTokens; token += kEncodeThreads / 32) {
    Range range{1.0f, 0.0f};
    if (!is_key) range = range_of_value(run, record, token);
    for (int channel = lane; channel < run.padded_dim; channel += 32) {
      if (channel >= dim) {
        codes[token * stride + channel] = 0;
        continue;
      }
      if (is_key) range = range_of_key(a, batch, head, channel);
      const float x = number_of(a, tokens, block * kBlockTokens + token, channel);
      const Coded coded = code_number(x, range, boundaries, levels, run.nbits);
      codes[token * stride + channel] = static_cast<uint8_t>(coded.code);
      if (missing == nullptr) continue;
      missing[token * dim + channel] = is_finite(x) && token >= plain ? coded.missing : bits_float(kNoOutlier);
    }
  }
  block_barrier();
  uint8_t* plane = record + run.codes_offset;
  const int planes = run.nbits == 3 ? 2 : 1;  // of 3 bits, two and one
  for (int i = 0, drop = 0; i < planes; ++i) {
    const int bits = planes == 1 ? run.nbits : 2 - i, bytes = plane_bytes(bits, run.padded_dim);
    for (int word = thread; word < bytes / 2; word += kEncodeThreads) {
      uint32_t packed = 0;
      for (int k = 0; k < 16 / bits; ++k) {
        const CodeOwner owner = code_owner(bits, run.padded_dim, is_key, run.interleaved != 0, word, k);
        const uint32_t code = codes[owner.token * stride + owner.channel];
        packed |= (code >> drop & ((1u << bits) - 1)) << bits * k;
      }
      reinterpret_cast<uint16_t*>(plane)[word] = static_cast<uint16_t>(packed);
    }
    plane += bytes;
    drop += bits;
  }
}

// ---- lists of outliers

// Which keys of a block are outliers.
struct OutlyingKeys {
  const LevelArguments& a;
  const float* missing;
  uint64_t cut;

  KVCACHE_DEVICE OutlyingKeys(const LevelArguments& given, int64_t block, int64_t batch, uint8_t* shared)
      : a(given), missing(nullptr), cut(0) {
    const int thread = static_cast<int>(threadIdx.x), size = kBlockTokens * a.heads * a.run.head_dim;
    missing = a.missing + (batch * a.blocks() + block) * size;
    const MissingOfBlock numbers{missing, size, thread / 32, kListThreads / 32};
    uint16_t* lists = reinterpret_cast<uint16_t*>(shared + sizeof(uint32_t) * CountingBlock::kWords);
    Largest<MissingOfBlock, CountingBlock> largest(numbers, {reinterpret_cast<uint32_t*>(shared)},
                                                   MissingOfBlock::kKeyBits, lists + thread / 32 * kListRoom,
                                                   kListRoom);
    cut = largest.find(2 * a.side * kBlockTokens);
  }

  // Row `64 head + token`.
  KVCACHE_DEVICE bool has(int row, int channel) const {
    const int i = row * a.run.head_dim + channel;
    const uint64_t key = MissingOfBlock::key_of(missing[i], i);
    return key != 0 && key >= cut;
  }
  KVCACHE_DEVICE float missing_of(int row, int channel) const { return missing[row * a.run.head_dim + channel]; }
};

// Which values of a block are.
struct OutlyingValues {
  const LevelArguments& a;
  int64_t block, batch, plain;

  KVCACHE_DEVICE OutlyingValues(const LevelArguments& given, int64_t of_block, int64_t of_batch, uint8_t*)
      : a(given), block(of_block), batch(of_batch),
        plain(first_plain(given, of_batch) - (given.run.start + of_block * kBlockTokens)) {}

  KVCACHE_DEVICE float number(int row, int channel) const {
    const int64_t slot = a.run.start + block * kBlockTokens + row % kBlockTokens;
    return Tokens{a.run, batch, row / kBlockTokens}.stored(slot, channel);
  }
  KVCACHE_DEVICE bool has(int row, int channel) const {
    const int token = row % kBlockTokens, place = row / kBlockTokens * a.run.head_dim + channel;
    const float x = number(row, channel);
    if (token < plain || !is_finite(x)) return false;
    const uint64_t* cuts = a.cuts + (batch * a.run.count + block * kBlockTokens + token) * 2;
    return NumbersOfToken::key_of(x, place) >= cuts[0] || NumbersOfToken::key_of(-x, place) >= cuts[1];
  }
  KVCACHE_DEVICE float missing_of(int row, int channel) const {
    const Range range = range_of_value(a.run, record_of(a, batch, row / kBlockTokens, block), row % kBlockTokens);
    return code_number(number(row, channel), range, a.boundaries, a.levels, a.run.nbits).missing;
  }
};

// Writes the list of a block, in the order of heads, tokens and channels: warps count theirs first.
template <class Outlying>
KVCACHE_DEVICE void write_list(const LevelArguments& a, int64_t block, int64_t batch, uint8_t* shared) {
  const Outlying outlying(a, block, batch, shared);
  constexpr int kWarps = kListThreads / 32;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32, dim = a.run.head_dim;
  const int rows = 64 / kWarps * a.heads;  // of a warp
  uint32_t* counts = reinterpret_cast<uint32_t*>(shared);
  uint32_t count = 0;
  for (int row = warp * rows; row < (warp + 1) * rows; ++row) {
    for (int channel = lane; channel < dim; channel += 32) count += outlying.has(row, channel);
  }
  count = warp_sum(count);
  block_barrier();  // what `outlying` had in shared memory has been read
  if (lane == 0) counts[warp] = count;
  block_barrier();
  const uint32_t found = counts[lane];
  int at = static_cast<int>(warp_sum(lane < warp ? found : 0));
  const int total = static_cast<int>(warp_sum(found));
  const int64_t list = a.list_of(batch, block);
  int32_t* entries = a.entries + list * a.width;
  int16_t* starts = a.starts + list * (a.heads + 1);
  for (int row = warp * rows; row < (warp + 1) * rows; ++row) {
    const uint32_t token = static_cast<uint32_t>(row % kBlockTokens);
    if (token == 0 && lane == 0) starts[row / kBlockTokens] = static_cast<int16_t>(at);
    for (int first = 0; first < dim; first += 32) {
      const int channel = first + lane;
      const bool is_listed = channel < dim && outlying.has(row, channel);
      const uint32_t listed = warp_vote(is_listed);
      if (is_listed) {
        const uint32_t missing = float_half(outlying.missing_of(row, channel));
        const uint32_t entry = (token << 10 | static_cast<uint32_t>(channel)) << 16 | missing;
        entries[at + count_bits(listed & ((1u << lane) - 1))] = static_cast<int32_t>(entry);
      }
      at += count_bits(listed);
    }
  }
  if (thread == 0) starts[a.heads] = static_cast<int16_t>(total);
  for (int64_t i = total + thread; i < a.width; i += kListThreads) entries[i] = 0;
}

}  // namespace

KVCACHE_KERNEL(kEncodeThreads, 2) range_kernel(const LevelArguments a) {
  KVCACHE_SHARED(shared);
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int64_t token = static_cast<int64_t>(blockIdx.x) * kRangeWarps + warp;
  choose_range(a, blockIdx.z, token, reinterpret_cast<uint16_t*>(shared) + warp * kRangeRoom);
}

KVCACHE_KERNEL(kEncodeThreads, 2) level_kernel(const LevelArguments a) {
  KVCACHE_SHARED(shared);
  encode_head(a, blockIdx.x, blockIdx.y, blockIdx.z, shared);
}

KVCACHE_KERNEL(kListThreads, 1) key_list_kernel(const LevelArguments a) {
  KVCACHE_SHARED(shared);
  write_list<OutlyingKeys>(a, blockIdx.x, blockIdx.z, shared);
}

KVCACHE_KERNEL(kListThreads, 1) value_list_kernel(const LevelArguments a) {
  KVCACHE_SHARED(shared);
  write_list<OutlyingValues>(a, blockIdx.x, blockIdx.z, shared);
}

int encode_blocks(const LevelArguments& a, int batch, void* stream) {
  const bool is_key = a.run.is_key != 0;
  constexpr int kWords = sizeof(uint32_t) * CountingBlock::kWords;
  dim3 grid;
  grid.z = static_cast<unsigned>(batch);
  int status = 0;
  if (!is_key) {
    grid.x = static_cast<unsigned>(a.run.count / kRangeWarps);
    status = launch<range_kernel>(grid, kEncodeThreads, kRangeWarps * kRangeRoom * 2, stream, a);
  }
  grid.x = static_cast<unsigned>(a.blocks());
  if (status == 0) {
    dim3 heads = grid;
    heads.y = static_cast<unsigned>(a.heads);
    const int shared_bytes = kBlockTokens * (a.run.padded_dim + 4) + 4 * (2 << a.run.nbits);
    status = launch<level_kernel>(heads, kEncodeThreads, shared_bytes, stream, a);
  }
  if (status != 0 || a.entries == nullptr) return status;
  if (!is_key) return launch<value_list_kernel>(grid, kListThreads, kWords, stream, a);
  return launch<key_list_kernel>(grid, kListThreads, kWords + kListThreads / 32 * kListRoom * 2, stream, a);
}

}  // namespace kvcache
