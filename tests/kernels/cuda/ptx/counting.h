// What instructions ask of a GPU's memories, counted where somebody wants to know.
//
// Shared memory has 32 banks, word n of 4 bytes in bank n % 32, and hands out up to one word of each bank at a time: a
// wavefront. Lanes that want the same word share it; words of the same bank wait for each other. Lanes are served
// together as far as 128 bytes go: all of a warp where each has up to 4 bytes, half a warp of 8 bytes, a quarter of
// 16. Of loads it is twice as many if each lane n and its neighbour n ^ 1 (or n ^ 2 each), where both take part, have
// the same address. As many wavefronts as there are such parts are the least; all others are bank conflicts, as
// profilers count them too.
//     banks, words that are shared: CUDA C++ Programming Guide, section on shared memory of compute capability 5.x
//     parts of a warp: forums.developer.nvidia.com/t/359822, on conflicts and wavefronts of 128-bit loads
//     neighbours with one address: forums.developer.nvidia.com/t/77228, of compute capability 7.x
//
// Global memory moves sectors, 32 bytes aligned to as many (Nsight Compute documentation, metrics decoder), each once
// for an instruction of a warp. What another instruction may find in a cache is counted again.
#pragma once

#include <cstdint>

namespace ptx {

// Of one instruction, over all warps.
struct Count {
  uint64_t times = 0;
  uint64_t wavefronts = 0, least = 0;  // of shared memory
  uint64_t sectors = 0, bytes = 0;     // of global memory; bytes that lanes share are one
};

// An access of `size` bytes by each of these lanes, lane n at addresses[n] + offset.
void count_shared(Count& count, const uint64_t* addresses, int64_t offset, int size, uint32_t lanes, bool is_load);
void count_global(Count& count, const uint64_t* addresses, int64_t offset, int size, uint32_t lanes);

}  // namespace ptx
