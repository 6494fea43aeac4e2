// What is remembered of every byte of memory that kernels share, and which accesses nothing orders: as
// compute-sanitizer's racecheck and initcheck, and for global memory, too.
//
// Two accesses of different threads to a byte, one of them a write, must have a barrier in between: of the block, or,
// within a warp, __syncwarp. Other collectives order nothing, and neither does the order in which fibers happen to
// run. Between thread blocks of a launch nothing is ordered.
#pragma once

#include "report.h"

namespace sanitizer {

// The time of the launch: `phase` grows at every barrier of a block and with every block, and never returns, so a
// record is known to be old without being cleared; `steps` grow at barriers of warps.
struct Clock {
  uint32_t phase = 1, first_of_block = 1, first_of_launch = 1;
  uint32_t steps[32] = {};
};

// The running thread.
struct Runner {
  unsigned thread, warp, lane;
};

struct Write {
  uint32_t phase, step : 31, is_same : 1;  // is_same: as others at the same time, of which it says so, too
  uint16_t thread, copier;  // copier: one more than the thread whose copy of this byte is on its way, or 0
  Caller caller;
};

// Of the last phase in which the byte was read: all warps that did, and of the last of them the lanes since its last
// barrier. A writer needs no more: of several warps there is another than its own.
struct Read {
  uint32_t phase, step;
  uint32_t lanes, warps;
  uint16_t thread;
  uint32_t elsewhere;  // first phase of the last launch of which several blocks have read the byte
  Caller caller;
};

struct Byte {
  Write write;
  Read read;
};

// A run of bytes with their records.
struct Region {
  const char* name;
  uintptr_t begin, size;
  Byte* bytes;
  bool is_shared;  // among the threads of a block only
};

class Access {
 public:
  Access(const Clock& clock, const Region& region, Runner runner, uintptr_t address, int size, Caller caller)
      : clock_(clock), region_(region), runner_(runner), address_(address), size_(size), caller_(caller) {}

  void read() const {
    Byte* bytes = region_.bytes + (address_ - region_.begin);
    for (int i = 0; i < size_; ++i) read(bytes[i], i);
  }
  void write() const {
    Byte* bytes = region_.bytes + (address_ - region_.begin);
    for (int i = 0; i < size_; ++i) write(bytes[i], i, Kind::kPlain);
  }
  void write_same() const {
    Byte* bytes = region_.bytes + (address_ - region_.begin);
    for (int i = 0; i < size_; ++i) write(bytes[i], i, Kind::kSame);
  }
  // A copy writes at any time until it is waited for, whatever its thread has done or does meanwhile.
  void start_copy() const {
    Byte* bytes = region_.bytes + (address_ - region_.begin);
    for (int i = 0; i < size_; ++i) {
      write(bytes[i], i, Kind::kCopy);
      bytes[i].write.copier = static_cast<uint16_t>(runner_.thread + 1);
    }
  }
  void land_copy() const {
    Byte* bytes = region_.bytes + (address_ - region_.begin);
    for (int i = 0; i < size_; ++i) {
      Write& last = bytes[i].write;
      if (last.phase < clock_.first_of_block || last.copier != runner_.thread + 1)
        fail(last.caller, "a copy lands where another one was started since");
      last = {clock_.phase, clock_.steps[runner_.warp], 0, static_cast<uint16_t>(runner_.thread), 0, last.caller};
    }
  }

 private:
  enum class Kind { kPlain, kSame, kCopy };

  bool is_of_block(uint32_t phase) const { return phase >= clock_.first_of_block; }
  bool is_of_another_block(uint32_t phase) const {
    return !region_.is_shared && phase >= clock_.first_of_launch && phase < clock_.first_of_block;
  }
  // Whether no barrier lies between a write and now.
  bool is_unordered(const Write& last, bool with_own) const {
    if (last.phase != clock_.phase || (last.thread == runner_.thread && !with_own)) return false;
    return last.thread / 32u != runner_.warp || last.step == clock_.steps[runner_.warp];
  }
  void check_copies(const Write& last, int i, const char* what) const {
    if (last.copier == 0 || !is_of_block(last.phase)) return;
    race(i, what, last.copier - 1u, "is copying to it, and has not waited", last.caller);
  }

  void read(Byte& byte, int i) const {
    const Write& last = byte.write;
    check_copies(last, i, "reads");
    if (is_of_another_block(last.phase)) race(i, "reads", last.thread, "of another block has written it", last.caller);
    if (is_unordered(last, false)) race(i, "reads", last.thread, "has written it", last.caller);
    if (region_.is_shared && !is_of_block(last.phase))
      fail(caller_, "reads byte %zu of %s, which nobody has written", offset(i), region_.name);
    Read& read = byte.read;
    const uint32_t step = clock_.steps[runner_.warp];
    if (read.phase != clock_.phase) {
      if (is_of_another_block(read.phase)) read.elsewhere = clock_.first_of_launch;
      read.phase = clock_.phase;
      read.warps = 0;
      read.lanes = 0;
    } else if (read.thread / 32u != runner_.warp || read.step != step) {
      read.lanes = 0;
    }
    read.step = step;
    read.thread = static_cast<uint16_t>(runner_.thread);
    read.warps |= 1u << runner_.warp;
    read.lanes |= 1u << runner_.lane;
    read.caller = caller_;
  }

  void write(Byte& byte, int i, Kind kind) const {
    Write& last = byte.write;
    const Read& read = byte.read;
    const bool with_own = kind == Kind::kCopy, is_same = kind == Kind::kSame;
    const char* what = with_own ? "starts a copy to" : "writes";
    check_copies(last, i, what);
    if (is_of_another_block(last.phase)) race(i, what, last.thread, "of another block has written it", last.caller);
    if (is_of_another_block(read.phase) ||
        (!region_.is_shared && is_of_block(read.phase) && read.elsewhere == clock_.first_of_launch))
      race(i, what, read.thread, "of another block has read it", read.caller);
    if (is_unordered(last, with_own) && !(is_same && last.is_same))
      race(i, what, last.thread, "has written it", last.caller);
    if (read.phase == clock_.phase) {
      const uint32_t others = with_own ? read.lanes : read.lanes & ~(1u << runner_.lane);
      const bool is_own_warp = read.thread / 32u == runner_.warp && read.step == clock_.steps[runner_.warp];
      if ((read.warps & ~(1u << runner_.warp)) != 0 || (is_own_warp && others != 0))
        race(i, what, read.thread, "has read it", read.caller);
    }
    last = {clock_.phase, clock_.steps[runner_.warp], is_same, static_cast<uint16_t>(runner_.thread), 0, caller_};
  }

  size_t offset(int i) const { return address_ - region_.begin + static_cast<size_t>(i); }

  [[noreturn]] void race(int i, const char* what, unsigned other, const char* has_done, Caller caller) const {
    fail(caller_, "race: %s byte %zu of %s, and no barrier since thread %u %s%s", what, offset(i), region_.name, other,
         has_done, source_of(caller).c_str());
  }

  const Clock& clock_;
  const Region& region_;
  Runner runner_;
  uintptr_t address_;
  int size_;
  Caller caller_;
};

}  // namespace sanitizer
