// Whole blocks by non-uniform levels, with their outliers, in two launches, and one before them that finds the ranges
// of values. Bound: every number is read a few times, from the cache where it is not the first; not measured.
#include "largest.cuh"
#include "launches.h"
#include "level_encoding.cuh"

namespace kvcache {

namespace {

constexpr int kListThreads = 1024;
constexpr int kRoom = 256;  // keys that a warp lists
constexpr int kRangeWarps = kEncodeThreads / 32;

// ---- ranges of values

// The largest number of a token, or the smallest, that is no outlier; and from which key on its numbers are.
struct End {
  float number;
  uint64_t cut;
  bool is_found;
};

KVCACHE_DEVICE End find_end(const LevelArguments& a, int64_t batch, int64_t token, uint32_t flip, uint64_t* list) {
  const NumbersOfToken numbers{a, a.run.states.row(batch, 0, token), flip};
  Largest<NumbersOfToken, CountingWarp> largest(numbers, {}, NumbersOfToken::kKeyBits, list, kRoom);
  const uint64_t cut = largest.find(a.side);
  const uint32_t next = warp_max(static_cast<uint32_t>(largest.next(cut) >> NumbersOfToken::kPlaceBits));
  warp_barrier();  // every lane has read the list
  return {number_of_order(next ^ flip), cut, next != 0};
}

// Range of a token, see TokenNonUniformCodec, into all of its heads' records. A warp's work.
KVCACHE_DEVICE void choose_range(const LevelArguments& a, int64_t batch, int64_t token, uint64_t* list) {
  const EncodeArguments& run = a.run;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const End high = find_end(a, batch, token, 0u, list), low = find_end(a, batch, token, ~0u, list);
  if (a.cuts != nullptr && lane == 0) {
    uint64_t* cuts = a.cuts + (batch * run.count + token) * 2;
    cuts[0] = high.cut;
    cuts[1] = low.cut;
  }
  const bool is_range = high.is_found && low.is_found && high.number >= low.number;
  const float top = is_range ? high.number : 0.0f, bottom = is_range ? low.number : 0.0f;
  const float scale = fmaxf(round_to_half(add_rounded(top, -bottom) / 2.0f), kSmallestRange);
  const float offset = round_to_half(add_rounded(add_rounded(top, bottom) / 2.0f, 0.0f));  // zero has no sign
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
  uint8_t* record = record_of(a, batch, head, block);
  const int64_t plain = first_plain(a, batch) - (run.start + block * kBlockTokens);
  float* missing = a.missing;
  if (missing != nullptr) missing += ((batch * a.blocks() + block) * a.heads + head) * kBlockTokens * dim;
  for (int token = thread / 32; token < kBlockTokens; token += kEncodeThreads / 32) {
    Range range{1.0f, 0.0f};
    if (!is_key) range = range_of_value(run, record, token);
    const NumbersOfRow numbers(a, batch, head, block * kBlockTokens + token);
    for (int channel = lane; channel < run.padded_dim; channel += 32) {
      if (channel >= dim) {
        codes[token * stride + channel] = 0;
        continue;
      }
      if (is_key) range = range_of_key(a, batch, head, channel);
      const float x = numbers.at(channel);
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

// Those among the keys of a block. Of a row, `64 head + token`, it tells which channels are, and what they lack.
struct OutlyingKeys {
  struct Row {
    const float* missing;
    int first;
    uint64_t cut;

    KVCACHE_DEVICE bool has(int channel) const {
      const uint64_t key = MissingOfBlock::key_of(missing[first + channel], first + channel);
      return key != 0 && key >= cut;
    }
    KVCACHE_DEVICE float missing_of(int channel) const { return missing[first + channel]; }
  };
  const float* missing;
  int dim;
  uint64_t cut;

  KVCACHE_DEVICE OutlyingKeys(const LevelArguments& a, int64_t block, int64_t batch, uint8_t* shared)
      : missing(a.missing + (batch * a.blocks() + block) * kBlockTokens * a.heads * a.run.head_dim),
        dim(a.run.head_dim) {
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const MissingOfBlock numbers{missing, kBlockTokens * a.heads * dim, warp, kListThreads / 32};
    uint64_t* lists = reinterpret_cast<uint64_t*>(shared + sizeof(uint32_t) * CountingBlock::kWords);
    Largest<MissingOfBlock, CountingBlock> largest(numbers, {reinterpret_cast<uint32_t*>(shared)},
                                                   MissingOfBlock::kKeyBits, lists + warp * kRoom, kRoom);
    cut = largest.find(2 * a.side * kBlockTokens);
  }
  KVCACHE_DEVICE Row row(int index) const { return {missing, index * dim, cut}; }
};

// The same of values, by the cuts of their tokens.
struct OutlyingValues {
  struct Row {
    const LevelArguments& a;
    NumbersOfRow numbers;
    const uint8_t* record;
    int token, place;  // of the first channel
    bool has_none;
    uint64_t high, low;

    KVCACHE_DEVICE bool has(int channel) const {
      const float x = numbers.stored(channel);
      if (has_none || !is_finite(x)) return false;
      return NumbersOfToken::key_of(x, place + channel, 0u) >= high ||
             NumbersOfToken::key_of(x, place + channel, ~0u) >= low;
    }
    KVCACHE_DEVICE float missing_of(int channel) const {
      const Range range = range_of_value(a.run, record, token);
      return code_number(numbers.stored(channel), range, a.boundaries, a.levels, a.run.nbits).missing;
    }
  };
  const LevelArguments& a;
  int64_t block, batch, plain;

  KVCACHE_DEVICE OutlyingValues(const LevelArguments& given, int64_t of_block, int64_t of_batch, uint8_t*)
      : a(given), block(of_block), batch(of_batch),
        plain(first_plain(given, of_batch) - (given.run.start + of_block * kBlockTokens)) {}

  KVCACHE_DEVICE Row row(int index) const {
    const int head = index / kBlockTokens, token = index % kBlockTokens;
    const int64_t of_run = block * kBlockTokens + token;
    const uint64_t* cuts = a.cuts + (batch * a.run.count + of_run) * 2;
    return {a, NumbersOfRow(a, batch, head, of_run), record_of(a, batch, head, block), token, head * a.run.head_dim,
            token < plain, cuts[0], cuts[1]};
  }
};

// Writes the list of a block, in the order of heads, tokens and channels: warps count theirs first.
template <class Outlying>
KVCACHE_DEVICE void write_list(const LevelArguments& a, int64_t block, int64_t batch, uint8_t* shared) {
  const Outlying outlying(a, block, batch, shared);
  constexpr int kWarps = kListThreads / 32;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32, dim = a.run.head_dim;
  const int begin = warp * (kBlockTokens / kWarps * a.heads), end = begin + kBlockTokens / kWarps * a.heads;  // rows
  uint32_t* counts = reinterpret_cast<uint32_t*>(shared);
  uint32_t count = 0;
  for (int i = begin; i < end; ++i) {
    const auto row = outlying.row(i);
    for (int channel = lane; channel < dim; channel += 32) count += row.has(channel);
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
  for (int i = begin; i < end; ++i) {
    const auto row = outlying.row(i);
    const uint32_t token = static_cast<uint32_t>(i % kBlockTokens);
    if (token == 0 && lane == 0) starts[i / kBlockTokens] = static_cast<int16_t>(at);
    for (int first = 0; first < dim; first += 32) {
      const int channel = first + lane;
      const bool is_listed = channel < dim && row.has(channel);
      const uint32_t listed = warp_vote(is_listed);
      if (is_listed) {
        const uint32_t place = token << 10 | static_cast<uint32_t>(channel), half = float_half(row.missing_of(channel));
        entries[at + count_bits(listed & ((1u << lane) - 1))] = static_cast<int32_t>(place << 16 | half);
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
  choose_range(a, blockIdx.z, token, reinterpret_cast<uint64_t*>(shared) + warp * kRoom);
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
    status = launch<range_kernel>(grid, kEncodeThreads, kRangeWarps * kRoom * sizeof(uint64_t), stream, a);
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
  return launch<key_list_kernel>(grid, kListThreads, kWords + kListThreads / 32 * kRoom * sizeof(uint64_t), stream, a);
}

}  // namespace kvcache
