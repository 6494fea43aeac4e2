// Loads, stores and asynchronous copies, with what a GPU may let pass: memory that nobody has written, uses of a copy
// that is under way, and accesses that no barrier orders.
#include <cstring>

#include "machine.h"

namespace ptx {
namespace {

void check_alignment(const Warp& w, const Instruction& i, uint64_t address, int size) {
  if (address % size != 0) fail(w, i, "address %#llx is not aligned to %d", (unsigned long long)address, size);
}

// Memory that is only asked for, as which any kernel's may be.
uint8_t* asked_for(const Warp& w, const Instruction& i, uint64_t address, int size) {
  check_alignment(w, i, address, size);
  // volatile is what the host may read meanwhile, which is no tensor
  if (!i.is_volatile && !is_in_a_tensor(address, size))
    fail(w, i, "%d bytes at %#llx are outside of all tensors", size, (unsigned long long)address);
  return reinterpret_cast<uint8_t*>(address);
}

uint8_t* global(const Warp& w, const Instruction& i, uint64_t address, int size) {
  if (!w.is_alone) fail(w, i, "is not to be done before the kernel before this one has ended");
  return asked_for(w, i, address, size);
}

const uint8_t* parameter(const Warp& w, const Instruction& i, uint64_t address, int size) {
  const uint64_t at = address - kParameterBase;
  if (at > w.kernel->parameter_bytes - size) fail(w, i, "no parameter at byte %lld", (long long)at);
  check_alignment(w, i, at, size);
  return w.block->parameters + at;
}

// Offset in shared memory.
uint32_t shared(const Warp& w, const Instruction& i, uint64_t address, int size) {
  const int64_t at = static_cast<uint32_t>(address) - static_cast<int64_t>(kSharedBase);
  check_alignment(w, i, address, size);
  if (at < 0 || at + size > static_cast<int64_t>(w.block->shared_bytes))
    fail(w, i, "shared byte %lld is outside of %zu bytes", (long long)at, w.block->shared_bytes);
  return static_cast<uint32_t>(at);
}

// Whether nothing orders an access of this block by `thread` and what the running warp does now.
bool is_unordered(const Warp& w, int thread, uint32_t step) { return thread / kLanes != w.index || step == w.step; }

// Those of `size` bytes from `at` on that are used: a bit each. Most of what kernels do is to read shared memory, hence
// what is the same for all of its bytes is looked up once.
void read_bytes(const Warp& w, const Instruction& i, int lane, uint32_t at, int size) {
  const Block& block = *w.block;
  const uint32_t first_phase = block.first_phase, phase = block.phase, step = w.step, used = i.used;
  const uint32_t this_warp = 1u << w.index, this_lane = 1u << lane;
  const int thread = w.thread(lane);
  SharedByte* const bytes = block.records + at;
  for (int k = 0; k < size; ++k) {
    if ((used >> k & 1) == 0) continue;
    SharedByte& byte = bytes[k];
    if (byte.write_phase < first_phase)
      fail(w, i, "thread %d reads shared byte %u, which nobody has written", thread, at + k);
    if (byte.is_pending)
      fail(w, i, "thread %d reads shared byte %u, to which thread %d copies", thread, at + k, byte.writer);
    if (byte.writer != thread && byte.write_phase == phase && is_unordered(w, byte.writer, byte.write_step))
      fail(w, i, "thread %d reads shared byte %u, no barrier after thread %d wrote it", thread, at + k, byte.writer);
    const uint32_t warps = byte.read_phase == phase ? byte.read_warps : 0;
    const uint32_t lanes = warps == this_warp && byte.read_step == step ? byte.read_lanes : 0;
    byte.read_phase = phase;
    byte.read_step = step;
    byte.read_warps = warps | this_warp;
    byte.read_lanes = lanes | this_lane;
  }
}

// `is_same`: what the byte holds is not changed.
void write_byte(Warp& w, const Instruction& i, int lane, uint32_t at, bool is_same, bool is_copy) {
  const Block& block = *w.block;
  SharedByte& byte = block.records[at];
  const int thread = w.thread(lane);
  const bool is_written = byte.write_phase >= block.first_phase;
  if (is_written && byte.is_pending)
    fail(w, i, "thread %d writes shared byte %u, to which thread %d copies", thread, at, byte.writer);
  const bool is_of_others = byte.writer != thread && byte.write_phase == block.phase && !is_same;
  if (is_of_others && is_unordered(w, byte.writer, byte.write_step))
    fail(w, i, "thread %d writes shared byte %u, no barrier after thread %d wrote it", thread, at, byte.writer);
  const bool is_read_elsewhere = (byte.read_warps & ~(1u << w.index)) != 0;
  const bool is_read_here = byte.read_step == w.step && (byte.read_lanes & ~(1u << lane)) != 0;
  if (byte.read_phase == block.phase && (is_read_elsewhere || is_read_here))
    fail(w, i, "thread %d writes shared byte %u, no barrier after others read it", thread, at);
  byte.writer = static_cast<int16_t>(thread);
  byte.write_phase = block.phase;
  byte.write_step = w.step;
  byte.is_pending = is_copy;
}

// cp.async.cg: 16 bytes, from global to shared memory; they land when they are waited for.
void start_copy(Warp& w, const Instruction& i, uint32_t lanes) {
  const uint64_t *to = w[i.from[0]], *from = w[i.from[1]];
  if (*w[i.from[2]] != 16) fail(w, i, "a copy of another size than 16");
  if (Count* const count = w.count_of(i)) {
    count_shared(*count, to, 0, 16, lanes, false);
    count_global(*count, from, 0, 16, lanes);
  }
  for_lanes(lanes, [&](int lane) {
    const uint32_t at = shared(w, i, to[lane], 16);
    w.open[lane].push_back({at, global(w, i, from[lane], 16)});
    for (int k = 0; k < 16; ++k) write_byte(w, i, lane, at + k, false, true);
  });
}

// prefetch: what is asked for must be there.
void prefetch(Warp& w, const Instruction& i, uint32_t lanes) {
  for_lanes(lanes, [&](int lane) { asked_for(w, i, w[i.from[0]][lane], 1); });
}

// The same of a run of bytes.
void prefetch_run(Warp& w, const Instruction& i, uint32_t lanes) {
  for_lanes(lanes, [&](int lane) {
    const uint64_t from = w[i.from[0]][lane], bytes = w[i.from[1]][lane] & 0xffffffff;
    if (from % 16 != 0 || bytes % 16 != 0 || bytes == 0) fail(w, i, "a run that is not of whole 16 bytes");
    for (uint64_t at = from; at < from + bytes; at += 16) asked_for(w, i, at, 16);
  });
}

void commit_copies(Warp& w, const Instruction&, uint32_t lanes) {
  for_lanes(lanes, [&](int lane) { w.copies[lane].push_back(std::exchange(w.open[lane], {})); });
}

// Until at most so many groups are under way.
void wait_for_copies(Warp& w, const Instruction& i, uint32_t lanes) {
  const size_t most = *w[i.from[0]];
  for_lanes(lanes, [&](int lane) {
    auto& groups = w.copies[lane];
    for (; groups.size() > most; groups.erase(groups.begin())) {
      for (const Copy& copy : groups.front()) {
        std::memcpy(w.block->shared + copy.to, copy.from, 16);
        for (SharedByte* byte = w.block->records + copy.to; byte < w.block->records + copy.to + 16; ++byte) {
          byte->is_pending = false;  // written by now, and not when the copy was started
          byte->write_phase = w.block->phase;
          byte->write_step = w.step;
        }
      }
    }
  });
}

void count_access(const Warp& w, const Instruction& i, const uint64_t* addresses, int size, uint32_t lanes,
                  bool is_load) {
  Count* const count = w.count_of(i);
  if (count == nullptr) return;
  if (i.space == Space::kShared) count_shared(*count, addresses, i.offset, size, lanes, is_load);
  if (i.space == Space::kGlobal) count_global(*count, addresses, i.offset, size, lanes);
}

}  // namespace

namespace {

// Loads numbers of so many bytes.
template <int kBytes>
void load_numbers(Warp& w, const Instruction& i, uint32_t lanes) {
  const uint64_t* addresses = w[i.from[0]];
  const int size = kBytes * i.to.size;
  count_access(w, i, addresses, size, lanes, true);
  for_lanes(lanes, [&](int lane) {
    const uint64_t address = addresses[lane] + i.offset;
    const uint8_t* from;
    if (i.space == Space::kGlobal) {
      from = global(w, i, address, size);
    } else if (i.space == Space::kParameter) {
      from = parameter(w, i, address, size);
    } else {
      const uint32_t at = shared(w, i, address, size);
      read_bytes(w, i, lane, at, size);
      from = w.block->shared + at;
    }
    for (const int number : i.to) {
      uint64_t bits = 0;
      std::memcpy(&bits, from, kBytes);
      constexpr int kUnused = 64 - 8 * kBytes;
      if (i.is_signed) bits = static_cast<uint64_t>(static_cast<int64_t>(bits << kUnused) >> kUnused);
      w[number][lane] = cut(bits, w.kernel->widths[number]);
      from += kBytes;
    }
  });
}

}  // namespace

void load(Warp& w, const Instruction& i, uint32_t lanes) {
  switch (i.bytes) {
    case 1: return load_numbers<1>(w, i, lanes);
    case 2: return load_numbers<2>(w, i, lanes);
    case 4: return load_numbers<4>(w, i, lanes);
    case 8: return load_numbers<8>(w, i, lanes);
    default: fail(w, i, "loads numbers of %d bytes", i.bytes);
  }
}

void store(Warp& w, const Instruction& i, uint32_t lanes) {
  const uint64_t* addresses = w[i.from[0]];
  const int count = i.from.size - 1, size = i.bytes * count;
  count_access(w, i, addresses, size, lanes, false);
  for_lanes(lanes, [&](int lane) {
    uint8_t bytes[16];
    for (int k = 0; k < count; ++k) std::memcpy(bytes + k * i.bytes, &w[i.from[1 + k]][lane], i.bytes);
    const uint64_t address = addresses[lane] + i.offset;
    uint8_t* to;
    if (i.space == Space::kGlobal) {
      to = global(w, i, address, size);
    } else {
      const uint32_t at = shared(w, i, address, size);
      to = w.block->shared + at;
      for (int k = 0; k < size; ++k) write_byte(w, i, lane, at + k, to[k] == bytes[k], false);
    }
    std::memcpy(to, bytes, size);
  });
}

void add_copies(Operations& table) {
  table["cp.async.cg.shared.global"] = start_copy;
  table["prefetch.global.L2"] = prefetch;
  table["cp.async.bulk.prefetch.L2.global"] = prefetch_run;
  table["cp.async.commit_group"] = commit_copies;
  table["cp.async.wait_group"] = wait_for_copies;
}

}  // namespace ptx
