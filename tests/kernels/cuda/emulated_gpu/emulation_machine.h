// Who watches the emulated machine, for the tests: told what happens to the memory of a launch besides plain loads and
// stores, which only a compiler can make known.
#pragma once

#include "platform.cuh"

namespace emulation {

constexpr int kLanes = 32;

struct Observer {
  virtual ~Observer() = default;
  virtual void begin_launch(const uint8_t* shared, size_t shared_bytes) = 0;
  virtual void begin_block() = 0;
  virtual void end_launch() = 0;
  // From here on accesses are those of `here.thread`, whose stack is given; after `pause` of nobody.
  virtual void resume(const uint8_t* stack, size_t stack_bytes) = 0;
  virtual void pause() = 0;
  // All threads of the block, or of a warp, have reached a barrier, and none has gone on.
  virtual void order_block() = 0;
  virtual void order_warp(int warp) = 0;
  // The running thread is about to write what others may write at the same time, the same.
  virtual void store_same(const void* to, size_t size, const void* caller) = 0;
  // The running thread has started a copy of 16 bytes, has waited for one, has ended with copies nobody waited for.
  virtual void start_copy(const void* to, const void* from, const void* caller) = 0;
  virtual void land_copy(const void* to, const void* from) = 0;
  virtual void abandon_copies() = 0;
};

extern Observer* observer;

// Shared memory starts as bytes of this. Set by kvcache_vary_emulation.
extern uint8_t garbage;

}  // namespace emulation

extern "C" {
// Products of the tensor core so far, which tells whether the fast path was taken.
long kvcache_emulated_products();
// Of this thread's launches since this was asked, a line each, which has the kernel's name and its grid.
const char* kvcache_emulated_kernels();
// In which order warps and lanes run, with 0 one after the other, else at random from this seed; and `garbage`.
void kvcache_vary_emulation(unsigned seed, int garbage);
}
